"""A clock that jumps to the next timer when nothing else is to be done. Tests with sockets or threads cannot
use it: what is on its way there takes no time."""

import asyncio
import sys
import time

import pytest

_STUCK_S = 20  # of real time, for what comes from threads


class VirtualClock:
    """The time of a loop, and of the product while the loop runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patch: pytest.MonkeyPatch) -> None:
        self.now, self._select, real = loop.time(), loop._selector.select, time.monotonic
        patch.setattr(loop._selector, "select", self._jump)
        patch.setattr(loop, "time", self.time)
        for name, module in list(sys.modules.items()):
            if name.startswith("proxy.") and getattr(module, "monotonic", None) is real:
                patch.setattr(module, "monotonic", self.time)
        patch.setattr(time, "monotonic", self.time)

    def time(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """The process stands still."""
        self.now += seconds

    def _jump(self, timeout: float | None):
        events = self._select(_STUCK_S if timeout is None else 0)
        assert events or timeout is not None, "all tasks wait for ever"
        if not events:
            self.now += timeout
        return events


@pytest.fixture
async def virtual_time(monkeypatch):
    """Time that passes only while a test waits for it."""
    return VirtualClock(asyncio.get_running_loop(), monkeypatch)
