"""GPU memory that requests in flight hold. The engine cannot evict it before they end.

Blocks that requests share count once. Two prompts with one block in common have all blocks before it in
common, so only every 64th block of a prompt is noted; it stands for the 64 that end there.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.index.blocks import BlockHash

# Blocks that one noted block stands for. What two prompts share is known to within this many.
STRIDE = 64


class InUse:
    """GPU memory of one engine that requests in flight hold.

    Attributes:
        capacity: of the GPU, in blocks.
        blocks: in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        self._requests: dict[BlockHash, int] = {}  # noted block → requests that hold it

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """A request for a prompt with these blocks begins."""
        requests = self._requests
        self.blocks += self._beside(hashes)
        for mark in hashes[STRIDE - 1 :: STRIDE]:
            requests[mark] = requests.get(mark, 0) + 1

    def remove(self, hashes: Sequence[BlockHash]) -> None:
        """That request has ended."""
        requests = self._requests
        for mark in hashes[STRIDE - 1 :: STRIDE]:
            requests[mark] -= 1
            if not requests[mark]:
                del requests[mark]
        self.blocks -= self._beside(hashes)

    def wait_s(self, hashes: Sequence[BlockHash], answer_s: float) -> float:
        """Seconds until there is room for a prompt, if answers take `answer_s`. Requests end one after the
        other: within `answer_s`, everything that is in use now becomes free."""
        if self.blocks + len(hashes) <= self.capacity:
            return 0.0
        short = self.blocks + self._beside(hashes) - self.capacity
        return min(short / self.blocks, 1.0) * answer_s if short > 0 and self.blocks else 0.0

    def _beside(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks that a prompt needs in addition to those in use."""
        marks = hashes[STRIDE - 1 :: STRIDE]
        return len(hashes) - STRIDE * sum(map(self._requests.__contains__, marks))
