"""What requests in flight are about to leave on an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.core.index.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class InFlight:
    """Pending blocks of one engine: what requests in flight are about to leave there.

    Attributes:
        starts: last block of a chain → for each request for it, the place where its pending blocks begin, and
            its boundaries.
        awaited: block → requests that will leave it, without the first; the location bit stands for that one.
        boundaries: block → requests that will leave windows and states whole up to its end.
    """

    starts: dict[BlockHash, list[tuple[int, tuple[BlockHash, ...]]]] = field(default_factory=dict)
    awaited: Counter[BlockHash] = field(default_factory=Counter)
    boundaries: Counter[BlockHash] = field(default_factory=Counter)

    def begin(self, last: BlockHash, start: int, boundaries: tuple[BlockHash, ...] = ()) -> None:
        """A request for the chain that ends in `last` has pending blocks from `start` on, and leaves windows
        and states whole at these boundaries."""
        self.starts.setdefault(last, []).append((start, boundaries))
        self.boundaries.update(boundaries)

    def end(self, last: BlockHash) -> int | None:
        """One of those requests has ended; of several, the one with the fewest pending blocks. Returns where
        they began; None if there is no such request."""
        starts = self.starts.get(last)
        if not starts:
            return None
        ended = start, boundaries = max(starts)
        starts.remove(ended)
        if not starts:
            del self.starts[last]
        for block in boundaries:
            self.boundaries[block] -= 1
            if not self.boundaries[block]:
                del self.boundaries[block]
        return start

    def coming(self, chain: Sequence[BlockHash]) -> list[int]:
        """The boundaries that lie on a chain, in blocks."""
        if not self.boundaries:
            return []
        return [chain.index(block) + 1 for block in self.boundaries.keys() & chain]

    def last_of(self, blocks: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Counts each block down by one request. Returns the blocks that no other request will leave."""
        awaited = self.awaited
        if not awaited or awaited.keys().isdisjoint(blocks):
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
