"""What a placement costs other requests: how likely prompts come back, how busy engines are, and what an
engine would evict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from math import exp, expm1, log2

from proxy.core.index.blocks import BlockHash, Chain

# --- the demand of a pool: how likely prompts come back, and how busy they keep engines -----------------
# Both decide what a placement costs other requests. A prompt is known by its last full block. It comes back
# when a later prompt continues it. The ages at which prompts came back give the probability that an idle
# prompt is requested again: conversations come back within a minute or two, or never.
#
# How busy engines are is told by amounts that fade with time, so that no list of past events is kept.

WINDOW_S = 120.0  # the last minutes: long enough to see many prompts, short enough to follow the day
RATE_S = 10.0  # the last seconds: a burst counts while it lasts
YOUNG_S = 1.5  # a rate over less time than this would be that of its first amount


class Recent:
    """Means of the amounts of the last minutes. The weight of each fades by a factor of e in WINDOW_S."""

    __slots__ = ("_at", "_count", "_squares", "_sum")

    def __init__(self) -> None:
        self._count = self._sum = self._squares = self._at = 0.0

    def add(self, now: float, amount: float) -> None:
        """Adds an amount now."""
        kept = exp((self._at - now) / WINDOW_S) if self._count else 0.0
        self._count = self._count * kept + 1
        self._sum = self._sum * kept + amount
        self._squares = self._squares * kept + amount * amount
        self._at = now

    @property
    def mean(self) -> float:
        """The mean amount; 0 if there was none."""
        return self._sum / self._count if self._count else 0.0

    @property
    def rest(self) -> float:
        """Mean time left of an amount of time, for somebody who comes while it runs; 0 if there was none. It
        is E[s²] / 2E[s], because somebody finds a long time running more often than a short one."""
        return self._squares / (2 * self._sum) if self._sum else 0.0


class Rate:
    """The amount added per second, lately. While the first amount is younger than `fades_s`, the rate is the
    one since the first amount."""

    __slots__ = ("_at", "_fades_s", "_first", "_sum")

    def __init__(self, fades_s: float = RATE_S) -> None:
        """Each amount fades by a factor of e in `fades_s` seconds."""
        self._fades_s = fades_s
        self._sum = self._at = 0.0
        self._first: float | None = None

    def add(self, now: float, amount: float) -> None:
        """Adds an amount now; takes back one that is negative."""
        if self._first is None:
            self._first = now
        kept = self._sum * exp((self._at - now) / self._fades_s) + amount
        self._sum, self._at = kept if kept > 0 else 0.0, now

    def add_evenly(self, now: float, amount: float) -> None:
        """Adds an amount that came evenly since the last one was added. When the first began is not known:
        it does not count."""
        if self._first is None:
            amount = 0.0
        elif amount and (gap := (now - self._at) / self._fades_s):
            amount *= -expm1(-gap) / gap
        self.add(now, amount)

    def per_s(self, now: float) -> float:
        """The rate now; 0 if nothing was added."""
        if self._first is None:
            return 0.0
        age, fades_s = now - self._first, self._fades_s
        age = age if age > YOUNG_S else YOUNG_S  # noqa: FURB136 - of each engine at each placement
        faded = self._sum * exp((self._at - now) / fades_s)
        return faded / (fades_s * (1 - exp(-age / fades_s)))

    def is_young(self, now: float) -> bool:
        """True if the first amount was added less than `fades_s` ago, or none was."""
        return self._first is None or now - self._first < self._fades_s


MAX_PROMPTS = 50_000  # Prompts that may come back. Older ones count as never coming back.
# Ages are counted in half octaves from this many seconds, up to some months.
YOUNGEST_S = 0.1
AGES = 56
# Prior: three blocks of ten come back. It weighs as much as this many observed blocks.
PRIOR_BLOCKS = 100.0
PRIOR = 0.3
# Learned counts are halved after this many prompts, because demand changes.
HALF_LIFE = 2000
REFRESH = 16
# Work is never free: of two engines that answer as fast, the one that computes less leaves more for others.
MIN_UTILISATION = 0.1
# While a burst finds an engine idle, a copy of its beginning is worth this share of the time that it takes.
BURST_UTILISATION = 0.02
# More turns cannot be foreseen: the share of prompts that never return would be too small to measure.
MAX_TURNS = 20.0
MAX_UTILISATION = 0.95  # keeps the price of work finite in a pool that gets more work than it can do


class Demand:
    """The requests of a pool's clients, and the work that they make."""

    def __init__(self) -> None:
        self._asked: OrderedDict[BlockHash, tuple[float, int]] = OrderedDict()  # → when, blocks
        self._came_back = [0.0] * AGES  # blocks, by the age at which they did
        self._made = 0.0
        self._returns = [PRIOR] * AGES
        self._until_refresh = REFRESH
        self._until_half = HALF_LIFE
        self.prefills = Recent()  # seconds that engines spent on prompts before their first tokens
        self.answers = Recent()  # seconds that answers took from their first token to their last
        self._placed = Rate()  # seconds of work

    def placed(self, now: float, seconds: float, *, learned: bool = True) -> float:
        """A prompt was placed that will take an engine `seconds` before its first token. Returns how many of
        these count. If no rate was `learned`, they are a guess, which counts in the first burst only: a pool
        may never learn a rate."""
        counted_s = seconds if learned or self._placed.is_young(now) else 0.0
        self._placed.add(now, counted_s)
        return counted_s

    def refused(self, now: float, counted_s: float) -> None:
        """A prompt that was placed failed before its first token: what was counted was no work."""
        self._placed.add(now, -counted_s)

    def asked(self, now: float, chain: Chain, computed: int) -> None:
        """A prompt was requested, and an engine had to compute `computed` tokens of it."""
        hashes = chain.hashes
        if not hashes:
            return
        blocks = computed // chain.tokens_per_block
        for last in self._asked.keys() & hashes:  # the prompts that it continues
            then, before = self._asked.pop(last)
            self._came_back[_age(now - then)] += before
            blocks += before
        self._made += blocks
        self._asked[hashes[-1]] = (now, blocks)
        if len(self._asked) > MAX_PROMPTS:
            self._asked.popitem(last=False)
        self._until_refresh -= 1
        if not self._until_refresh:
            self._refresh()

    def returns(self, idle_s: float) -> float:
        """Probability that a prompt idle for `idle_s` seconds is requested again. Prior: 0.3."""
        return self._returns[_age(idle_s)]

    @property
    def turns(self) -> float:
        """Expected number of requests of a prompt from now on, the present one included; 1 to MAX_TURNS."""
        return min(1 / (1 - self._returns[0]), MAX_TURNS)

    def utilisation(self, now: float, engines: int, spare: float = 0.0) -> float:
        """Share of their time that the `engines` which compute prompts need for those placed lately;
        MIN_UTILISATION to MAX_UTILISATION. Prompts in queues count: they make work dear before any of it is
        done. An engine that is `spare` in a burst (0 to 1, see `spare_of`) brings it down to
        BURST_UTILISATION."""
        busy = min(max(self._placed.per_s(now) / engines, MIN_UTILISATION), MAX_UTILISATION)
        return max(busy * (1 - spare), BURST_UTILISATION)

    def _refresh(self) -> None:
        self._until_refresh = REFRESH
        self._until_half -= REFRESH
        if self._until_half <= 0:
            self._until_half = HALF_LIFE
            self._made /= 2
            self._came_back = [blocks / 2 for blocks in self._came_back]
        never = max(self._made - sum(self._came_back), 0.0) + (1 - PRIOR) * PRIOR_BLOCKS
        later = PRIOR * PRIOR_BLOCKS
        for age in range(AGES - 1, -1, -1):
            later += self._came_back[age]
            self._returns[age] = later / (later + never)


