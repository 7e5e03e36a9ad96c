"""What requests in flight are about to leave on an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from proxy.core.index.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class InFlight:
    """What requests in flight are about to leave on one engine.

    Attributes:
        starts: by the last block of a chain, from where on each request for it is pending.
        awaited: requests that will leave a block, beyond the first, which its location bit stands for.
    """

    starts: dict[BlockHash, list[int]] = field(default_factory=dict)
    awaited: Counter[BlockHash] = field(default_factory=Counter)

    def begin(self, last: BlockHash, start: int) -> None:
        """A request for the chain that ends in `last` is pending from `start` on."""
        self.starts.setdefault(last, []).append(start)

    def end(self, last: BlockHash) -> int | None:
        """One of those requests has ended: of several, that which is pending for least. From where on it was;
        None where there is none."""
        starts = self.starts.get(last)
        if not starts:
            return None
        start = max(starts)
        starts.remove(start)
        if not starts:
            del self.starts[last]
        return start

    def last_of(self, blocks: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Counts each block down by one request; those that no other request waits for."""
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
