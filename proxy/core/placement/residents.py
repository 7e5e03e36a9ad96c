"""What one engine would lose: the prompts it served, least recently used first.

Engines evict what was not used for longest, from the end of prompts. Which prompt that is follows from the
requests the engine was given; whether it is still there, the index knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from proxy.core.index.blocks import BlockHash
from proxy.core.placement.demand import goes_on_from

# More than an engine holds of prompts that are worth something.
MAX_PROMPTS = 20_000
# Where what is needed takes more prompts than this, the others are taken to be like these.
MAX_LOOKED_AT = 32


class Residents:
    """The prompts of one engine, each by its last full block."""

    def __init__(self, holds: Callable[[BlockHash], bool]) -> None:
        """`holds` says whether the engine still does."""
        self._holds = holds
        self._prompts: OrderedDict[BlockHash, tuple[float, int]] = OrderedDict()  # → when, blocks

    def __len__(self) -> int:
        return len(self._prompts)

    def use(self, now: float, hashes: Sequence[BlockHash], new: int) -> None:
        """The engine has served a prompt, of which so many blocks are new here. The prompts it goes on from
        are part of it now."""
        if not hashes:
            return
        prompts, blocks = self._prompts, new
        for last in goes_on_from(prompts, hashes):
            blocks += prompts.pop(last)[1]
        prompts[hashes[-1]] = (now, min(blocks, len(hashes)))
        if len(prompts) > MAX_PROMPTS:
            prompts.popitem(last=False)

    def lost(self, now: float, blocks: int, returns: Callable[[float], float]) -> float:
        """Blocks that will be asked for again, on average, of the `blocks` least recently used; 0 for none or
        fewer. What the engine no longer holds is forgotten here as well."""
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
