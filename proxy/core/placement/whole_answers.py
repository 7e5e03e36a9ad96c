"""Rates from whole answers: answers that do not stream, and so never show their first token.

An engine's time from the request to the answer is

    seconds = prefill tokens × a + output tokens × b

where prefill tokens are all that the engine computed meanwhile, for other requests too. Each two answers give
an `a`; the fit takes the median of all of them, weighted by how different the two answers are (Theil 1950,
Sen 1968). A quarter of the answers may be far off, because of a queue that is not seen or an engine that was
held up, and the medians stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from operator import itemgetter
from statistics import median

import msgspec

# The fit uses the last answers, once there are enough of them, and is repeated after every few. Once the
# window is full, it is repeated only for a new window that it does not explain, and at most once in REFIT_S
# seconds: a fit of 2,000 pairs takes milliseconds.
WINDOW = 64
MIN_ANSWERS = 16
REFIT = 8
REFIT_S = 10.0
# Prompt tokens that cost as much as a decode step, until answers of different kinds are seen: 100 to 300 on
# GPUs, 10 to 50 on CPUs.
STEP_TOKENS = 64
# Two answers whose shares of prefill differ by less tell nothing: their difference is noise.
LEAST_APART = 0.02
CLOSE = 0.05  # a fit explains answers that take this share more or less than it says
# Weight of that guess, for each answer: two answers of quite different kinds have a weight of 1.
GUESS_WEIGHT = 0.25


class AnswerSample(msgspec.Struct, frozen=True, gc=False):
    """One whole answer."""

    prefilled: int  # prompt tokens that the engine computed from its beginning to its end
    output: int  # tokens of the answer
    seconds: float  # from the request to the answer

    @property
    def prefill_share(self) -> float:
        """Share of its time that was prefill, by the guess that a step costs STEP_TOKENS."""
        return self.prefilled / (self.prefilled + STEP_TOKENS * self.output)


class Fit(msgspec.Struct, frozen=True, gc=False):
    """Seconds for each prompt token, and for each token of an answer."""

    token_s: float
    step_s: float

    def seconds(self, answer: AnswerSample) -> float:
        """Seconds that the answer should have taken."""
        return answer.prefilled * self.token_s + answer.output * self.step_s


class AnswerFit:
    """Fits the last answers of a pool."""

    def __init__(self) -> None:
        self._answers: deque[AnswerSample] = deque(maxlen=WINDOW)
        self._until_fit = MIN_ANSWERS
        self._not_before = -inf
        self._last: Fit | None = None

    def add(self, now: float, answer: AnswerSample) -> Fit | None:
        """Notes an answer. Returns a new fit from time to time, None in between."""
        self._answers.append(answer)
        self._until_fit -= 1
        if self._until_fit > 0 or now < self._not_before:
            return None
        self._until_fit = REFIT
        if len(self._answers) == WINDOW:
            self._until_fit, self._not_before = WINDOW, now + REFIT_S
            if self._last is not None and explains(self._last, self._answers):
                return None
        found = fit(self._answers)
        self._last = found or self._last
        return found


def explains(found: Fit, answers: Iterable[AnswerSample]) -> bool:
    """True if the median answer took as long as the fit says: of those that are mostly prefill, and of the
    others."""
    by_share = sorted(answers, key=lambda each: each.prefill_share)
    ratios, half = [each.seconds / found.seconds(each) for each in by_share], len(by_share) // 2
    return all(abs(median(part) - 1) < CLOSE for part in (ratios[:half], ratios[half:]))


def fit(answers: Sequence[AnswerSample]) -> Fit | None:
    """The rates that explain these answers best; None where they contradict each other."""
    token_s = weighted_median(_token_seconds(answers))
    if token_s <= 0:
        return None
    decoded = [each for each in answers if each.output]
    if not decoded:
        return Fit(token_s, 0.0)
    step_s = weighted_median(
        ((each.seconds - each.prefilled * token_s) / each.output, 1 - each.prefill_share) for each in decoded
    )
    return Fit(token_s, max(step_s, 0.0))


def _token_seconds(answers: Sequence[AnswerSample]) -> list[tuple[float, float]]:
    """Seconds for each prompt token, with a weight: by each two answers, and by each with the guess."""
    found = [(each.seconds / (each.prefilled + STEP_TOKENS * each.output), GUESS_WEIGHT) for each in answers]
    plain = sorted([(each.prefill_share, each.prefilled, each.output, each.seconds) for each in answers])
    shares = [share for share, *_ in plain]
    for share, tokens, output, seconds in plain:
        for their_share, others, theirs, while_s in plain[bisect_left(shares, share + LEAST_APART) :]:
            if apart := tokens * theirs - others * output:
                found.append(((seconds * theirs - while_s * output) / apart, their_share - share))
    return found


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The value below which half of the weight lies. There must be one."""
    ordered = sorted(values, key=itemgetter(0))
    below = list(accumulate([weight for _, weight in ordered]))
    return ordered[bisect_left(below, below[-1] / 2)][0]
