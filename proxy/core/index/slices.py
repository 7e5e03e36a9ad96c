"""Splits long events, so that the event loop serves requests between the parts."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from engine_adapter.types import BlocksRemoved, BlocksStored, KvEvent

# Each part takes well below a millisecond.
SLICE_TOKENS = 4096
SLICE_NAMES = 128


def slices(event: KvEvent) -> Iterator[KvEvent]:
    """Yields events that together mean the same as this one."""
    match event:
        case BlocksStored(hashes=names, tokens_per_block=size, token_ids=tokens) if tokens and size > 0:
            step = max(SLICE_TOKENS // size, 1)
            if len(names) <= step or len(tokens) != len(names) * size:
                yield event
                return
            extra_ids = event.extra_ids
            for at in range(0, len(names), step):
                here = slice(at * size, (at + step) * size)
                yield replace(
                    event,
                    parent=names[at - 1] if at else event.parent,
                    hashes=names[at : at + step],
                    token_ids=tokens[here],
                    extra_ids=extra_ids[here] if extra_ids is not None else None,
                )
        case BlocksStored(hashes=names) | BlocksRemoved(hashes=names) if len(names) > SLICE_NAMES:
            for at in range(0, len(names), SLICE_NAMES):
                yield replace(event, hashes=names[at : at + SLICE_NAMES])
        case _:
            yield event
