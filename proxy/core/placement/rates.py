"""The rates of engines: seconds to compute tokens, and to restore them.

Rates are medians of what first tokens showed, so that one odd request teaches little. The engines of a pool
serve the same model, mostly on the same hardware. They learn one curve of seconds over prompt lengths
together, so that equal engines have equal costs, whatever the noise. An engine that is clearly faster or
slower has a pace of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count
from statistics import fmean, median, median_low, quantiles
from weakref import WeakKeyDictionary

import msgspec

from engine_adapter.types import Tier
from proxy.core.placement.load import LoadSample, Work
from proxy.core.placement.whole_answers import REFIT, AnswerFit, AnswerSample, Fit

DEFAULT_PREFILL_TOK_S = 4000.0  # Prior: a small model on a CPU. Only ratios between engines matter at first.
# Prior: restoring from memory is ten times as fast as computing, and three times as fast as from disk.
HOST_SPEEDUP = 10.0
DISK_SPEEDUP = 3.0
MIN_SAMPLE_TOKENS = 64  # the first token of a shorter prompt measures the round trip
WINDOW = 16  # medians are of this many samples
# Fewer say nothing. If the first restore was held up and counted, no request would come to teach another.
MIN_RESTORES = 3
EACH = 4  # a point of the curve is drawn anew after so many samples of it, once its window is full
TYPICAL_TOKENS = 1024  # length of a prompt whose rate stands for the whole curve
# If three quarters of an engine's samples are this far off the usual pace, it is other hardware; less is
# noise.
OWN_PACE = 1.25
MAX_INTERFERENCE = 0.2  # a decoding stream slows a prefill by at most this share
_MEMO = 4096


class Timings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last samples of one engine's rates, for a kvpin that has learned nothing of it."""

    prefills: list[tuple[int, float]]  # tokens, and seconds with nothing decoding
    are_blurred: bool  # the engine also worked for clients that kvpin does not see
    answers: list[AnswerSample]


def on_curve(lengths: Sequence[float], seconds: Sequence[float], tokens: float) -> float:
    """Seconds on the lines between the points of a curve; in proportion before its first and after its last
    point. There must be one."""
    at = bisect_left(lengths, tokens)
    if at == len(lengths):
        return seconds[-1] * tokens / lengths[-1]
    left, low = (lengths[at - 1], seconds[at - 1]) if at else (0.0, 0.0)
    return low + (seconds[at] - low) * (tokens - left) / (lengths[at] - left)


