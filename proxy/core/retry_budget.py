"""Retries of all requests together, so that they never multiply the load on engines that refuse it.

Only retries after an engine's answer count. A lost engine no longer does its requests: to retry them adds no
load.
"""

from __future__ import annotations

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
