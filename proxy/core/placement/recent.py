"""Amounts that fade with time, so that no list of past events is kept."""

from __future__ import annotations

from math import exp

# The last minutes: long enough to see many prompts, short enough to follow the day.
WINDOW_S = 120.0


class Recent:
    """The amounts of the last minutes. The weight of each fades by a factor of e in WINDOW_S."""

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

    def sum(self, now: float) -> float:
        """What is left of everything that was added."""
        return self._sum * exp((self._at - now) / WINDOW_S) if self._sum else 0.0

    @property
    def mean(self) -> float:
        """The mean amount; 0 if there was none."""
        return self._sum / self._count if self._count else 0.0

    @property
    def rest(self) -> float:
        """What is left on average of an amount of time, for somebody who comes while it runs: E[s²] / 2E[s],
        because long times are found more often. 0 if there was none."""
        return self._squares / (2 * self._sum) if self._sum else 0.0
