"""A budget of bytes that several requests share."""

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
