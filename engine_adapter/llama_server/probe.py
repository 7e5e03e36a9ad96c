"""Tries out what no route of a llama-server tells. One slot loses its content: the caller chooses when."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.discovery import ServerFacts

_PROBE_TOKENS = 48
_STATE_WORDS = 7  # of an empty slot's file, before its caches: magic, version, 4 of tokens and their count
_CACHES = (1, 2)  # of a model with plain attention, and of one that has sliding windows too


def probe_file() -> str:
    """A new name for the small file that a probe leaves behind; servers may share a directory."""
    return f"kvpin-probe-{uuid4().hex}.bin"


async def probe(control: ControlClient, facts: ServerFacts, slot_id: int, *, file: str) -> ServerFacts:
    """Completes `facts` by trying. Slot `slot_id` must be idle; its content is lost.

    Leaves `file`, about 50 bytes, in the server's save directory. Takes a few milliseconds on an idle server,
    plus the prefill of about 150 tokens.
    """
    ram_cache = await probe_ram_cache(control, slot_id)
    is_unified, can_save = facts.is_unified, facts.can_save
    if can_save and is_unified is None:
        try:
            is_unified = await probe_unified(control, slot_id, facts.slots, file=file)
        except EngineRejected:
            can_save = False  # the directory is gone or full; the server can still be used
    if facts.can_save:
        await slot_io.erase(control, slot_id)
    return replace(facts, ram_cache=ram_cache, is_unified=is_unified, can_save=can_save)


async def probe_ram_cache(control: ControlClient, slot_id: int) -> bool:
    """Whether `--cache-ram` is on: a prompt comes back after another one has replaced it in its slot.

    The content of slot `slot_id` is lost.
    """
    first, second = list(range(10, 10 + _PROBE_TOKENS)), list(range(110, 110 + _PROBE_TOKENS))
    for prompt in (first, second):
        await _prefill(control, prompt, slot_id)
    return await _prefill(control, [*first, second[0]], slot_id) > 0


async def probe_unified(control: ControlClient, slot_id: int, slots: int, *, file: str) -> bool | None:
    """Whether all slots share one KV pool, by the size of an empty slot's file; None if that does not tell.

    The file counts the cells of each stream, and a unified pool is one stream. The content of slot `slot_id`
    is lost, and `file` is left in the server's save directory.
    """
    await slot_io.erase(control, slot_id)
    words, rest = divmod((await slot_io.save(control, slot_id, file)).size, 4)
    counted = words - _STATE_WORDS
    if not rest and counted in [caches * (1 + slots) for caches in _CACHES]:
        return False
    return True if not rest and counted in [caches * (1 + 1) for caches in _CACHES] else None


async def _prefill(control: ControlClient, prompt: list[int], slot_id: int) -> int:
    """Computes a prompt on a slot; returns the number of reused tokens."""
    request = {"prompt": prompt, "n_predict": 0, "cache_prompt": True, "id_slot": slot_id}
    match await control.call("POST", "/completion", json=request):
        case {"timings": {"cache_n": int(reused)}}:
            return reused
        case _:
            raise EngineUnavailable("POST /completion: the answer has no 'timings.cache_n'")
