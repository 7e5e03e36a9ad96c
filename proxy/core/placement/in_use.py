"""The GPU memory that requests in flight hold, and the prompts that an engine would evict for more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from proxy.core.index.blocks import BlockHash
from proxy.core.placement.demand import continued

# More prompts than an engine holds.
MAX_PROMPTS = 20_000
# If an eviction takes more prompts than this, the rest are assumed to be like these.
MAX_LOOKED_AT = 32


class Residents:
    """The prompts that one engine would evict, least recently used first; each by its last full block.

    Engines evict the least recently used blocks, from the end of prompts. The requests that the engine served
    tell the order; the index tells whether a prompt is still there.
    """

    def __init__(self, holds: Callable[[BlockHash], bool]) -> None:
        """`holds` says whether the engine still holds a block."""
        self._holds = holds
        # → when, blocks that no other prompt has, all blocks
        self._prompts: OrderedDict[BlockHash, tuple[float, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def use(self, now: float, hashes: Sequence[BlockHash], new: int) -> None:
        """The engine has served a prompt; `new` of its blocks are new here. The prompts that it continues
        become part of it."""
        if not hashes:
            return
        prompts, blocks = self._prompts, new
        for last in continued(prompts, hashes):
            blocks += prompts.pop(last)[1]
        prompts[hashes[-1]] = (now, min(blocks, len(hashes)), len(hashes))
        if len(prompts) > MAX_PROMPTS:
            prompts.popitem(last=False)

    def lost(self, now: float, blocks: int, returns: Callable[[float], float]) -> float:
        """Expected number of the `blocks` least recently used blocks that are requested again; 0 if
        `blocks` is not positive. Forgets prompts that the engine no longer holds."""
        if blocks <= 0:
            return 0.0
        prompts = self._prompts
        gone: list[BlockHash] = []
        seen, looked_at, lost = 0, 0, 0.0
        for last, (then, size, _) in prompts.items():
            if not self._holds(last):
                gone.append(last)
                continue
            more = min(size, blocks - seen)
            seen, looked_at, lost = seen + more, looked_at + 1, lost + more * returns(now - then)
            if seen == blocks:
                break
            if looked_at == MAX_LOOKED_AT:
                lost *= blocks / seen if seen else 0
                break
        for last in gone:
            del prompts[last]
        return lost

    def oldest(self, blocks: int) -> list[tuple[int, int, BlockHash]]:
        """The least recently used prompts, as far as evicting `blocks` blocks reaches. For each: the blocks
        of those before it, its own number of blocks, and its last block. At most MAX_LOOKED_AT prompts."""
        seen = 0
        found: list[tuple[int, int, BlockHash]] = []
        for last, (_, size, length) in islice(self._prompts.items(), MAX_LOOKED_AT):
            if seen >= blocks:
                break
            found.append((seen, length, last))
            seen += size if self._holds(last) else 0
        return found

    def has_any(self, hashes: Sequence[BlockHash]) -> bool:
        """True if a prompt with these blocks continues one of these. What an engine holds of any other prompt
        is the rest of one whose end it has evicted: that leaves first."""
        return bool(continued(self._prompts, hashes))

    def clear(self) -> None:
        """The engine lost everything."""
        self._prompts.clear()


# Blocks that one noted block stands for. What two prompts share is known to within this many.
STRIDE = 64


class InUse:
    """GPU memory of one engine that requests in flight hold. The engine cannot evict it before they end.

    Blocks that requests share count once. Two prompts with one block in common have all blocks before it in
    common, so only every 64th block of a prompt is noted; it stands for the 64 that end there.

    Attributes:
        capacity: of the GPU, in blocks.
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
