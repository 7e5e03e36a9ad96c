"""The interface of the data plane's HTTP client: `HttpTransport` in `client.py` implements it.

`Transport.send` sends a request and returns when the headers have arrived. The body is then read as the
engine sends it. Reading slowly slows the engine down: only a few socket reads are buffered. Closing before
the end drops the connection: this tells the engine that its client left.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Protocol, Self

import msgspec

from engine_adapter.http.headers import HeaderPairs, Headers


class OutgoingRequest(msgspec.Struct, frozen=True):
    """A request to one engine.

    Attributes:
        url: sent as it is, already percent-encoded.
        headers: names in lower case. The transport adds `host` and the length or the coding of the body.
        body: whole, or streamed. A streamed body is chunked unless `headers` has its `content-length`.
        tls: the engine's own context, None where it has none.
        socket: what the client sends on the WebSocket that the request asks for; None for a plain request. It
            is sent once the engine has agreed (status 101).
        unix: path of the Unix socket to connect to, in place of the host of the URL; None for TCP.
    """

    method: str
    url: str
    headers: HeaderPairs = []  # each request gets its own
    body: bytes | AsyncIterator[bytes] | None = None
    tls: ssl.SSLContext | None = None
    socket: AsyncIterator[bytes] | None = None
    unix: str | None = None

    def __repr__(self) -> str:
        """Without headers and body, which may be secret."""
        return f"OutgoingRequest({self.method!r}, {self.url!r})"


class IncomingResponse(Protocol):
    """An engine's answer, its body unread. Used as an async context manager.

    Attributes:
        received: pieces of the body that have arrived.
    """

    status: int
    headers: Headers
    received: int

    async def receive(self) -> bytes:
        """The body bytes that arrived since the last call; waits until there are some. b"" at the end.

        Raises:
            EngineUnavailable: the engine went away.
        """

    async def read(self) -> bytes:
        """The whole body, or what is left of it. Raises EngineUnavailable when the engine goes away."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class Transport(Protocol):
    """Sends requests to engines."""

    async def send(self, request: OutgoingRequest) -> IncomingResponse:
        """Sends a request and returns when the headers have arrived.

        Raises:
            EngineUnavailable: they did not arrive. An error raised by a streamed request body is raised as it
                is, here or while the answer is read.
        """

    def hang_up(self, unix: str, reason: str) -> None:
        """Drops the connections to a Unix socket. Who waits for an answer from there gets EngineUnavailable
        with that reason."""

    async def aclose(self) -> None:
        """Closes all connections."""


def describe(error: BaseException) -> str:
    """An I/O error in one line, also if its text is empty."""
    return str(error) or type(error).__name__
