"""Decides which prefixes to restore to the GPU before the next turn of a conversation requests them.

Prompts that continue each other are a thread: the turns of a conversation, the steps of an agent, the
questions about a document. A thread that came back a few times has a rhythm. The rhythm gives a window of
time in which the next turn is due. Restoring the thread's blocks from a lower tier ahead of it is worth

    P(requested within the window) × seconds it would take to restore then ÷ blocks

A restore must be worth clearly more than what the GPU evicts for it. Offloading is not decided here: engines
with a lower tier write there what they evict, or as they compute it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import median
from typing import Generic, TypeVar

import msgspec

from proxy.core.index.blocks import BlockHash

# Threads that are remembered, and tokens of their last prompts: some tens of MB.
MAX_THREADS = 10_000
MAX_TOKENS = 4_000_000
# A rhythm needs the last gaps between turns, at least two: one gap does not say how regular they are.
GAPS = 8
MIN_GAPS = 2
# A window reaches three median deviations to both sides of the median gap, which is two standard deviations
# of a normal distribution. A deviation counts as 5% of the gap at least.
WIDTH = 3.0
LEAST_SPREAD = 0.05
# The KV that the GPU evicts must be worth less than half of the KV that is restored: both values are
# estimates, and moving is work.
MARGIN = 2.0
SPARE = 64  # stale entries that the heap may hold, in addition to one for each thread
HALF_OCTAVE = 2**0.5 - 1  # `Demand` counts ages in half octaves

Prompt = TypeVar("Prompt")
Returns = Callable[[float], float]


@dataclass(slots=True, eq=False)
class Thread(Generic[Prompt]):
    """A prompt that a later one may continue. Times in seconds of the caller's clock."""

    prompt: Prompt  # whatever the caller needs to restore it
    hashes: tuple[BlockHash, ...]
    n_tokens: int
    ended: float  # when its answer ended
    # The last gaps, in seconds from the end of an answer to the next turn, of answers that ended with a tool
    # call if this one did, else of the others. Tools take seconds, people minutes.
    gaps: tuple[float, ...] = ()
    other_gaps: tuple[float, ...] = ()  # those of the other kind of answers
    called_tool: bool = False  # its answer ended with a tool call
    restored_on: str | None = None  # the engine that it was restored on for the turn that is due
    on_gpu: int = 0  # blocks of it that were on that GPU before

    @property
    def window(self) -> tuple[float, float] | None:
        """When its next turn is due, from and to; None if it has no rhythm yet."""
        if len(self.gaps) < MIN_GAPS:
            return None
        usual = median(self.gaps)
        spread = WIDTH * max(median(abs(gap - usual) for gap in self.gaps), LEAST_SPREAD * usual)
        return self.ended + max(usual - spread, 0.0), self.ended + usual + spread

    def chance(self, now: float, until: float, returns: Returns) -> float:
        """Probability that its next turn comes by `until`, given that it has not come yet. Its own gaps count
        once each, the pool's return rate counts as one more."""
        idle, end = now - self.ended, until - self.ended
        later = [gap for gap in self.gaps if gap > idle]
        by_then = sum(gap <= end for gap in later)
        return (by_then + soon(returns, idle, until - now)) / (len(later) + 1)


