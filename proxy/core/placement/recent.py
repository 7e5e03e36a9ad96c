"""Sums that fade with time, so that no list of past events is kept."""

from __future__ import annotations

from math import exp

# The last minutes: long enough to see many prompts, short enough to follow the day.
WINDOW_S = 120.0


class Recent:
    """A sum whose parts fade by a factor of e in WINDOW_S."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = self._at = 0.0

    def add(self, now: float, amount: float) -> None:
        """Adds an amount now."""
        self._sum = self.sum(now) + amount
        self._at = now

    def sum(self, now: float) -> float:
        """What is left of everything that was added."""
        return self._sum * exp((self._at - now) / WINDOW_S) if self._sum else 0.0
