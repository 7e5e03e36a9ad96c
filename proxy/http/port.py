"""What the connections of kvpin share: the handler of their requests, their limit, the Date header."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any

from proxy.http.exchange import Exchange
from proxy.http.listeners import ConnectionLimits

# How long a connection may wait for a request, in seconds.
IDLE_S = 75.0


class Port:
    """What the connections of a kvpin share.

    Attributes:
        handler: answers a request; runs in a task of its own.
        limits: admits connections, and knows those that are open.
        refused: called with the status of each request that no handler sees.
        idle_s: how long a connection may wait for a request, in seconds.
        answers: the tasks of running requests.
        is_stopping: what arrives from now on gets a few seconds.
    """

    def __init__(
        self,
        handler: Callable[[Exchange], Coroutine[Any, Any, None]],
        limits: ConnectionLimits,
        refused: Callable[[int], None],
        idle_s: float = IDLE_S,
    ) -> None:
        self.handler, self.limits, self.refused, self.idle_s = handler, limits, refused, idle_s
        self.answers: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        self._second, self._date = 0, b""

    def stop(self) -> None:
        """Hurries the connections that are open, and those whose handshake is not over."""
        self.is_stopping = True
        for connection in self.limits.connections:
            connection.hurry()

    @property
    def date(self) -> bytes:
        """The `date` header of an answer, as a line."""
        if (second := int(time.time())) != self._second:
            self._second = second
            self._date = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._date
