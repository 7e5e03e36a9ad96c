"""Blocks that no event has told: those that requests in flight leave, and those of an engine without
events."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import count

from proxy.core.index.blocks import BlockHash
from proxy.core.index.segments import common

# --- what requests in flight are about to leave on an engine --------------------------------------------


@dataclass(frozen=True, slots=True)
class InFlight:
    """Pending blocks of one engine: what requests in flight are about to leave there."""

    # Last block of a chain → for each request for it, the place where its pending blocks begin, and its
    # boundaries.
    starts: dict[BlockHash, list[tuple[int, tuple[BlockHash, ...]]]] = field(default_factory=dict)
    # Block → requests that will leave it, without the first; the location bit stands for that one.
    awaited: Counter[BlockHash] = field(default_factory=Counter)
    # Block → requests that will leave windows and states whole up to its end.
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


# --- learned --------------------------------------------------------------------------------------------
# The blocks that an engine without KV events probably holds: those of the prompts it served lately.

Blocks = tuple[BlockHash, ...]


class LearnedBlocks:
    """A model of one engine's cache: least recently used blocks are evicted first, ends of prompts before
    their beginnings. Of each prompt, the model stores the stretch of blocks that no later prompt used again.
    Later prompts share beginnings, so a stretch is always an end of its prompt, and is found by its first
    block. A prompt takes a few steps, however long it is."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in blocks."""
        self.capacity = capacity
        self._size = 0
        self._served = count()  # numbers the prompts
        self._stretches: OrderedDict[int, Blocks] = OrderedDict()  # the next to be evicted first
        self._numbers: dict[BlockHash, int] = {}  # first block of a stretch → its number

    def __len__(self) -> int:
        return self._size

    def learn(self, chain: Blocks) -> Blocks:
        """The engine has just served this chain, which begins at its root. Returns the blocks that it evicts
        for it. Engines evict a prompt from its end. The blocks are returned in the order of their chains,
        beginnings first: the index clears 64 of those in one step, and others one by one."""
        self.forget(chain)
        self._put(next(self._served), chain)
        self._size += len(chain)
        stretches = self._stretches
        evicted: list[Blocks] = []
        while self._size > self.capacity:
            number, stretch = stretches.popitem(last=False)
            kept = max(len(stretch) - (self._size - self.capacity), 0)
            if kept:
                stretches[number] = stretch[:kept]
                stretches.move_to_end(number, last=False)
            else:
                del self._numbers[stretch[0]]
            self._size -= len(stretch) - kept
            evicted.append(stretch[kept:])
        return evicted[0] if len(evicted) == 1 else tuple(joined.from_iterable(reversed(evicted)))

    def forget(self, chain: Blocks, start: int = 0) -> None:
        """Removes the blocks of a chain from place `start` on; unknown ones are ignored. The chain begins at
        its root. Blocks that follow them in a longer prompt stay."""
        for first in self._numbers.keys() & chain:
            at, number = chain.index(first), self._numbers[first]
            stretch = self._stretches[number]
            begin = max(start - at, 0)
            end = common(stretch, 0, chain, at, min(len(stretch), len(chain) - at))
            if begin < end:
                before, after = stretch[:begin], stretch[end:]
                del self._numbers[first]
                self._size -= end - begin
                if before and after:
                    # The engine cannot reuse these without the blocks that were removed.
                    self._put(follows := next(self._served), after)
                    self._stretches.move_to_end(follows, last=False)
                self._put(number, before or after)

    def adopt(self, stretch: Blocks) -> Blocks:
        """The engine served these consecutive blocks of a chain before all that is known; none of them is.
        Returns those there is room for: the first ones."""
        stretch = stretch[: max(self.capacity - self._size, 0)]
        if stretch:
            self._put(number := next(self._served), stretch)
            self._stretches.move_to_end(number, last=False)
            self._size += len(stretch)
        return stretch

    def _put(self, number: int, stretch: Blocks) -> None:
        """Stores a stretch: in the place of the one with this number, or as the most recently used."""
        if stretch:
            self._stretches[number] = stretch
            self._numbers[stretch[0]] = number
        else:
            self._stretches.pop(number, None)

    def stretches(self) -> list[Blocks]:
        """The stretches, the next to be evicted first."""
        return list(self._stretches.values())

    def restore(self, stretch: Blocks) -> bool:
        """Takes back a stretch of an earlier model; they come in order, before anything is learned. Returns
        whether it fits."""
        fits = self._size + len(stretch) <= self.capacity
        if fits:
            self._put(next(self._served), stretch)
            self._size += len(stretch)
        return fits

    def clear(self) -> None:
        """The engine lost everything."""
        self._size = 0
        self._stretches.clear()
        self._numbers.clear()
