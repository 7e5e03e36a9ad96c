"""The sockets that kvpin listens on: its own, or those that a service manager opened and hands on; and the
door that accepts their connections.

A socket that is handed on (systemd's socket activation, sd_listen_fds(3)) outlives the process. Connections
wait in its queue while one kvpin follows another, or two share it during a rolling restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

import structlog

from proxy.settings import SettingsError

log = structlog.get_logger(__name__)

# The first descriptor that a service manager hands on.
_FIRST = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# The most connections of a socket that are accepted before others get their turn: 64 take about 5 ms.
_AT_ONCE = 64
# Seconds without accepting after an error, e.g. no more files.
_RETRY_S = 0.5


def inherited() -> list[socket.socket]:
    """The sockets that a service manager gave to this process. Removes the environment variables that name
    them.

    Raises:
        SettingsError: one of them is no listening TCP socket.
    """
    said = {name: os.environ.pop(name, "") for name in _VARIABLES}
    if said["LISTEN_PID"] != str(os.getpid()) or not said["LISTEN_FDS"].isdecimal():
        return []
    return [_handed_on(number) for number in range(_FIRST, _FIRST + int(said["LISTEN_FDS"]))]


def _handed_on(number: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=number)
    except OSError as error:
        raise SettingsError(f"LISTEN_FDS: descriptor {number} is no socket") from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise SettingsError(f"LISTEN_FDS: descriptor {number} is no listening TCP socket")
    listener.set_inheritable(False)  # the engines that kvpin starts must not hold it
    return listener


def listen_on(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A socket for each address, all with the same port; raises OSError."""
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for host in hosts:
            listeners.append(opened.enter_context(listen(host, port)))
            port = listeners[0].getsockname()[1]  # the one that 0 became
        opened.pop_all()
    return listeners


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class Door:
    """Accepts the connections of some sockets: in each round of the event loop all that wait.

    uvloop's own servers accept one in each round. A round in which 64 busy connections get their turn takes
    some 60 ms, so that the last one of 64 new connections would wait for seconds before it is read at all.
    """

    def __init__(self, listeners: Sequence[socket.socket], connect: Callable[[], asyncio.Protocol]) -> None:
        """`connect` makes the protocol of each connection. Closing the door closes `listeners`."""
        self._listeners, self._connect = listeners, connect
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, asyncio.TimerHandle] = {}
        # Of accepted connections that have no protocol yet.
        self._beginning: set[asyncio.Task[None]] = set()
        for listener in listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._knock, listener)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay."""
        for timer in self._held.values():
            timer.cancel()
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()

    def _is_due(self) -> bool:
        """True if the next connection is for this door."""
        return True

    def _knock(self, listener: socket.socket) -> None:
        """Connections wait."""
        for _ in range(_AT_ONCE):
            if not (self._is_due() and self._accept(listener)):
                return

    def _hold(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._held[listener.fileno()] = self._loop.call_later(seconds, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        del self._held[listener.fileno()]
        self._loop.add_reader(listener, self._knock, listener)

    def _accept(self, listener: socket.socket) -> bool:
        """Accepts a connection; False if it cannot."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False  # none waits: another process took it, or its client has left
        except OSError as error:
            log.warning("connections cannot be accepted for now", error=error.strerror)
            self._hold(listener, _RETRY_S)
            return False
        connection.setblocking(False)
        task = self._loop.create_task(self._begin(connection))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._connect, connection)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):  # else its client has left
                raise
