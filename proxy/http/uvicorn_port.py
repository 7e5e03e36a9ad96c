"""The values that kvpin's connections read from uvicorn, which counts them.

uvicorn documents none of them. tests/proxy/http/test_uvicorn_port.py fails when a release changes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, MutableSet
from typing import Any

import uvicorn
from uvicorn.server import ServerState


class Port:
    """The port of a connection.

    Attributes:
        handler: the app of uvicorn's settings; here it takes exchanges.
        idle_s: how long a connection may wait for a request, in seconds.
        connections: all of the port. uvicorn calls `shutdown` of each when it stops.
        tasks: those of running requests.
    """

    __slots__ = ("_state", "connections", "handler", "idle_s", "tasks")

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        self.handler: Callable[[Any], Coroutine[Any, Any, None]] = config.loaded_app
        self.idle_s = float(config.timeout_keep_alive)
        self.connections: MutableSet[Any] = state.connections
        self.tasks: set[asyncio.Task[None]] = state.tasks
        self._state = state

    @property
    def date(self) -> bytes:
        """The `date` header of an answer, as a line. uvicorn writes it anew each second."""
        return b"".join([b"%b: %b\r\n" % pair for pair in self._state.default_headers])
