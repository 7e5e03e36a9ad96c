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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from proxy.runtime.tasks import Supervisor

log = structlog.get_logger(__name__)

# A connection that no other worker takes for that long is taken by any.
HOLD_S = 0.01
# After an error, e.g. no more files.
_RETRY_S = 0.5
# What a worker counts for: while it has no engine, besides its connections; and when it takes none.
_UNREADY = 2**30
_GONE = 2**31
_FILE = "connections"
_BYTES = 8


class ConnectionTally:
    """The number of connections of each worker, in memory that all share."""

    def __init__(self, directory: Path, workers: int) -> None:
        """The file is made if it is missing. Raises OSError."""
        size = workers * _BYTES
        with (directory / _FILE).open("a+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._counts = memoryview(self._memory).cast("q")
        self._left = set[int]()
        self._ready = set[int]()

    def put(self, worker: int, connections: int) -> None:
        """Tells how many connections a worker has; workers count from 1."""
        if worker not in self._left:
            self._counts[worker - 1] = connections + (0 if worker in self._ready else _UNREADY)

    def be_ready(self, worker: int) -> None:
        """A worker has engines from now on."""
        if worker not in self._ready:
            self._ready.add(worker)
            if worker not in self._left:
                self._counts[worker - 1] -= _UNREADY

    def leave(self, worker: int) -> None:
        """A worker takes no more connections."""
        self._left.add(worker)
        self._counts[worker - 1] = _GONE

    def is_due(self, worker: int) -> bool:
        """True if no other worker that takes connections has fewer, or only others without engines."""
        return self._counts[worker - 1] <= min(self._counts)

    def may_take(self, worker: int) -> bool:
        """True if a worker may take what was left to others: it has engines, or none of them has."""
        return self._counts[worker - 1] < _UNREADY or min(self._counts) >= _UNREADY


class FairAcceptor:
    """Accepts connections for one worker, while it is its turn."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        tally: ConnectionTally,
        worker: int,
        connect: Callable[[], asyncio.Protocol],
        tasks: Supervisor,
    ) -> None:
        """`connect` makes the protocol of each connection."""
        self._listeners, self._tally, self._worker = listeners, tally, worker
        self._connect, self._tasks = connect, tasks
        self._held: dict[int, asyncio.TimerHandle] = {}
        self._accepted = 0
        tally.put(worker, 0)
        for listener in listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._knock, listener)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def close(self) -> None:
        """Accepts no more."""
        self._tally.leave(self._worker)
        for timer in self._held.values():
            timer.cancel()
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()

    def _knock(self, listener: socket.socket) -> None:
        """A connection waits."""
        if self._tally.is_due(self._worker):
            self._accept(listener)
        else:
            self._hold(listener, HOLD_S)

    def _hold(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._held[listener.fileno()] = self._loop.call_later(seconds, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        del self._held[listener.fileno()]
        self._loop.add_reader(listener, self._knock, listener)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        if poll.poll(0) and self._tally.may_take(self._worker):
            self._accept(listener)  # nobody else did

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # another worker took it, or its client has left
        except OSError as error:
            log.warning("connections cannot be accepted for now", error=error.strerror)
            self._hold(listener, _RETRY_S)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accepted += 1
        self._tasks.start(f"connection {self._accepted}", self._begin(connection))

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connect, connection)
        except OSError:
            connection.close()


def tallied(protocol: type[Any], tally: ConnectionTally, worker: int) -> type[Any]:
    """The protocol, each of whose connections is told to the other workers."""

    class Tallied(protocol):  # type: ignore[misc]  # its base is only known here
        __slots__ = ()
        total = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            """Counts one connection more."""
            Tallied.total += 1
            tally.put(worker, Tallied.total)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            """Counts one connection less."""
            Tallied.total -= 1
            tally.put(worker, Tallied.total)
            super().connection_lost(exc)

    return Tallied
