"""A budget of bytes that several requests share."""

from __future__ import annotations


class ByteBudget:
    """Counts bytes in memory up to a limit.

    Attributes:
        limit: the most bytes. Bytes already taken stay if the limit is lowered.
        used: bytes taken.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def has(self, size: int) -> bool:
        """True if `size` more bytes fit."""
        return self.used + size <= self.limit

    def take(self, size: int) -> None:
        """Counts bytes, whether they fit or not."""
        self.used += size

    def give_back(self, size: int) -> None:
        """Frees bytes that were taken."""
        self.used -= size
