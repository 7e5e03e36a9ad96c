"""Limits the number of connections, so that kvpin never runs out of file descriptors.

At the limit, a new connection takes the place of the one that has waited longest for a request. If all are
busy, a few more are let in for health checks, metrics and operators. Any other client is told so by a 503.
"""

from __future__ import annotations

import heapq
import resource
from collections import deque
from collections.abc import Callable, Collection, Iterable, MutableSet
from enum import Enum
from typing import Protocol, TypeVar

import structlog

log = structlog.get_logger(__name__)

# The most connections, however many files the machine allows: each may hold a head of 64 KiB.
MAX_CONNECTIONS = 16_384
# Connections beyond the limit, for all but the data plane, and the most whose clients may still read their
# 503.
RESERVE = 32
# File descriptors kept for listeners, logs, events and what adapters open.
_OWN_FILES = 256
# The most files that kvpin asks the machine for.
_MAX_FILES = 65_536
# Idle connections are closed in batches of this fraction of the limit, because finding them means a scan of
# all.
_BATCH = 64
# Seconds between two warnings.
_WARN_S = 60.0


class Permission(Enum):
    """Permission of a new connection."""

    FREE = "free"
    RESERVED = "reserved"
    """It may ask for anything but the data plane."""
    NONE = "none"
    """It may ask for nothing: its client is told so."""


class LimitedConnection(Protocol):
    """A connection as the limit sees it. Its times are those of the loop's clock."""

    @property
    def idle_since(self) -> float | None:
        """When its last answer ended; None while a request runs, or may be on its way."""

    def evict(self) -> bool:
        """Closes it, unless a request is here and unread. Returns whether it does."""

    def abort(self) -> None:
        """Breaks it off."""


_Connection = TypeVar("_Connection", bound=LimitedConnection)


class ConnectionLimits:
    """The limit on connections of one port, or of several that share it."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._limit, self._clock = limit, clock
        self._warned = float("-inf")
        self._turned_away: deque[LimitedConnection] = deque()

    def admit(self, new: _Connection, connections: MutableSet[_Connection]) -> Permission:
        """Admits a new connection, already in `connections`. May close others and remove them there."""
        if len(connections) <= self._limit:
            return Permission.FREE
        n_connections = len(connections)
        longest = _longest_idle((each for each in connections if each is not new), self._limit)
        evicted = [each for each in longest if each.evict()]
        self._warn(n_connections, len(evicted))
        for each in evicted:
            connections.discard(each)
        if evicted:
            return Permission.FREE
        return Permission.RESERVED if len(connections) <= self._limit + RESERVE else Permission.NONE

    def turned_away(self, connection: LimitedConnection) -> None:
        """A client was told that there is no place. The connection stays until it has read that, but of many,
        the oldest is broken off."""
        self._turned_away.append(connection)
        if len(self._turned_away) > RESERVE:
            self._turned_away.popleft().abort()

    def _warn(self, n: int, evicted: int) -> None:
        now = self._clock()
        if now - self._warned < _WARN_S:
            return
        self._warned = now
        log.warning(
            "connection limit reached: idle connections are closed, and clients without a place get a 503; "
            "allow kvpin more open files (ulimit -n)",
            connections=n,
            closed=evicted,
            limit=self._limit,
        )


def _longest_idle(connections: Iterable[_Connection], limit: int) -> Collection[_Connection]:
    idle = [(since, each) for each in connections if (since := each.idle_since) is not None]
    return [each for _, each in heapq.nsmallest(max(limit // _BATCH, 1), idle, key=lambda pair: pair[0])]


def connection_limit() -> int:
    """The number of connections for which this process has file descriptors. Raises the soft limit first.

    A request takes two files: its client's connection, and one to an engine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MAX_FILES if hard == unlimited else min(hard, _MAX_FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _MAX_FILES if soft == unlimited else soft
    return max(min((files - _OWN_FILES) // 2, MAX_CONNECTIONS), files // 8, 1)
