"""The cache of a simulated engine: blocks on the GPU, and a host tier of its own.

As in real engines, blocks of running requests stay. Of the others the least recently used is evicted first,
and the end of a prompt before its beginning. Blocks evicted from the GPU go to the host tier, and stay there
when they are restored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.index.blocks import BlockHash, Chain


@dataclass(frozen=True, slots=True)
class Taken:
    """The blocks that a starting request found, and those that were evicted for it.

    Attributes:
        gpu: leading blocks of its chain found on the GPU.
        host: further blocks found on the host tier, which must be restored.
        evicted: blocks that left the GPU.
        gone: blocks that left the host tier.
    """

    gpu: int
    host: int
    evicted: Sequence[BlockHash]
    gone: Sequence[BlockHash] = ()


class TieredCache:
    """One engine's blocks. A request takes its blocks when its prefill starts, fills them when that ends, and
    releases them when it has finished. One prefill runs at a time."""

    def __init__(self, gpu_blocks: int, host_blocks: int = 0) -> None:
        self.gpu_blocks = gpu_blocks
        self.host_blocks = host_blocks
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._used: dict[BlockHash, int] = {}  # running requests that use a block
        self._private = 0  # blocks of running requests that no match finds: being filled, tails, answers
        self._host: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first

    @property
    def held(self) -> int:
        """Blocks on the GPU that a match could find."""
        return len(self._idle) + len(self._used)

    @property
    def occupied(self) -> int:
        """Blocks on the GPU that are not empty."""
        return self.held + self._private

    def match(self, chain: Chain) -> tuple[int, int]:
        """Leading blocks of the chain on the GPU, and those only on the host tier."""
        gpu = host = 0
        for block in chain.hashes:
            if block in self._used or block in self._idle:
                gpu += 1
            elif block in self._host:
                host += 1
            else:
                break
        return gpu, host

    def take(self, chain: Chain, blocks: int) -> Taken | None:
        """Takes room for a request of `blocks` blocks that begin with the chain; None if there is not
        enough."""
        gpu, host = self.match(chain)
        used, idle = self._used, self._idle
        found = chain.hashes[: gpu + host]
        asleep = sum(block in idle for block in found)
        fresh = blocks - gpu
        if len(used) + asleep + self._private + fresh > self.gpu_blocks:
            return None
        for block in found:
            if block in used:
                used[block] += 1
            elif block in idle:
                del idle[block]
                used[block] = 1
        evicted = [idle.popitem(last=False)[0] for _ in range(self.occupied + fresh - self.gpu_blocks)]
        self._private += fresh
        return Taken(gpu, host, evicted, gone=self._lower(evicted, found))

    def fill(self, hashes: Sequence[BlockHash], since: int) -> list[BlockHash]:
        """The prefill has ended: matches find the chain from now on. Its blocks before `since` were found on
        the GPU. Returns those that are new."""
        used = self._used
        new = [block for block in hashes[since:] if block not in used]
        for block in new:
            used[block] = 1
        self._private -= len(new)
        return new

    def release(self, hashes: Sequence[BlockHash], blocks: int) -> None:
        """The request has finished. Its blocks stay until others need the room."""
        used, idle = self._used, self._idle
        for block in reversed(hashes):
            users = used[block] - 1
            if users:
                used[block] = users
            else:
                del used[block]
                idle[block] = None
        self._private -= blocks - len(hashes)

    def _lower(self, evicted: Sequence[BlockHash], found: Sequence[BlockHash]) -> list[BlockHash]:
        """Writes evicted blocks to the host tier and marks those found there as used. Returns the blocks that
        the host tier evicted."""
        host = self._host
        if not self.host_blocks:
            return []
        for block in evicted:
            host[block] = None
            host.move_to_end(block)
        for block in reversed(found):
            if block in host:
                host.move_to_end(block)
        return [host.popitem(last=False)[0] for _ in range(len(host) - self.host_blocks)]