def _age(seconds: float) -> int:
    """The half octave of an age."""
    return min(int(2 * log2(seconds / YOUNGEST_S)) + 1, AGES - 1) if seconds > YOUNGEST_S else 0


# --- in use ---------------------------------------------------------------------------------------------
# The GPU memory that requests in flight hold, and the prompts that an engine would evict for more.

MAX_RESIDENTS = 20_000  # more prompts than an engine holds
MAX_LOOKED_AT = 32  # if an eviction takes more prompts than this, the rest are assumed to be like these


class Residents:
    """The prompts that one engine would evict, least recently used first; each by its last full block.
    Engines evict the least recently used blocks, from the end of prompts. The requests that the engine served
    tell the order; the index tells whether a prompt is still there."""

    def __init__(self, holds: Callable[[BlockHash], bool]) -> None:
        """`holds` says whether the engine still holds a block."""
        self._holds = holds
        # → when, blocks that no other prompt has, all blocks
        self._prompts: OrderedDict[BlockHash, tuple[float, int, int]] = OrderedDict()

    def use(self, now: float, hashes: Sequence[BlockHash], new: int) -> None:
        """The engine has served a prompt; `new` of its blocks are new here. The prompts that it continues
        become part of it."""
        if not hashes:
            return
        prompts, blocks = self._prompts, new
        for last in prompts.keys() & hashes:
            blocks += prompts.pop(last)[1]
        prompts[hashes[-1]] = (now, min(blocks, len(hashes)), len(hashes))
        if len(prompts) > MAX_RESIDENTS:
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
        return bool(self._prompts.keys() & hashes)

    def clear(self) -> None:
        """The engine lost everything."""
        self._prompts.clear()


STRIDE = 64  # Blocks that one noted block stands for. What two prompts share is known to within this many.


class InUse:
    """GPU memory of one engine that requests in flight hold. The engine cannot evict it before they end.
    Blocks that requests share count once. Two prompts with one block in common have all blocks before it in
    common, so only every 64th block of a prompt is noted; it stands for the 64 that end there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # of the GPU, in blocks
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
