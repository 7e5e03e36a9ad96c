"""The one transport seam of the data plane.

`Transport.send` opens a request and returns once the status line and headers are there; the body is
then read chunk by chunk, as the engine sends it. Reading slowly slows the engine down: nothing is
buffered here beyond one socket read. Closing before the end drops the connection, which is how an
engine learns that its client left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import aiohttp
from multidict import CIMultiDictProxy

from engine_adapter.errors import EngineUnavailable

# Engines close idle connections after 5 s (llama-server, uvicorn's default): stay below.
KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request ready to be sent to one engine."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | AsyncIterator[bytes] = b""


class IncomingResponse(Protocol):
    """An engine's answer, body still unread. Used as an async context manager."""

    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive. Raises EngineUnavailable when the engine goes away."""

    async def read(self) -> bytes:
        """The whole body. Raises EngineUnavailable when the engine goes away."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class Transport(Protocol):
    """Sends requests to engines."""

    async def send(self, request: OutgoingRequest) -> IncomingResponse:
        """Returns when the headers have come. Raises EngineUnavailable when they do not."""

    async def aclose(self) -> None:
        """Closes all connections."""


class AiohttpResponse:
    """`IncomingResponse` over aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: CIMultiDictProxy[str] = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `IncomingResponse.chunks`."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnavailable(f"the engine stopped in mid-answer: {describe(error)}") from error

    async def read(self) -> bytes:
        """See `IncomingResponse.read`."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnavailable(f"the engine stopped in mid-answer: {describe(error)}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        # At the end of the body the connection went back to the pool and close() does nothing;
        # before it, close() drops the connection and the engine cancels the request.
        self._response.close()


class AiohttpTransport:
    """`Transport` over one aiohttp session: no limit on connections, no decompression, no redirects."""

    def __init__(self, *, connect_timeout_s: float = 5.0) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )

    async def send(self, request: OutgoingRequest) -> AiohttpResponse:
        """See `Transport.send`."""
        try:
            response = await self._session.request(
                request.method,
                request.url,
                data=request.body or None,
                headers=request.headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnavailable(describe(error)) from error
        return AiohttpResponse(response)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        await self._session.close()
        # aiohttp closes sockets in the next loop cycle; without it, warnings at shutdown.
        await asyncio.sleep(0)


def describe(error: BaseException) -> str:
    """One line that names an I/O error, also one with an empty text."""
    return str(error) or type(error).__name__
