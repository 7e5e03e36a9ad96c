"""Shares the connections of one listening socket among the workers that inherit it.

The kernel wakes all workers for a connection, and the one that runs already takes it: of workers with little
to do, one gets nearly everything. So each tells the others how many connections it has, and one that has more
than another leaves a new one to that other for up to `HOLD_S`. One that has no engine yet leaves it to one
that has.
"""

from __future__ import annotations

import asyncio
import mmap
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from proxy.http.listeners import Begin, Door

HOLD_S = 0.01  # a connection that no other worker takes for that long is taken by any
BEAT_S = 0.25  # between two signs of life of a worker
# A worker with so many connections may take one more than its share at once, one with twice as many two more.
_MORE_AT_ONCE = 8
# What a worker counts for: while it has no engine, besides its connections; and when it takes none.
_UNREADY = 2**30
_GONE = 2**40
TALLY = "connections"  # the file of that memory, in the supervisor's directory
_BYTES = 8


class ConnectionTally:
    """The number of connections of each worker, and its signs of life, in memory that all share."""

    def __init__(self, directory: Path, workers: int) -> None:
        """The file is made if it is missing. Raises OSError."""
        size = 2 * workers * _BYTES
        with (directory / TALLY).open("a+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        numbers = memoryview(self._memory).cast("q")
        self._counts, self._beats = numbers[:workers], numbers[workers:]

    def join(self, worker: int) -> None:
        """A worker takes connections, but has no engines yet; workers count from 1."""
        self._counts[worker - 1] = _UNREADY

    def add(self, worker: int, connections: int) -> None:
        """A worker has so many connections more, or fewer."""
        self._counts[worker - 1] += connections

    async def pulse(self, worker: int) -> None:
        """Shows that the event loop of a worker turns, for ever."""
        while True:
            self._beats[worker - 1] += 1
            await asyncio.sleep(BEAT_S)

    def beats(self, worker: int) -> int:
        """How often a worker has shown that."""
        return self._beats[worker - 1]

    def be_ready(self, worker: int) -> None:
        """A worker has engines from now on."""
        if self._counts[worker - 1] >= _UNREADY:
            self._counts[worker - 1] -= _UNREADY

    def leave(self, worker: int) -> None:
        """A worker takes no more connections."""
        self._counts[worker - 1] = _GONE

    def is_due(self, worker: int, beginning: int = 0) -> bool:
        """True if no other worker that takes connections has fewer, or only others without engines.
        `beginning`: connections of this worker that are not told yet. A worker with many may take some more
        at once, because all that it has get their turn before it accepts again."""
        own = self._counts[worker - 1]
        own += max(beginning - own % _UNREADY // _MORE_AT_ONCE, 0)
        return all(own <= others for number, others in enumerate(self._counts, 1) if number != worker)

    def may_take(self, worker: int) -> bool:
        """True if a worker may take what was left to others: it has engines, or none of them has."""
        return self._counts[worker - 1] < _UNREADY or min(self._counts) >= _UNREADY


class FairAcceptor(Door):
    """Accepts connections for one worker, while it is its turn."""

    def __init__(
        self, listeners: Sequence[socket.socket], tally: ConnectionTally, worker: int, begin: Begin
    ) -> None:
        self._tally, self._worker = tally, worker
        tally.join(worker)
        super().__init__(listeners, begin)

    @override
    def close(self) -> None:
        self._tally.leave(self._worker)
        super().close()

    @override
    def _is_due(self) -> bool:
        return self._tally.is_due(self._worker, len(self._beginning))

    @override
    def _knock(self, listener: socket.socket) -> None:
        if self._is_due():
            super()._knock(listener)
        else:
            self._hold(listener, HOLD_S)

    @override
    def _go_on(self, listener: socket.socket) -> None:
        super()._go_on(listener)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        if poll.poll(0) and self._tally.may_take(self._worker):
            self._accept(listener)  # nobody else did


def tallied(protocol: type[Any], tally: ConnectionTally, worker: int) -> type[Any]:
    """The protocol, each of whose connections is told to the other workers."""

    class Tallied(protocol):  # type: ignore[misc]  # its base is only known here
        __slots__ = ()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            """Counts one connection more."""
            tally.add(worker, 1)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            """Counts one connection less."""
            tally.add(worker, -1)
            super().connection_lost(exc)

    return Tallied
