"""Pending blocks: what requests in flight are about to leave on an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from proxy.core.index.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class InFlight:
    """Pending blocks of one engine.

    Attributes:
        starts: last block of a chain → for each request for it, the place where its pending blocks begin.
        awaited: block → requests that will leave it, without the first; the location bit stands for that one.
    """

    starts: dict[BlockHash, list[int]] = field(default_factory=dict)
    awaited: Counter[BlockHash] = field(default_factory=Counter)

    def begin(self, last: BlockHash, start: int) -> None:
        """A request for the chain that ends in `last` has pending blocks from `start` on."""
        self.starts.setdefault(last, []).append(start)

    def end(self, last: BlockHash) -> int | None:
        """One of those requests has ended; of several, the one with the fewest pending blocks. Returns where
        they began; None if there is no such request."""
        starts = self.starts.get(last)
        if not starts:
            return None
        start = max(starts)
        starts.remove(start)
        if not starts:
            del self.starts[last]
        return start

    def last_of(self, blocks: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Counts each block down by one request. Returns the blocks that no other request will leave."""
        awaited = self.awaited
        if awaited.keys().isdisjoint(blocks):
            return blocks
        last = []
        for block in blocks:
            others = awaited.get(block, 0)
            if others > 1:
                awaited[block] = others - 1
            elif others:
                del awaited[block]
            else:
                last.append(block)
        return tuple(last)
