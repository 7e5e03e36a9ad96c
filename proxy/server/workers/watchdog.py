"""Notices a process whose event loop stands still, by systemd's protocol: see sd_watchdog_enabled(3).

    worker, `Watchdog` ──WATCHDOG=1──→ supervisor, `WorkerPulse`      supervisor or single kvpin ──→ systemd

systemd sets the two variables if the unit has WatchdogSec=, and the supervisor sets them for its workers.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

# A worker that is silent for that long hangs, unless systemd says another time.
SILENT_S = 30.0
_SOCKET, _TIME, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
_US_PER_S = 1_000_000
_ALIVE = b"WATCHDOG=1"
_LOOKS = 10
_BEATS = 4
_MOST_BYTES = 4096


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


class WorkerPulse:
    """Listens to the watchdog of one worker."""

    def __init__(self, path: Path, silent_s: float) -> None:
        """Listens at `path`. Raises OSError."""
        self._path, self._silent_s = path, silent_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))

    def variables(self) -> dict[str, str]:
        """The environment of the worker."""
        return {_SOCKET: str(self._path), _TIME: str(int(self._silent_s * _US_PER_S))}

    async def until_silent(self) -> None:
        """Returns when a worker that was heard is not heard any more.

        The start of a worker may take long: until it was heard, it is not missed. Looks are counted, not
        time: after the whole machine stood still, a worker has time to be heard.
        """
        missed: int | None = None
        while missed is None or missed < _LOOKS:
            await asyncio.sleep(self._silent_s / _LOOKS)
            if self._is_heard():
                missed = 0
            elif missed is not None:
                missed += 1

    def _is_heard(self) -> bool:
        """True if something came since the last look."""
        is_heard = False
        with suppress(BlockingIOError):
            while self._socket.recv(_MOST_BYTES):
                is_heard = True
        return is_heard

    def close(self) -> None:
        """Listens no more."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
