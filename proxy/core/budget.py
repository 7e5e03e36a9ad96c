"""Budgets that requests share: of bytes, and of retries."""

from __future__ import annotations


class ByteBudget:
    """Counts bytes in memory up to a limit.

    Attributes:
        limit: the most bytes. Bytes already taken stay if the limit is lowered.
    """

    __slots__ = ("__weakref__", "_whole", "limit", "used")

    def __init__(self, limit: int, whole: ByteBudget | None = None) -> None:
        """`whole`: the budget of which this is a part. Its bytes count there, too."""
        self.limit, self.used, self._whole = limit, 0, whole

    def has(self, size: int) -> bool:
        """True if `size` more bytes fit."""
        return self.used + size <= self.limit and (self._whole is None or self._whole.has(size))

    def take(self, size: int) -> None:
        """Counts bytes, whether they fit or not."""
        self.used += size
        if self._whole is not None:
            self._whole.take(size)

    def give_back(self, size: int) -> None:
        """Frees bytes that were taken."""
        self.used -= size
        if self._whole is not None:
            self._whole.give_back(size)


# Retries that each request adds: a fifth of the load.
SHARE = 0.2
# Retries that are always there for a few requests at a time, and what is added in each second.
FLOOR, PER_S = 10.0, 1.0
# Most that is saved up.
MOST = 100.0


class RetryBudget:
    """The number of retries that are left."""

    __slots__ = ("_at", "_left")

    def __init__(self) -> None:
        self._left, self._at = FLOOR, 0.0

    def requested(self) -> None:
        """A request has come."""
        if self._left < MOST:
            self._left += SHARE

    def take(self, now: float) -> bool:
        """Takes a retry, if one is left."""
        if self._left < FLOOR:
            self._left = min(self._left + (now - self._at) * PER_S, FLOOR)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
