"""Blocks that vLLM holds more than once: gone are they when the last copy is.

vLLM does not merge equal blocks. What two requests compute at once is stored twice, and so is a prompt's last
block where nothing but it has to be computed; every copy is told of when it is stored and when it is evicted.
Reuse is told of in the same words (`kv_cache_report_mode`): a run of held blocks from the start of a prompt.
Such a run is not counted, so that at worst too little is believed to be held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Tier,
    ViewCurrent,
    ViewLost,
)

_MAX_DOUBTED = 100_000


class Copies:
    """Takes removals out of an engine's events while there are more copies."""

    def __init__(self) -> None:
        self._copies: dict[int | bytes, int] = {}
        # Of these there may be more copies than counted.
        self._doubted: set[int | bytes] = set()
        # Removals taken out since the view began; None once it is known whether it began with an empty cache.
        self._kept: set[int | bytes] | None = None
        self._is_complete = False

    def count(self, event: KvEvent) -> Iterator[KvEvent]:
        """The event as it is to be passed on, and before it what follows from it."""
        match event:
            case BlocksStored(tier=Tier.GPU):
                self._store(event)
            case BlocksRemoved(tier=Tier.GPU):
                event = replace(event, hashes=tuple(filter(self._is_last, event.hashes)))
                if not event.hashes:
                    return
            case ViewLost():
                self._begin(set())
            case CacheCleared():
                self._begin(None)
            case ViewCurrent(complete=complete):
                yield from self._settle(is_complete=complete)
        yield event

    def _begin(self, kept: set[int | bytes] | None) -> None:
        self._copies.clear()
        self._doubted.clear()
        self._kept = kept
        self._is_complete = True  # until told otherwise

    def _store(self, event: BlocksStored) -> None:
        copies, names = self._copies, event.hashes
        if event.parent is not None or self._is_first_told(names):
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

    def _is_first_told(self, names: tuple[int | bytes, ...]) -> bool:
        """Whether one of them was not held: then it is no reuse."""
        return self._is_complete and not all(name in self._copies or name in self._doubted for name in names)

    def _is_last(self, name: int | bytes) -> bool:
        copies = self._copies.pop(name, 1)
        if copies == 1:
            return True
        self._copies[name] = copies - 1
        if self._kept is not None:
            self._kept.add(name)
        return False

    def _settle(self, *, is_complete: bool) -> Iterator[KvEvent]:
        """The view is up to date. Where it did not begin with an empty cache, copies were taken on trust."""
        self._is_complete = is_complete
        kept, self._kept = self._kept or (), None
        if is_complete:
            return
        self._copies = dict.fromkeys(self._copies, 1)
        gone = tuple(name for name in kept if self._copies.pop(name, 0))
        if gone:
            yield BlocksRemoved(Tier.GPU, gone)
