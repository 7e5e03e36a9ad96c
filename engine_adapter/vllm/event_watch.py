"""What the adapter itself needs to know of the events that pass through it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Tier,
    ViewCurrent,
    ViewLost,
)


class EventWatch:
    """Which blocks are known to lie on the GPU, and when the cache was cleared.

    vLLM tells of a block when it is stored, and again on reuse only where a request asks for it. While the
    view is incomplete, requests do: what is reused becomes known. That ends once the cache was cleared, or
    once as many blocks became known as it holds.
    """

    def __init__(self, capacity: int | None) -> None:
        """`capacity` is in the engine's blocks; None where unknown."""
        self._capacity = capacity
        self._known: set[int | bytes] = set()
        self._told: int | None = None  # since the view began, while it is incomplete
        self._followers = 0
        self._clearings = 0
        self._cleared = asyncio.Event()

    @property
    def blocks(self) -> int:
        """Blocks known to lie on the GPU."""
        return len(self._known)

    @property
    def wants_reuse_told(self) -> bool:
        """Whether requests should have reused blocks announced again."""
        return self._told is not None

    @property
    def is_followed(self) -> bool:
        """Whether anyone reads events now."""
        return self._followers > 0

    @property
    def clearings(self) -> int:
        """Times the cache was cleared."""
        return self._clearings

    @contextmanager
    def follower(self) -> Iterator[None]:
        """Someone reads events until the block ends."""
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1

    def note(self, event: KvEvent) -> None:
        """An event was taken in by its reader."""
        match event:
            case BlocksStored(tier=Tier.GPU, hashes=hashes):
                self._store(hashes)
            case BlocksRemoved(tier=Tier.GPU, hashes=hashes):
                self._known.difference_update(hashes)
            case ViewCurrent(complete=complete):
                self._told = None if complete else 0
            case ViewLost():
                self._forget()
            case CacheCleared():
                self._forget()
                self._clearings += 1
                self._cleared.set()

    def _store(self, hashes: tuple[int | bytes, ...]) -> None:
        before = len(self._known)
        self._known.update(hashes)
        if self._told is not None:
            self._told += len(self._known) - before
            if self._capacity is not None and self._told >= self._capacity:
                self._told = None

    def _forget(self) -> None:
        self._known.clear()
        self._told = None

    async def wait_for_clearing(self, after: int, timeout_s: float) -> bool:
        """Waits until the cache was cleared more than `after` times; False when that took too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._clearings <= after:
                    self._cleared.clear()
                    await self._cleared.wait()
        return self._clearings > after
