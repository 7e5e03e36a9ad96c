"""Notices a process whose event loop stands still.

A supervisor or a single kvpin tells systemd that it lives if the unit has WatchdogSec=, by the protocol of
sd_watchdog_enabled(3). Workers tell their supervisor in the memory that they share.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

# A worker that is silent for that long hangs, unless systemd says another time.
SILENT_S = 30.0
_SOCKET, _TIME, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
_US_PER_S = 1_000_000
_ALIVE = b"WATCHDOG=1"
_LOOKS = 10
_BEATS = 4


class Watchdog:
    """Tells who started this process that its event loop turns. `silent_s`: after that long without a word,
    this process counts as hung."""

    def __init__(self, address: str, silent_s: float) -> None:
        self.silent_s = silent_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def take(cls) -> Watchdog | None:
        """The one that the environment asks for. What this process starts does not inherit it."""
        address, time, process = (os.environ.pop(name, "") for name in (_SOCKET, _TIME, _PROCESS))
        is_other = process not in ("", str(os.getpid()))
        if not address.startswith(("/", "@")) or not time.isdecimal() or not int(time) or is_other:
            return None
        return cls(address, int(time) / _US_PER_S)

    async def run(self) -> None:
        """Says so until cancelled. Whether anybody hears it does not matter here."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            while True:
                with suppress(OSError):
                    sender.sendto(_ALIVE, self._address)
                await asyncio.sleep(self.silent_s / _BEATS)


async def until_silent(beats: Callable[[], int], silent_s: float) -> None:
    """Returns when a worker gives no sign of life any more; `beats` tells how many it has given.

    The start of a worker may take long: until it gave one, it is not missed. Looks are counted, not time:
    after the whole machine stood still, a worker has time to give one.
    """
    missed, before = None, beats()
    while missed is None or missed < _LOOKS:
        await asyncio.sleep(silent_s / _LOOKS)
        if (now := beats()) != before:
            missed, before = 0, now
        elif missed is not None:
            missed += 1
