"""Finds out the kind of a server's memory by three short prompts: no route tells it.

48 tokens, then 8 more           48 reused: no sliding window
the same 50 tokens, then others  50 reused: can be cut anywhere; fewer: from a checkpoint; 0: there is none
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules
from engine_adapter.llama_server.discovery import WITH_WINDOW, ServerFacts, caches_in, prefill
from engine_adapter.prompt.gguf_tokenizer import read_metadata

_FIRST, _CUT = 48, 50
# The window of a model whose file kvpin cannot read: a guess.
_WINDOW = 1024


class MemoryKind(msgspec.Struct, frozen=True):
    """What a probe finds out of the memory of a server."""

    is_recurrent: bool
    has_window: bool
    has_checkpoints: bool
    has_window_in_files: bool


async def probe_memory(
    control: ControlClient, slot_id: int, slots: int, *, file: str | None, ram_cache: bool = False
) -> MemoryKind:
    """Tries out the memory. The content of slot `slot_id` is lost; takes about 70 tokens.

    A window of fewer than 50 tokens is not found, and with `ram_cache` (`--cache-ram`) only what its files
    hold. Leaves `file`, about 50 bytes, in the server's save directory; None if it cannot save. Raises
    EngineRejected if that fails.
    """
    grown, cut = (_FIRST, _CUT) if ram_cache else await _tried(control, slot_id)
    has_window = grown < _FIRST
    return MemoryKind(
        is_recurrent=not has_window and cut < _CUT,
        has_window=has_window,
        has_checkpoints=cut > 0,
        has_window_in_files=file is not None and await _has_window_in_files(control, slot_id, slots, file),
    )


async def _tried(control: ControlClient, slot_id: int) -> tuple[int, int]:
    """Tokens that the server reuses of a prompt that goes on, and of one that leaves the slot's content."""
    first, others = list(range(210, 210 + _FIRST)), list(range(310, 318))
    await prefill(control, first, slot_id)
    grown = await prefill(control, [*first, *others], slot_id)
    return grown, await prefill(control, [*first, *others[: _CUT - _FIRST], *others], slot_id)


async def _has_window_in_files(control: ControlClient, slot_id: int, slots: int, file: str) -> bool:
    await slot_io.erase(control, slot_id)
    return caches_in((await slot_io.save(control, slot_id, file)).size, slots) == WITH_WINDOW


def memory_rules(kind: MemoryKind, facts: ServerFacts) -> MemoryRules:
    """The rules of a memory of this kind, with the server's default flags. Reads the model's file."""
    if not kind.is_recurrent and not kind.has_window:
        return replace(PLAIN, loses_window=kind.has_window_in_files)
    window = _window(facts.local_model) if kind.has_window else 0
    return MemoryRules(
        slot_ctx=facts.slot_ctx,
        window=_WINDOW if window is None else window,
        is_recurrent=kind.is_recurrent,
        most=PLAIN.most if kind.has_checkpoints else 0,
        is_sure=window is not None,
    )


def _window(model: Path | None) -> int | None:
    """The sliding window of a model by its file, None if that does not tell."""
    if model is None:
        return None
    try:
        found = read_metadata(model)
    except (OSError, ValueError):
        return None
    window = found.get(f"{found.get('general.architecture')}.attention.sliding_window")
    return window if isinstance(window, int) and window > 0 else None
