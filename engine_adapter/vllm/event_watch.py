"""What the adapter itself learns from the events that pass through it, and resets that they must report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvProgress,
    Tier,
    ViewCurrent,
    ViewLost,
    ViewResumed,
)
from engine_adapter.vllm.options import rank_headers

_EVENT_S = 2.0
_NUDGE = {"prompt": [1], "max_tokens": 1, "temperature": 0}


class EventWatch:
    """The blocks known to lie on the GPU, and how often the cache was cleared.

    vLLM reports a block when it is stored, and again on reuse if the request asks for that. While the view is
    incomplete, kvpin's requests ask, so reused blocks become known. That ends when the cache was cleared, or
    when as many blocks are known as the cache holds.
    """

    def __init__(self, capacity: int | None) -> None:
        """`capacity` is in the engine's blocks; None where unknown."""
        self._capacity = capacity
        self._known: set[int | bytes] = set()
        self._learned: int | None = None  # newly known blocks while the view is incomplete, else None
        self._followers = 0
        self._clearings = 0
        self._cleared = asyncio.Event()

    @property
    def blocks(self) -> int:
        """Blocks known to lie on the GPU."""
        return len(self._known)

    @property
    def wants_reuse_told(self) -> bool:
        """Whether requests should ask vLLM to report reused blocks."""
        return self._learned is not None

    @property
    def is_followed(self) -> bool:
        """Whether somebody reads the events now."""
        return self._followers > 0

    @property
    def clearings(self) -> int:
        """Times the cache was cleared."""
        return self._clearings

    @contextmanager
    def follower(self) -> Iterator[None]:
        """Somebody reads the events until the block ends."""
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1

    def note(self, event: KvEvent) -> None:
        """Notes an event that its reader has processed."""
        match event:
            case BlocksStored(tier=Tier.GPU, hashes=hashes):
                self._store(hashes)
            case BlocksRemoved(tier=Tier.GPU, hashes=hashes):
                self._known.difference_update(hashes)
            case ViewCurrent(complete=complete):
                self._learned = None if complete else 0
            case ViewLost() | ViewResumed():
                self._forget()
            case CacheCleared():
                self._forget()
                self._clearings += 1
                self._cleared.set()

    def _store(self, hashes: tuple[int | bytes, ...]) -> None:
        before = len(self._known)
        self._known.update(hashes)
        if self._learned is not None:
            self._learned += len(self._known) - before
            if self._capacity is not None and self._learned >= self._capacity:
                self._learned = None

    def _forget(self) -> None:
        self._known.clear()
        self._learned = None

    async def wait_for_clearing(self, after: int, timeout_s: float) -> bool:
        """Waits until the cache was cleared more than `after` times; False after the time-out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._clearings <= after:
                    self._cleared.clear()
                    await self._cleared.wait()
        return self._clearings > after


async def flush(
    control: ControlClient, model: str, ranks: Iterable[int | None], watch: EventWatch
) -> KvProgress:
    """Resets the cache of a server, on all its `ranks`; `model` is the name it serves under.

    vLLM can only reset its whole cache, refuses while requests run, and publishes the reset with the next
    request. So kvpin sends a request of one token after the reset and waits for the event. Returns the known
    blocks dropped, or those left because requests run. Raises EngineUnavailable, also without such an event.
    """
    blocks, clearings = watch.blocks, watch.clearings
    answer = await control.call("POST", "/reset_prefix_cache")
    if not isinstance(answer, dict) or answer.get("success") is not True:
        return KvProgress(0, blocks, left={"busy": max(blocks, 1)})
    for rank in ranks:
        nudge = {**_NUDGE, "model": model}
        await control.call("POST", "/v1/completions", json=nudge, headers=rank_headers(rank))
    if watch.is_followed and not await watch.wait_for_clearing(clearings, _EVENT_S):
        raise EngineUnavailable("its cache was reset, but no event said so")
    return KvProgress(blocks, blocks)
