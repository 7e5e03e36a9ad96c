"""Counts blocks that vLLM holds more than once: a block leaves the view when its last copy is removed.

vLLM does not merge equal blocks. If two requests compute the same block at once, it is stored twice. A
prompt's last block is stored again if only that block had to be computed. Every copy has its own stored and
removed events. With `kv_cache_report_mode`, reuse is also reported as a stored event: a run of held blocks
from the start of a prompt. Such a run is not counted, so at worst kvpin believes too little is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

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
    """Drops removals from an engine's events while other copies remain."""

    def __init__(self) -> None:
        self._copies: dict[int | bytes, int] = {}
        # There may be more copies of these than counted.
        self._doubted: set[int | bytes] = set()
        # Removals dropped since the view began; None once kvpin knows whether the cache was empty then.
        self._kept: set[int | bytes] | None = None
        self._is_complete = False

    def count(self, event: KvEvent) -> Iterable[KvEvent]:
        """The event as it is to be passed on, after any removals it causes."""
        match event:
            case BlocksStored(tier=Tier.GPU):
                self._store(event)
            case BlocksRemoved(tier=Tier.GPU):
                last = tuple([name for name in event.hashes if self._is_last(name)])
                if len(last) < len(event.hashes):
                    return (replace(event, hashes=last),) if last else ()
            case ViewLost():
                self._begin(set())
            case CacheCleared():
                self._begin(None)
            case ViewCurrent(complete=complete):
                return (*self._settle(is_complete=complete), event)
        return (event,)

    def _begin(self, kept: set[int | bytes] | None) -> None:
        self._copies.clear()
        self._doubted.clear()
        self._kept = kept
        self._is_complete = True  # until ViewCurrent says

    def _store(self, event: BlocksStored) -> None:
        copies, names = self._copies, event.hashes
        if event.parent is not None or self._is_new(names):
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

    def _is_new(self, names: tuple[int | bytes, ...]) -> bool:
        """Whether a block of the run was not held: then the run was stored, not reused."""
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
        """The view is up to date. If the cache was not empty at its start, the counts are guesses: each
        becomes 1."""
        self._is_complete = is_complete
        kept, self._kept = self._kept or (), None
        if is_complete:
            return
        self._copies = dict.fromkeys(self._copies, 1)
        gone = tuple(name for name in kept if self._copies.pop(name, 0))
        if gone:
            yield BlocksRemoved(Tier.GPU, gone)
