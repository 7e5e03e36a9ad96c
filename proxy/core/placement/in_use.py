"""GPU memory that requests in flight hold: nothing can be evicted from it before they end.

What they share counts once. Prompts that are the same up to some block are the same before it, so that every
64th block of a prompt stands for those up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from proxy.core.index.blocks import BlockHash

# Blocks that one stands for: what two prompts share is known to within so many.
STRIDE = 64


class InUse:
    """What requests in flight hold of one engine's GPU.

    Attributes:
        capacity: of that GPU, in blocks.
        blocks: in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        self._requests: Counter[BlockHash] = Counter()  # requests by the blocks that stand for others

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """A request for a prompt of these blocks begins."""
        requests = self._requests
        self.blocks += self._beside(hashes)
        requests.update(hashes[STRIDE - 1 :: STRIDE])

    def remove(self, hashes: Sequence[BlockHash]) -> None:
        """It has ended."""
        requests = self._requests
        for mark in hashes[STRIDE - 1 :: STRIDE]:
            requests[mark] -= 1
            if not requests[mark]:
                del requests[mark]
        self.blocks -= self._beside(hashes)

    def wait_s(self, hashes: Sequence[BlockHash], answer_s: float) -> float:
        """Seconds until there is room for a prompt beside them, when answers take `answer_s`. Requests end
        one after the other: in the time of an answer all that is in use now will be free."""
        if self.blocks + len(hashes) <= self.capacity:
            return 0.0
        short = self.blocks + self._beside(hashes) - self.capacity
        return min(short / self.blocks, 1.0) * answer_s if short > 0 and self.blocks else 0.0

    def _beside(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks that a prompt needs beside those in use."""
        marks = hashes[STRIDE - 1 :: STRIDE]
        return len(hashes) - STRIDE * sum(map(self._requests.__contains__, marks))
