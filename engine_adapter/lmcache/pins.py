"""Pins with a time limit. The coordinator's own pins never expire, so kvpin removes each when its time is
up."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from engine_adapter.errors import EngineError
from engine_adapter.lmcache.client import Coordinator, Scope

_RETRY_S = 5.0
_FAREWELL_S = 2.0


class _Pin(NamedTuple):
    unpin: Callable[[], Awaitable[int]]
    end: asyncio.Task[None]


class TimedPins:
    """kvpin's pins at a coordinator."""

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    async def add(
        self, coordinator: Coordinator, scope: Scope, token_ids: array[int], salt: str, ttl_s: float
    ) -> str:
        """Pins the whole chunks of a prompt on L2 for `ttl_s` seconds; returns the pin's id."""
        await coordinator.pin(scope, token_ids, salt)
        pin_id = uuid.uuid4().hex
        end = asyncio.get_running_loop().create_task(self._end(pin_id, ttl_s))
        self._pins[pin_id] = _Pin(partial(coordinator.unpin, scope, token_ids, salt), end)
        return pin_id

    async def remove(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none with that id."""
        pin = self._pins.get(pin_id)
        if pin is None:
            return False
        await pin.unpin()
        if self._pins.pop(pin_id, None) is not None and pin.end is not asyncio.current_task():
            pin.end.cancel()
        return True

    async def aclose(self) -> None:
        """Ends all pins, if the coordinator is reachable."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                for pin_id in list(self._pins):
                    await self.remove(pin_id)
        left = [pin.end for pin in self._pins.values()]
        for end in left:
            end.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._pins.clear()

    async def _end(self, pin_id: str, ttl_s: float) -> None:
        """Ends a pin when its time is up, and retries until it succeeds."""
        await asyncio.sleep(ttl_s)
        while True:
            with suppress(EngineError):
                await self.remove(pin_id)
                return
            await asyncio.sleep(_RETRY_S)
