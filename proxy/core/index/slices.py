"""Splits long events, so that the event loop serves requests between the parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from engine_adapter.types import BlocksRemoved, BlocksStored, KvEvent

# Each part takes well below a millisecond.
SLICE_TOKENS = 4096
SLICE_NAMES = 128


def slices(event: KvEvent) -> Iterable[KvEvent]:
    """Events that together mean the same as this one."""
    if isinstance(event, BlocksStored) and event.token_ids:
        n_tokens = len(event.token_ids)
        fits = n_tokens == len(event.hashes) * event.tokens_per_block
        return _runs(event) if fits and n_tokens > SLICE_TOKENS else (event,)
    if isinstance(event, BlocksStored | BlocksRemoved) and len(event.hashes) > SLICE_NAMES:
        return _names(event)
    return (event,)


def _runs(event: BlocksStored) -> Iterator[BlocksStored]:
    names, size, extra_ids = event.hashes, event.tokens_per_block, event.extra_ids
    step = max(SLICE_TOKENS // size, 1)
    for at in range(0, len(names), step):
        here = slice(at * size, (at + step) * size)
        yield replace(
            event,
            parent=names[at - 1] if at else event.parent,
            hashes=names[at : at + step],
            token_ids=event.token_ids[here],
            extra_ids=extra_ids[here] if extra_ids is not None else None,
        )


def _names(event: BlocksStored | BlocksRemoved) -> Iterator[BlocksStored | BlocksRemoved]:
    for at in range(0, len(event.hashes), SLICE_NAMES):
        yield replace(event, hashes=event.hashes[at : at + SLICE_NAMES])
