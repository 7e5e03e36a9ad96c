"""The undocumented parts of uvicorn that `proxy/server/run.py` uses. A test compares them with the release.

uvicorn counts connections and the tasks of their answers, and keeps the Date header.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableSet
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import uvicorn
from typing_extensions import override
from uvicorn.server import ServerState

# What uvicorn makes a connection's protocol with.
MakesProtocol = Callable[..., asyncio.Protocol]


class CountedConnection(Protocol):
    """A connection that uvicorn counts: an Http1Protocol, or the handshake before it."""

    def hurry(self) -> None:
        """The answer that runs is the last one: kvpin stops."""

    def close_if_idle(self, idle_s: float) -> None:
        """Closes the connection if it has had no request for that long."""


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with another way to stop."""

    def __init__(self, site: Any, protocol: MakesProtocol, stop: Callable[[], Awaitable[None]]) -> None:  # noqa: ANN401 - a handler of exchanges, not of ASGI
        """`stop` closes the sockets and waits for running answers."""
        config = uvicorn.Config(
            site,
            interface="asgi3",  # uvicorn need not look: it hands the site to the protocol
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # an address a client claims must not open the admin API
            server_header=False,
            timeout_keep_alive=75,
        )
        super().__init__(config)
        config.load()
        self._protocol, self._stop = protocol, stop

    @property
    def connections(self) -> list[CountedConnection]:
        """The open connections."""
        return cast("list[CountedConnection]", list(self.server_state.connections))

    @property
    def answers(self) -> set[asyncio.Task[None]]:
        """The tasks of running answers."""
        return set(self.server_state.tasks)

    def connect(self, protocol: MakesProtocol | None = None) -> Callable[[], asyncio.Protocol]:
        """Makes protocols for connections that kvpin accepts itself. uvicorn counts them, too."""
        return partial(protocol or self._protocol, self.config, self.server_state, {})

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's handlers would skip the stop of the engines on a second SIGINT.
        yield

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn's closes the port at once, and cuts clients off between two requests.
        await self._stop()


class Port:
    """The port of a connection.

    Attributes:
        handler: the app of uvicorn's settings; here it takes exchanges.
        idle_s: how long a connection may wait for a request, in seconds.
        connections: all of the port. uvicorn calls `shutdown` of each when it stops.
        tasks: those of running requests.
    """

    __slots__ = ("_date", "_dated", "_state", "connections", "handler", "idle_s", "tasks")

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        self.handler: Callable[[Any], Coroutine[Any, Any, None]] = config.loaded_app
        self.idle_s = float(config.timeout_keep_alive)
        self.connections: MutableSet[Any] = state.connections
        self.tasks: set[asyncio.Task[None]] = state.tasks
        self._state = state
        self._dated: list[tuple[bytes, bytes]] | None = None  # the headers that `_date` is made of
        self._date = b""

    @property
    def date(self) -> bytes:
        """The `date` header of an answer, as a line. uvicorn writes it anew each second."""
        if (headers := self._state.default_headers) is not self._dated:
            self._dated, self._date = headers, b"".join([b"%b: %b\r\n" % pair for pair in headers])
        return self._date
