"""Amounts that fade with time, so that no list of past events is kept."""

from __future__ import annotations

from math import exp, expm1

# The last minutes: long enough to see many prompts, short enough to follow the day.
WINDOW_S = 120.0
# The last seconds: a burst counts while it lasts.
RATE_S = 10.0
# A rate over less time than this would be that of its first amount.
YOUNG_S = 1.5


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
        """Mean time left of an amount of time, for somebody who comes while it runs; 0 if there was none.

        It is E[s²] / 2E[s], because somebody finds a long time running more often than a short one.
        """
        return self._squares / (2 * self._sum) if self._sum else 0.0


class Rate:
    """The amount added per second, lately.

    While the first amount is younger than `fades_s`, the rate is the one since the first amount.
    """

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
        self._sum = max(self._sum * exp((self._at - now) / self._fades_s) + amount, 0.0)
        self._at = now

    def add_evenly(self, now: float, amount: float) -> None:
        """Adds an amount that came evenly since the last one was added. When the first began is not known:
        it does not count."""
        if self._first is None:
            amount = 0.0
        elif gap := (now - self._at) / self._fades_s:
            amount *= -expm1(-gap) / gap
        self.add(now, amount)

    def per_s(self, now: float) -> float:
        """The rate now; 0 if nothing was added."""
        if self._first is None:
            return 0.0
        age = max(now - self._first, YOUNG_S)
        faded = self._sum * exp((self._at - now) / self._fades_s)
        return faded / (self._fades_s * (1 - exp(-age / self._fades_s)))

    def is_young(self, now: float) -> bool:
        """True if the first amount was added less than `fades_s` ago, or none was."""
        return self._first is None or now - self._first < self._fades_s
