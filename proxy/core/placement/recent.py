"""Sums over the last while, in which what is older counts less: no list of what happened is kept."""

from __future__ import annotations

from math import exp

# The last minutes: long enough to see many prompts, short enough to follow the day.
WINDOW_S = 120.0


class Recent:
    """A sum of which each part fades with the time that passed since, by a factor of e in WINDOW_S."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = self._at = 0.0

    def add(self, now: float, amount: float) -> None:
        """Something happened now."""
        self._sum = self.sum(now) + amount
        self._at = now

    def sum(self, now: float) -> float:
        """What is left of all that was added."""
        return self._sum * exp((self._at - now) / WINDOW_S) if self._sum else 0.0
