"""What an engine without KV events probably holds: the prompts it served lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from proxy.core.index.blocks import BlockHash


class LearnedBlocks:
    """A model of one engine's cache: least recently used blocks are evicted first, ends of prompts before
    their beginnings."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in blocks."""
        self.capacity = capacity
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def learn(self, hashes: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """The engine has just served this chain. Returns the blocks that it evicts for it.

        Engines evict a prompt from its end. The blocks are returned in the order of their chains, beginnings
        first: the index clears 64 of those in one step, and others one by one.
        """
        blocks = self._blocks
        for block in reversed(tuple(hashes)):
            blocks[block] = None
            blocks.move_to_end(block)
        surplus = max(len(blocks) - self.capacity, 0)
        return tuple([blocks.popitem(last=False)[0] for _ in range(surplus)][::-1])

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Removes blocks that kvpin flushed on the engine; unknown ones are ignored."""
        for block in hashes:
            self._blocks.pop(block, None)

    def clear(self) -> None:
        """The engine lost everything."""
        self._blocks.clear()
