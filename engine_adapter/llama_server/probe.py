"""Tries out what no route of a llama-server tells: its own prompt cache, how slots share KV, its memory.

Each probe computes a few short prompts on one slot, whose content is lost. The caller chooses it, and when.
The kind of the memory shows in how much is reused:

48 tokens, then 8 more           48 reused: no sliding window
the same 50 tokens, then others  50 reused: can be cut anywhere; fewer: from a checkpoint; 0: there is none
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import xxhash

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules
from engine_adapter.llama_server.discovery import MemoryKind, ServerFacts
from engine_adapter.prompt.gguf_tokenizer import read_metadata
from engine_adapter.types import EngineSpec

_PROBE_TOKENS = 48
_STATE_WORDS = 7  # of an empty slot's file, before its caches: magic, version, 4 of tokens and their count
# Caches of a model with plain attention, and of one that has sliding windows too.
_PLAIN_ATTENTION, _WITH_WINDOW = 1, 2
_FIRST, _CUT = 48, 50
# The window of a model whose file kvpin cannot read: a guess.
_WINDOW = 1024


def probe_file(spec: EngineSpec | None = None) -> str:
    """The name of the small file that a probe leaves behind: a new one, because servers may share a
    directory; or that of a server whose directory kvpin does not know, where the next probe overwrites it."""
    name = uuid4().hex if spec is None else xxhash.xxh3_64_hexdigest(f"{spec.url} {spec.model}".encode())
    return f"kvpin-probe-{name}.bin"


async def probe(control: ControlClient, facts: ServerFacts, slot_id: int, *, file: str | None) -> ServerFacts:
    """Completes `facts` by trying. Slot `slot_id` must be idle; its content is lost.

    A server that can save leaves `file`, about 50 bytes, in its directory; with None it saves nothing, and
    only its answers tell. A window of fewer than 50 tokens is not found, and beside `--cache-ram` only what a
    file holds. Takes a few milliseconds on an idle server, plus the prefill of about 220 tokens.
    """
    ram_cache = await _has_ram_cache(control, slot_id)
    caches, is_unified, can_save = None, facts.is_unified, facts.can_save
    if can_save and file is not None:
        try:
            await slot_io.erase(control, slot_id)
            size = (await slot_io.save(control, slot_id, file)).size
        except EngineRejected:
            can_save = False  # the directory is gone or full; the server can still be used
        else:
            # The file of an empty slot counts the cells of each stream, and a unified pool is one stream.
            caches = _caches_in(size, facts.slots)
            if is_unified is None and (caches or _caches_in(size, 1)):
                is_unified = caches is None
    kind = None
    if not is_unified:
        grown, cut = (_FIRST, _CUT) if ram_cache else await _tried(control, slot_id)
        has_window = grown < _FIRST
        kind = MemoryKind(
            is_recurrent=not has_window and cut < _CUT,
            has_window=has_window,
            has_checkpoints=cut > 0,
            has_window_in_files=caches == _WITH_WINDOW,
        )
    if facts.can_save:
        await slot_io.erase(control, slot_id)
    return replace(facts, ram_cache=ram_cache, is_unified=is_unified, can_save=can_save, kind=kind)


async def _has_ram_cache(control: ControlClient, slot_id: int) -> bool:
    """True if `--cache-ram` is on: a prompt comes back after another one has replaced it in its slot."""
    first, second = list(range(10, 10 + _PROBE_TOKENS)), list(range(110, 110 + _PROBE_TOKENS))
    for prompt in (first, second):
        await prefill(control, prompt, slot_id)
    return await prefill(control, [*first, second[0]], slot_id) > 0


def _caches_in(size: int, streams: int) -> int | None:
    """The number of caches in an empty slot's file of `size` bytes; None if it is of another kind."""
    counts = (_PLAIN_ATTENTION, _WITH_WINDOW)
    return next((each for each in counts if size == 4 * (_STATE_WORDS + each * (1 + streams))), None)


async def prefill(control: ControlClient, prompt: list[int], slot_id: int) -> int:
    """Computes a prompt on a slot; returns the number of reused tokens."""
    request = {"prompt": prompt, "n_predict": 0, "cache_prompt": True, "id_slot": slot_id}
    match await control.call("POST", "/completion", json=request):
        case {"timings": {"cache_n": int(reused)}}:
            return reused
        case _:
            raise EngineUnavailable("POST /completion: the answer has no 'timings.cache_n'")


async def _tried(control: ControlClient, slot_id: int) -> tuple[int, int]:
    """Tokens that the server reuses of a prompt that goes on, and of one that leaves the slot's content."""
    first, others = list(range(210, 210 + _FIRST)), list(range(310, 318))
    await prefill(control, first, slot_id)
    grown = await prefill(control, [*first, *others], slot_id)
    return grown, await prefill(control, [*first, *others[: _CUT - _FIRST], *others], slot_id)


def memory_rules(kind: MemoryKind, facts: ServerFacts) -> MemoryRules:
    """The rules of a memory of this kind, with the server's default flags. Reads the model's file."""
    if not kind.is_recurrent and not kind.has_window:
        stays = kind.has_window_in_files or facts.has_media or facts.has_draft
        chunk = 0 if stays else facts.cache_reuse or 0
        return replace(PLAIN, loses_window=kind.has_window_in_files, chunk=chunk)
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
