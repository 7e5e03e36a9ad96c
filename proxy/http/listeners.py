"""The limit on connections; the sockets that kvpin listens on, its own or those that a service manager opened
and hands on; and the door that accepts their connections.

A socket that is handed on (systemd's socket activation, sd_listen_fds(3)) outlives the process. Connections
wait in its queue while one kvpin follows another, or two share it during a rolling restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Protocol

import structlog

from proxy.settings import SettingsError

# --- limits the number of connections, so that kvpin never runs out of file descriptors -----------------
# At the limit, a new connection takes the place of the one that has waited longest for a request. If all are
# busy, a few more are let in for health checks, metrics and operators. Any other client is told so by a 503.

log = structlog.get_logger(__name__)

# The most connections, however many files the machine allows: each may hold a head of 64 KiB.
MAX_CONNECTIONS = 16_384
# Connections beyond the limit, for all but the data plane, and the most whose clients may still read a 503.
RESERVE = 32
_OWN_FILES = 256  # descriptors kept for listeners, logs, events and what adapters open
_MAX_FILES = 65_536  # the most that kvpin asks the machine for
# Idle connections are closed in batches of this fraction of the limit: finding them means a scan of all.
_BATCH = 64
_WARN_S = 60.0  # between two warnings


class Permission(Enum):
    """Permission of a new connection."""

    FREE = "free"
    RESERVED = "reserved"  # it may ask for anything but the data plane
    NONE = "none"  # it may ask for nothing: its client is told so


class LimitedConnection(Protocol):
    """A connection, or the handshake before it, as the limit and a stop see it. Its times are those of the
    loop's clock."""

    @property
    def idle_since(self) -> float | None:
        """When its last answer ended; None while a request runs, or may be on its way."""

    def evict(self) -> bool:
        """Closes it, unless a request is here and unread. Returns whether it does."""

    def abort(self) -> None:
        """Breaks it off."""

    def hurry(self) -> None:
        """Kvpin stops: what has begun to arrive gets a few seconds."""

    def close_if_idle(self, for_s: float) -> None:
        """Closes it if it has had no request for that long, and none is on its way."""


class ConnectionLimits:
    """The limit on connections of one port, or of several that share it."""

    def __init__(self, limit: int) -> None:
        self.connections: set[LimitedConnection] = set()  # those that are open, and handshakes
        self._limit = limit
        self._warned = float("-inf")
        self._turned_away: deque[LimitedConnection] = deque()

    def admit(self, new: LimitedConnection) -> Permission:
        """Admits a new connection. May close others."""
        n_connections = len(self.connections) + 1
        if n_connections <= self._limit:
            self.connections.add(new)
            return Permission.FREE
        idle = [(since, each) for each in self.connections if (since := each.idle_since) is not None]
        longest_idle = heapq.nsmallest(max(self._limit // _BATCH, 1), idle, key=itemgetter(0))
        evicted = [each for _, each in longest_idle if each.evict()]
        if (now := time.monotonic()) - self._warned >= _WARN_S:
            self._warned = now
            log.warning(
                "connection limit reached: idle connections are closed, and clients without a place get a "
                "503; allow kvpin more open files (ulimit -n)",
                connections=n_connections,
                closed=len(evicted),
                limit=self._limit,
            )
        self.connections.difference_update(evicted)
        if not evicted and n_connections > self._limit + RESERVE:
            return Permission.NONE
        self.connections.add(new)
        return Permission.FREE if evicted else Permission.RESERVED

    def turned_away(self, connection: LimitedConnection) -> None:
        """A client was told that there is no place. The connection stays until it has read that, but of many,
        the oldest is broken off."""
        self._turned_away.append(connection)
        if len(self._turned_away) > RESERVE:
            self._turned_away.popleft().abort()


def connection_limit() -> int:
    """The number of connections for which this process has file descriptors. Raises the soft limit first. A
    request takes two files: its client's connection, and one to an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MAX_FILES if hard == unlimited else min(hard, _MAX_FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _MAX_FILES if soft == unlimited else soft
    return max(min((files - _OWN_FILES) // 2, MAX_CONNECTIONS), files // 8, 1)


# --- listeners ------------------------------------------------------------------------------------------

_FIRST = 3  # the first descriptor that a service manager hands on
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# The most connections of a socket that are accepted before others get their turn: 64 take about 5 ms.
_AT_ONCE = 64
_RETRY_S = 0.5  # without accepting, after an error, e.g. no more files


def inherited() -> list[socket.socket]:
    """The sockets that a service manager gave to this process. Removes the environment variables that name
    them. Raises SettingsError if one of them is no listening TCP socket."""
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


Begin = Callable[[socket.socket], Awaitable[object]]  # gives an accepted connection its protocol


def plainly(connect: Callable[[], asyncio.Protocol]) -> Begin:
    """Gives connections the protocols that `connect` makes, without TLS."""
    return partial(asyncio.get_running_loop().connect_accepted_socket, connect)


class Door:
    """Accepts the connections of some sockets: in each round of the event loop all that wait.

    uvloop's own servers accept one in each round. A round in which 64 busy connections get their turn takes
    some 60 ms, so that the last one of 64 new connections would wait for seconds before it is read at all."""

    def __init__(self, listeners: Sequence[socket.socket], begin: Begin) -> None:
        """Closing the door closes `listeners`."""
        self._listeners, self._begin_on = listeners, begin
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, asyncio.TimerHandle] = {}
        self._beginning: set[asyncio.Task[None]] = set()  # of accepted connections without a protocol yet
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
            await self._begin_on(connection)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):  # else its client has left
                raise
