"""Counts the blocks that vLLM holds more than once, as its events tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvGroup,
    Tier,
    ViewCurrent,
    ViewLost,
)

_MAX_DOUBTED = 100_000
_Name = int | bytes | tuple[KvGroup, int | bytes]
"""A block's name, with its group if that is not the main one."""


class Copies:
    """Counts blocks that vLLM holds more than once: a block leaves the view when its last copy is removed.

    vLLM does not merge equal blocks. If two requests compute the same block at once, it is stored twice. A
    prompt's last block is stored again if only that block had to be computed. Every copy has its own stored
    and removed events. With `kv_cache_report_mode`, reuse is also reported as a stored event: a run of held
    blocks from the start of a prompt. Such a run is not counted, so at worst the view holds too little.

    A further KV cache group reports such a run whole, also the blocks that it no longer holds, for example
    those before its window. Of a run that may be such a report, only the blocks count that the reuse needed.

    Below the GPU, chunks of vLLM's offloading connector may share their first blocks: these are stored and
    removed with each chunk."""

    def __init__(self, per_chunk: int = 1) -> None:
        """`per_chunk`: blocks of such a chunk, where the server says it. Events may name its last alone."""
        self._per_chunk = per_chunk
        self._copies: dict[_Name, int] = {}
        self._below = Counter[tuple[Tier, int | bytes]]()  # chunks that hold a block, by its tier
        # There may be more copies of these than counted.
        self._doubted: set[_Name] = set()
        # Removals dropped since the view began; None once kvpin knows whether the cache was empty then.
        self._kept: set[_Name] | None = None
        # Since then: what further groups may only have reported.
        self._reported: set[_Name] = set()
        self._is_complete = False

    def count(self, event: KvEvent) -> Iterable[KvEvent]:
        """The event as it is to be passed on, after any removals it causes."""
        match event:
            case BlocksStored(tier=Tier.GPU):
                event = self._surely_held(event)
                self._store(event)
            case BlocksRemoved(tier=Tier.GPU):
                names = zip(event.hashes, _names(event), strict=True)
                last = tuple([name for name, counted in names if self._is_last(counted)])
                if len(last) < len(event.hashes):
                    return (replace(event, hashes=last),) if last else ()
            case BlocksStored(group=None) | BlocksRemoved(group=None):
                return self._count_below(event)
            case ViewLost():
                self._begin(set())
            case CacheCleared():
                self._begin(None)
            case ViewCurrent(complete=complete):
                return (*self._settle(is_complete=complete), event)
        return (event,)

    def _begin(self, kept: set[_Name] | None) -> None:
        self._copies.clear()
        self._below.clear()
        self._doubted.clear()
        self._reported.clear()
        self._kept = kept
        self._is_complete = True  # until ViewCurrent says

    def _surely_held(self, event: BlocksStored) -> BlocksStored:
        """The event without blocks that a further group may only have reported. While it is not known whether
        the view is complete, these are remembered."""
        if event.group is None or event.parent is not None or (self._is_complete and self._kept is None):
            return event
        held = _needed(event.group, len(event.hashes), event.tokens_per_block)
        if not self._is_complete:
            return replace(event, hashes=event.hashes[len(event.hashes) - held :])
        names = _names(event)
        self._reported.update(names[: len(names) - held])
        self._reported.difference_update(names[len(names) - held :])
        return event

    def _store(self, event: BlocksStored) -> None:
        copies, names = self._copies, _names(event)
        # If a block of the run was not held, the run was stored, not reused.
        if event.parent is not None or (
            self._is_complete and not all(name in copies or name in self._doubted for name in names)
        ):
            for name in names:
                copies[name] = copies.get(name, 0) + 1
            return
        for name in names:
            copies.setdefault(name, 1)
        if self._is_complete:
            self._doubted.update(names)
            if len(self._doubted) > _MAX_DOUBTED:
                self._doubted.clear()
                self._is_complete = False

    def _is_last(self, name: _Name) -> bool:
        copies = self._copies.pop(name, 1)
        if copies == 1:
            return True
        self._copies[name] = copies - 1
        if self._kept is not None:
            self._kept.add(name)
        return False

    def _count_below(self, event: BlocksStored | BlocksRemoved) -> Iterable[KvEvent]:
        if isinstance(event, BlocksStored):
            if self._per_chunk > 1 and not event.token_ids:
                event = replace(event, per_chunk=self._per_chunk)
            if event.per_chunk > 1:
                self._below.update((event.tier, name) for name in event.hashes)
        elif self._below:
            last = tuple([name for name in event.hashes if self._is_last_chunk(event.tier, name)])
            return (replace(event, hashes=last),) if last else ()
        return (event,)

    def _is_last_chunk(self, tier: Tier, name: int | bytes) -> bool:
        self._below[tier, name] -= 1
        if self._below[tier, name] > 0:
            return False
        del self._below[tier, name]
        return True

    def _settle(self, *, is_complete: bool) -> Iterator[KvEvent]:
        """The view is up to date. If the cache was not empty at its start, the counts are guesses: each
        becomes 1."""
        self._is_complete = is_complete
        kept, self._kept = self._kept or set[_Name](), None
        reported, self._reported = self._reported, set()
        if is_complete:
            return
        self._copies = dict.fromkeys(self._copies, 1)
        by_group: dict[KvGroup | None, list[int | bytes]] = {}
        for name in kept | reported:
            if self._copies.pop(name, 0):
                group, own = name if isinstance(name, tuple) else (None, name)
                by_group.setdefault(group, []).append(own)
        for group, names in by_group.items():
            yield BlocksRemoved(Tier.GPU, tuple(names), group)


def _needed(group: KvGroup, blocks: int, size: int) -> int:
    """Of a prompt's first `blocks` blocks, of `size` tokens each: how many the group must hold, from the end
    on, so that they are reused."""
    match group.attention:
        case Attention.PREFIX:
            return blocks
        case Attention.WINDOW:
            return min(-(-(group.window - 1) // size), blocks)
        case Attention.CHUNK:
            return blocks - blocks * size // group.window * group.window // size
        case Attention.STATE:
            return min(1, blocks)
        case _:
            return 0


def _names(event: BlocksStored | BlocksRemoved) -> Sequence[_Name]:
    """The blocks of the event: each group has its own, under the same names."""
    return event.hashes if event.group is None else [(event.group, name) for name in event.hashes]
