"""One engine's KV events, re-hashed into our chain and written to the index.

The engine's own hashes are names: they say which block a removal means, or which one a new block follows,
and nothing else. Identity comes from the token ids and extra ids the event carries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_adapter.types import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, ViewCurrent, ViewLost
from proxy.core.blocks import BlockHash, extend
from proxy.core.index import PrefixIndex


@dataclass(slots=True)
class ViewCounts:
    """Blocks stored and removed, in the engine's own blocks, and runs whose content could not be known."""

    stored: int = 0
    removed: int = 0
    orphaned: int = 0


class EngineView:
    """Applies one engine's events to the index of its pool.

    The engine's block size must be a multiple of the pool's: one of its blocks becomes several entries.

    Attributes:
        counts: what was applied so far.
        complete: False when the engine may hold blocks that no event told of.
    """

    def __init__(
        self,
        engine: str,
        index: PrefixIndex,
        root_of: Callable[[str | None, str | None], BlockHash],
        tokens_per_block: int,
    ) -> None:
        """`root_of` gives the namespace root of a salt and a LoRA adapter; the block size is the pool's."""
        self._engine = engine
        self._index = index
        self._root_of = root_of
        self._tokens_per_block = tokens_per_block
        self._names: dict[int | bytes, tuple[BlockHash, ...]] = {}
        self.counts = ViewCounts()
        self.complete = False

    def apply(self, event: KvEvent) -> None:
        """Writes one event to the index."""
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case CacheCleared():
                self._clear()
                self.complete = True
            case ViewLost():
                self._clear()
                self.complete = False
            case ViewCurrent():
                self.complete = event.complete

    def _clear(self) -> None:
        self._names.clear()
        self._index.wipe(self._engine)

    def _store(self, event: BlocksStored) -> None:
        parent = self._parent_of(event)
        per_block, rest = divmod(event.tokens_per_block, self._tokens_per_block)
        whole = len(event.token_ids) == len(event.hashes) * event.tokens_per_block
        if parent is None or rest or not per_block or not whole:
            # What it holds cannot be told, so no request can be matched to it.
            self.counts.orphaned += 1
            return
        hashes = extend(parent, event.token_ids, event.extra_ids, self._tokens_per_block)
        for at, name in enumerate(event.hashes):
            self._names[name] = hashes[at * per_block : (at + 1) * per_block]
        self._index.store(self._engine, event.tier, hashes)
        self.counts.stored += len(event.hashes)

    def _parent_of(self, event: BlocksStored) -> BlockHash | None:
        """The block the run follows, None where that is not known."""
        if event.parent is None:
            return self._root_of(event.salt, event.adapter)
        hashes = self._names.get(event.parent)
        return hashes[-1] if hashes is not None else None

    def _remove(self, event: BlocksRemoved) -> None:
        for name in event.hashes:
            hashes = self._names.get(name)
            if hashes is None:
                continue
            self._index.remove(self._engine, event.tier, hashes)
            self.counts.removed += 1
            if not self._index.holds(self._engine, hashes[-1]):
                del self._names[name]