class PoolRates:
    """Rates that the engines of one pool share."""

    def __init__(self) -> None:
        # Prompt tokens computed per second, in prompts of TYPICAL_TOKENS.
        self.prefill_tok_s = DEFAULT_PREFILL_TOK_S
        self.interference = 0.0  # share that each decoding stream adds to the time of a prefill
        self.epoch = 0  # number that changes when rates change by more than OWN_PACE
        self.learned = False  # any rate was learned
        self._epoch_tok_s = self.prefill_tok_s
        # Octave of tokens → (number, tokens, seconds). A later sample has a higher number.
        self._samples: dict[int, deque[tuple[int, int, float]]] = {}
        self._number = count()
        self._points: dict[int, tuple[float, float]] = {}  # octave → medians of those
        self._lengths: list[float] = []  # points of the curve: tokens
        self._seconds: list[float] = []  # and their seconds
        self._memo: dict[int, float] = {}
        # (streams, seconds over the curve's)
        self._slowdowns: deque[tuple[float, float]] = deque(maxlen=4 * WINDOW)
        self._until_interference = WINDOW
        self._seen: Counter[int] = Counter()  # octave → samples of the curve
        self._restores = {tier: deque[float](maxlen=WINDOW) for tier in (Tier.HOST, Tier.DISK)}
        self.measured_tok_s: dict[Tier, float] = {}  # tokens restored from a lower tier per second
        self._ratios = WeakKeyDictionary[EngineRates, float]()  # engine → its seconds over the curve's
        self.is_blurred = True  # no clear sample has come yet
        self._answers = AnswerFit()
        # Rates from whole answers; None before there are enough, and once a first token was seen.
        self.fit: Fit | None = None

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The learned seconds over prompt lengths in tokens; empty before any was learned."""
        return list(zip(self._lengths, self._seconds, strict=True))

    @property
    def samples(self) -> int:
        """Samples that the curve rests on; those of whole answers do not count."""
        return sum(map(len, self._samples.values()))

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens on an idle engine; never less for more tokens."""
        seconds = self._memo.get(tokens)
        if seconds is None:
            if len(self._memo) >= _MEMO:
                self._memo.clear()
            seconds = (
                on_curve(self._lengths, self._seconds, tokens)
                if self._lengths
                else tokens / DEFAULT_PREFILL_TOK_S
            )
            self._memo[tokens] = seconds
        return seconds

    def restore_tok_s(self, tier: Tier) -> float:
        """Tokens restored from a lower tier per second."""
        learned = self.measured_tok_s.get(tier)
        if learned is not None:
            return learned
        if tier is Tier.DISK:
            return self.restore_tok_s(Tier.HOST) / DISK_SPEEDUP
        return HOST_SPEEDUP * self.prefill_tok_s

    def computed(self, tokens: int, seconds: float, decoding: float) -> None:
        """A prefill of `tokens` took `seconds` while `decoding` streams ran."""
        self._slowdowns.append((decoding, seconds / self.prefill_s(tokens)))
        self._until_interference -= 1
        if self._until_interference <= 0:
            self._until_interference = REFIT
            self._relearn_interference()
        if self.fit is not None:  # a first token tells more
            self.fit = None
            self._points.clear()
        octave = tokens.bit_length()
        samples = self._samples.setdefault(octave, deque(maxlen=WINDOW))
        samples.append((next(self._number), tokens, seconds / (1 + self.interference * decoding)))
        self._seen[octave] += 1
        if len(samples) == WINDOW and octave in self._points and self._seen[octave] % EACH:
            return
        self._points[octave] = median([n for _, n, _ in samples]), median([s for _, _, s in samples])
        self._redraw()

    def answered(self, now: float, answer: AnswerSample) -> None:
        """Learns from a whole answer, while no first token has been seen."""
        fit = self._answers.add(now, answer)
        if fit is not None:
            self.fit = fit
            self._points[0] = TYPICAL_TOKENS, TYPICAL_TOKENS * fit.token_s
            self._redraw()

    def usual(self, engine: EngineRates, ratio: float) -> float:
        """The median engine's seconds over the curve's, now that `engine` has this `ratio`. An engine's pace
        is relative to this median, not to the curve: the curve is learned from samples that contain the
        paces, so comparing with it would feed back."""
        self._ratios[engine] = ratio
        return median_low(self._ratios.values())

    def admits(self, *, blurred: bool) -> bool:
        """True if a sample counts. Blurred samples count until the first clear one, which replaces them."""
        if blurred or not self.is_blurred:
            return self.is_blurred or not blurred
        self.is_blurred, self._until_interference = False, WINDOW
        for learned in (self._samples, self._points, self._slowdowns):
            learned.clear()
        return True

    def restored(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Restoring `tokens` tokens from `tier` took `seconds`."""
        rates = self._restores[tier]
        rates.append(tokens / seconds)
        if len(rates) >= MIN_RESTORES:
            self.measured_tok_s[tier] = median(rates)

    def _redraw(self) -> None:
        """Draws the curve through the points, of which there is one, so that it never falls. Octaves of which
        the shorter took longer get one median, of the last samples of all of them: the others are old,
        or too few."""
        self.learned = True
        octaves = sorted(self._points)
        # Seconds, how many octaves have them, and the samples that say so.
        levels: list[tuple[float, int, list[tuple[int, int, float]]]] = []
        for octave in octaves:
            n, last, seconds = 1, [*self._samples.get(octave, ())], self._points[octave][1]
            while levels and levels[-1][0] > seconds:
                _, others, before = levels.pop()
                n, last = n + others, sorted([*before, *last])[-WINDOW:]
                seconds = median_low([each for _, _, each in last])
            levels.append((seconds, n, last))
        self._lengths = [self._points[octave][0] for octave in octaves]
        self._seconds = [seconds for seconds, n, _ in levels for _ in range(n)]
        self._memo.clear()
        self.prefill_tok_s = TYPICAL_TOKENS / self.prefill_s(TYPICAL_TOKENS)
        if not 1 / OWN_PACE < self.prefill_tok_s / self._epoch_tok_s < OWN_PACE:
            self.epoch, self._epoch_tok_s = self.epoch + 1, self.prefill_tok_s

    def _relearn_interference(self) -> None:
        """Relearns the share that a decoding stream adds: the slope between the busier and the quieter half
        of the samples."""
        by_streams = sorted(self._slowdowns)
        half = len(by_streams) // 2
        quiet, busy = by_streams[:half], by_streams[half:]
        apart = fmean([n for n, _ in busy]) - fmean([n for n, _ in quiet])
        if apart >= 1:
            slower = median([times for _, times in busy]) - median([times for _, times in quiet])
            self.interference = min(max(slower / apart, 0.0), MAX_INTERFERENCE)


class EngineRates:
    """One engine's rates: those of its pool, at its own pace."""

    def __init__(self, pool: PoolRates) -> None:
        self.pool = pool  # the rates it shares with the other engines
        self.pace = 1.0  # its seconds over the pool's; 1.0 unless its hardware is clearly different
        # (tokens, seconds with nothing decoding)
        self._samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._answers: deque[AnswerSample] = deque(maxlen=WINDOW)
        self._until_pace = REFIT

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens it computes per second, in prompts of TYPICAL_TOKENS."""
        return self.pool.prefill_tok_s / self.pace

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens on an idle engine."""
        return self.pool.prefill_s(tokens) * self.pace

    def restore_s(self, host_tokens: int, disk_tokens: int) -> float:
        """Seconds to restore these tokens from the two lower tiers."""
        if not (host_tokens or disk_tokens):
            return 0.0
        host_s = host_tokens / self.pool.restore_tok_s(Tier.HOST)
        return host_s + disk_tokens / self.pool.restore_tok_s(Tier.DISK)

    def price(self, work: Work) -> float:
        """Seconds of the engine's time that this work takes."""
        return self.prefill_s(work.computed) + self.restore_s(work.host, work.disk)

    @property
    def timings(self) -> Timings | None:
        """The samples it was last learned from; None without any."""
        if not (self._samples or self._answers):
            return None
        return Timings([*self._samples], self.pool.is_blurred, [*self._answers])

    def adopt(self, now: float, timings: Timings) -> None:
        """Learns from what another kvpin learned from, unless this one has learned from as much itself."""
        if len(self._samples) + len(self._answers) >= len(timings.prefills) + len(timings.answers):
            return
        for tokens, seconds in timings.prefills:
            self.learn(LoadSample(Work(tokens), seconds, 0.0, blurred=timings.are_blurred))
        for answer in timings.answers:
            self.answered(now, answer)

    def learn(self, sample: LoadSample) -> None:
        """Learns from a sample of the engine's time. Samples that say little are ignored."""
        work, pool = sample.work, self.pool
        if not pool.admits(blurred=sample.blurred):
            return
        computing_s = sample.seconds - self.restore_s(work.host, work.disk)
        brought = work.host + work.disk
        # A sample teaches the rate of what it mostly consists of, by tokens and not by time. By time, any
        # delay of the engine would look like slow restores; then nothing would be restored, and nothing
        # relearned.
        if brought >= max(HOST_SPEEDUP * work.computed, MIN_SAMPLE_TOKENS):
            restoring_s = sample.seconds - self.prefill_s(work.computed)
            if restoring_s > sample.seconds / 2:
                pool.restored(Tier.HOST if work.host >= work.disk else Tier.DISK, brought, restoring_s)
        elif work.computed >= max(brought, MIN_SAMPLE_TOKENS) and computing_s > sample.seconds / 2:
            pool.computed(work.computed, computing_s / self.pace, sample.decoding)
            alone_s = computing_s / (1 + pool.interference * sample.decoding)
            self._samples.append((work.computed, alone_s))
            self._until_pace -= 1
            if self._until_pace <= 0 and len(self._samples) >= WINDOW:
                self._until_pace = REFIT
                self._relearn_pace([seconds / pool.prefill_s(tokens) for tokens, seconds in self._samples])

    def answered(self, now: float, answer: AnswerSample) -> None:
        """Learns from a whole answer of the engine. Does nothing once a first token has been seen."""
        if answer.seconds <= 0 or answer.prefilled < 1 or self.pool.samples:
            return
        self.pool.answered(now, AnswerSample(answer.prefilled, answer.output, answer.seconds / self.pace))
        self._answers.append(answer)
        self._until_pace -= 1
        fit = self.pool.fit
        if self._until_pace <= 0 and fit is not None:
            self._until_pace = REFIT
            self._relearn_pace([each.seconds / fit.seconds(each) for each in self._answers])

    def _relearn_pace(self, ratios: Sequence[float]) -> None:
        """Relearns the pace from each of the last samples' seconds over the pool's."""
        if len(ratios) < WINDOW:
            return
        low, middle, high = quantiles(ratios, n=4)
        usual = self.pool.usual(self, middle)
        is_other = low > usual * OWN_PACE or high < usual / OWN_PACE
        self.pace = middle / usual if is_other else 1.0
