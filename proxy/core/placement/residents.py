"""The prompts that one engine would evict, least recently used first.

Engines evict the least recently used blocks, from the end of prompts. The requests that the engine served
tell the order; the index tells whether a prompt is still there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from proxy.core.index.blocks import BlockHash
from proxy.core.placement.demand import continued

# More prompts than an engine holds.
MAX_PROMPTS = 20_000
# If an eviction takes more prompts than this, the rest are assumed to be like these.
MAX_LOOKED_AT = 32


class Residents:
    """The prompts of one engine, each by its last full block."""

    def __init__(self, holds: Callable[[BlockHash], bool]) -> None:
        """`holds` says whether the engine still holds a block."""
        self._holds = holds
        self._prompts: OrderedDict[BlockHash, tuple[float, int]] = OrderedDict()  # → when, blocks

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
        prompts[hashes[-1]] = (now, min(blocks, len(hashes)))
        if len(prompts) > MAX_PROMPTS:
            prompts.popitem(last=False)

    def lost(self, now: float, blocks: int, returns: Callable[[float], float]) -> float:
        """Expected number of the `blocks` least recently used blocks that are requested again; 0 if
        `blocks` is not positive. Forgets prompts that the engine no longer holds."""
        if blocks <= 0:
            return 0.0
        prompts, gone = self._prompts, list[BlockHash]()
        seen, looked_at, lost = 0, 0, 0.0
        for last, (then, size) in prompts.items():
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

    def clear(self) -> None:
        """The engine lost everything."""
        self._prompts.clear()
