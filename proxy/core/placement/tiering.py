"""What to bring back to the GPU before it is asked for: the next turn of whoever is about to return.

Prompts that go on from each other are a thread: the turns of a conversation, the steps of an agent, the
questions about a document. A thread that came back a few times has a rhythm, and with it a window of time in
which it is due. What of it lies below the GPU is worth bringing back ahead of that by

    P(asked for within the window) × seconds it would take to restore then ÷ blocks

and only where that is worth clearly more than what leaves the GPU for it. Writing back ahead of need is not
decided here: the engines that have a tier below their GPU write there what they evict, or as they compute it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import median
from typing import Generic, TypeVar

from proxy.core.index.blocks import BlockHash
from proxy.core.placement.demand import goes_on_from

# Threads that are remembered, and tokens of their last prompts: some tens of megabytes.
MAX_THREADS = 10_000
MAX_TOKENS = 4_000_000
# A rhythm is told by the last gaps between turns, two at least: one does not say how regular they are.
GAPS = 8
MIN_GAPS = 2
# A window reaches three median deviations to both sides of the usual gap, which are two standard deviations
# of what is normal; nothing is more regular than 5% of it.
WIDTH = 3.0
LEAST_SPREAD = 0.05
# What leaves the GPU has to be worth less than half of what comes: both are estimates, and moving is work.
MARGIN = 2.0
# Entries of threads that came back before they were due, beside as many as there are threads.
SPARE = 64
# Ages at which prompts come back are known in half octaves.
HALF_OCTAVE = 2**0.5 - 1

Prompt = TypeVar("Prompt")
Returns = Callable[[float], float]


@dataclass(slots=True, eq=False)
class Thread(Generic[Prompt]):
    """A prompt that may be gone on from. Times in seconds of the caller's clock.

    Attributes:
        prompt: whatever the caller needs to bring it back.
        hashes: its blocks.
        n_tokens: its length.
        ended: when its answer was over.
        gaps: seconds from the end of an answer to the next turn, the last few of them.
        restored_on: the engine that it was brought back on for the turn that is due.
        on_gpu: blocks of it that lay on that GPU before.
    """

    prompt: Prompt
    hashes: tuple[BlockHash, ...]
    n_tokens: int
    ended: float
    gaps: tuple[float, ...] = ()
    restored_on: str | None = None
    on_gpu: int = 0

    @property
    def window(self) -> tuple[float, float] | None:
        """When its next turn is due, from and to; None where that is not known."""
        if len(self.gaps) < MIN_GAPS:
            return None
        usual = median(self.gaps)
        spread = WIDTH * max(median(abs(gap - usual) for gap in self.gaps), LEAST_SPREAD * usual)
        return self.ended + max(usual - spread, 0.0), self.ended + usual + spread

    def chance(self, now: float, until: float, returns: Returns) -> float:
        """How likely its next turn comes by `until`, if it has not come by now: as often as it did, and once
        as any prompt of the pool does."""
        idle, end = now - self.ended, until - self.ended
        later = [gap for gap in self.gaps if gap > idle]
        by_then = sum(gap <= end for gap in later)
        return (by_then + soon(returns, idle, until - now)) / (len(later) + 1)


class Threads(Generic[Prompt]):
    """The threads that may go on, and which of them are due."""

    def __init__(self) -> None:
        self._threads: OrderedDict[BlockHash, Thread[Prompt]] = OrderedDict()  # by last block, oldest first
        self._tokens = 0
        self._opening: list[tuple[float, BlockHash]] = []  # a heap, of threads that are gone, too
        self._due: OrderedDict[Thread[Prompt], float] = OrderedDict()  # → when the window closes

    def __len__(self) -> int:
        return len(self._threads)

    def turn(
        self, started: float, ended: float, hashes: tuple[BlockHash, ...], n_tokens: int, prompt: Prompt
    ) -> Thread[Prompt] | None:
        """A request was answered. Returns the thread that it went on from, as it was: the longest of them."""
        if not hashes:
            return None
        found = [self._threads[last] for last in goes_on_from(self._threads, hashes)]
        before = max(found, key=lambda thread: len(thread.hashes), default=None)
        gaps: tuple[float, ...] = ()
        if before is not None:
            self._drop(before)
            if started >= before.ended:
                gaps = (*before.gaps, started - before.ended)[-GAPS:]
        self._add(Thread(prompt, hashes, n_tokens, ended, gaps))
        return before

    def due(self, now: float) -> Iterator[Thread[Prompt]]:
        """The threads whose next turn is due and that were not brought back for it, each once. Those that
        were told come last the next time, so that who cannot look at all of them still comes to each."""
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
        """The threads that were due and did not come; told once."""
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


@dataclass(slots=True)
class AheadCounts:
    """What was restored ahead on an engine: restores and blocks so far, and of those restores the ones whose
    turn came in time and found it there, and the ones whose turn did not."""

    restores: int = 0
    blocks: int = 0
    used: int = 0
    wasted: int = 0


@dataclass(frozen=True, slots=True)
class Below(Generic[Prompt]):
    """A thread that is due, with blocks of it below an engine's GPU.

    Attributes:
        thread: the thread.
        blocks: how many of its blocks are to be brought back.
        until: when its window closes.
    """

    thread: Thread[Prompt]
    blocks: int
    until: float


def gain(
    below: Below[Prompt],
    now: float,
    free_blocks: int,
    lost: Callable[[int, float], float],
    returns: Returns,
) -> float:
    """What bringing a thread back is worth, in blocks that are asked for soon, for each block of it; it is
    not worth its room where that is not above 0.

    Args:
        below: what an engine could bring back.
        now: the time.
        free_blocks: blocks of its GPU that hold nothing.
        lost: of so many blocks that would leave the GPU, those asked for within so many seconds, on average.
        returns: see `Demand.returns`.
    """
    leaving = max(below.blocks - free_blocks, 0)
    price = lost(leaving, below.until - now) if leaving else 0.0
    return below.thread.chance(now, below.until, returns) - MARGIN * price / below.blocks


def soon(returns: Returns, idle_s: float, within_s: float) -> float:
    """How likely a prompt of which nobody asked for `idle_s` is asked for again within `within_s`.

    Of those that never come back there are as many at any age. So the odds of ever coming back tell how many
    are still to come, and their difference how many come in between; at least over the half octave that ages
    are known to, of which it is then a part.
    """
    over_s = max(within_s, HALF_OCTAVE * idle_s)
    if over_s <= 0:
        return 0.0
    now, then = _odds(returns(idle_s)), _odds(returns(idle_s + over_s))
    return max(now - then, 0.0) / (1 + now) * min(within_s / over_s, 1.0)


def _odds(probability: float) -> float:
    return probability / max(1 - probability, 1e-9)