class Threads(Generic[Prompt]):
    """The threads that may continue, and which of them are due."""

    def __init__(self) -> None:
        self._threads: OrderedDict[BlockHash, Thread[Prompt]] = OrderedDict()  # by last block, oldest first
        self._tokens = 0
        self._opening: list[tuple[float, BlockHash]] = []  # a heap by opening time; may hold dropped threads
        self._due: OrderedDict[Thread[Prompt], float] = OrderedDict()  # → when the window closes

    def turn(
        self,
        started: float,
        ended: float,
        hashes: tuple[BlockHash, ...],
        n_tokens: int,
        prompt: Prompt,
        *,
        called_tool: bool = False,
    ) -> Thread[Prompt] | None:
        """A request was answered. Returns the thread that it continues, the longest if there are several."""
        if not hashes:
            return None
        found = [self._threads[last] for last in self._threads.keys() & hashes]
        before = max(found, key=lambda thread: len(thread.hashes), default=None)
        gaps: tuple[float, ...] = ()
        other_gaps: tuple[float, ...] = ()
        if before is not None:
            self._drop(before)
            if started >= before.ended:
                gaps, other_gaps = (*before.gaps, started - before.ended)[-GAPS:], before.other_gaps
            if called_tool != before.called_tool:
                gaps, other_gaps = other_gaps, gaps
        self._add(Thread(prompt, hashes, n_tokens, ended, gaps, other_gaps, called_tool))
        return before

    def due(self, now: float) -> Iterator[Thread[Prompt]]:
        """Yields each thread that is due and was not restored for this turn. A thread that was yielded comes
        last the next time, so that a caller who stops early still reaches all of them."""
        while self._opening and self._opening[0][0] <= now:
            _, last = heappop(self._opening)
            thread = self._threads.get(last)
            window = thread.window if thread is not None else None
            if thread is not None and window is not None and window[0] <= now < window[1]:
                self._due[thread] = window[1]
        for _ in range(len(self._due)):
            thread, closes = next(iter(self._due.items()))
            self._due.move_to_end(thread)
            if closes > now and thread.restored_on is None:
                yield thread

    def lapsed(self, now: float) -> list[Thread[Prompt]]:
        """The threads whose window closed without a next turn; each is returned once."""
        over = [thread for thread, closes in self._due.items() if closes <= now]
        for thread in over:
            del self._due[thread]
        return over

    def closes(self, thread: Thread[Prompt]) -> float:
        """When the window of a thread that is due closes."""
        return self._due[thread]

    def _add(self, thread: Thread[Prompt]) -> None:
        self._threads[thread.hashes[-1]] = thread
        self._tokens += thread.n_tokens
        window = thread.window
        if window is not None:
            heappush(self._opening, (window[0], thread.hashes[-1]))
        if len(self._opening) > 2 * len(self._threads) + SPARE:
            self._sweep()
        while len(self._threads) > MAX_THREADS or self._tokens > MAX_TOKENS:
            self._drop(next(iter(self._threads.values())))

    def _sweep(self) -> None:
        windows = ((last, thread.window) for last, thread in self._threads.items())
        self._opening = sorted((window[0], last) for last, window in windows if window is not None)

    def _drop(self, thread: Thread[Prompt]) -> None:
        del self._threads[thread.hashes[-1]]
        self._tokens -= thread.n_tokens
        self._due.pop(thread, None)


class AheadCounts(msgspec.Struct):
    """Restores ahead on one engine: how many, of how many blocks; how many a turn found, and how many not."""

    restores: int = 0
    blocks: int = 0
    used: int = 0
    wasted: int = 0


@dataclass(frozen=True, slots=True)
class Below(Generic[Prompt]):
    """A thread that is due and has blocks on an engine's lower tiers."""

    thread: Thread[Prompt]
    blocks: int  # how many of its blocks would be restored
    until: float  # when its window closes


def gain(
    below: Below[Prompt], now: float, free_blocks: int, lost: Callable[[int, float], float], returns: Returns
) -> float:
    """Gain of restoring a thread: blocks that are requested soon, for each block restored. Restore only if
    it is above 0. `free_blocks`: empty blocks on the engine's GPU. `lost`: (blocks that the GPU evicts,
    seconds) → how many of them are requested within that time, on average. `returns`: see `Demand`."""
    leaving = max(below.blocks - free_blocks, 0)
    price = lost(leaving, below.until - now) if leaving else 0.0
    return below.thread.chance(now, below.until, returns) - MARGIN * price / below.blocks


def soon(returns: Returns, idle_s: float, within_s: float) -> float:
    """Probability that a prompt idle for `idle_s` seconds is requested again within `within_s` seconds. The
    number of prompts that never come back is the same at every age. So the odds of coming back are
    proportional to the number of prompts still to come. The difference between the odds at two ages is
    proportional to the number that come in between. Ages are known to half an octave; a shorter time gets its
    share of that."""
    over_s = max(within_s, HALF_OCTAVE * idle_s)
    if over_s <= 0:
        return 0.0
    now, then = _odds(returns(idle_s)), _odds(returns(idle_s + over_s))
    return max(now - then, 0.0) / (1 + now) * min(within_s / over_s, 1.0)


def _odds(probability: float) -> float:
    return probability / max(1 - probability, 1e-9)
