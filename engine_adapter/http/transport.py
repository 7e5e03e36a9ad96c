"""The data plane's HTTP client, behind one interface.

`Transport.send` sends a request and returns when the headers have arrived. The body is then read chunk by
chunk, as the engine sends it. Reading slowly slows the engine down: only a few socket reads are buffered.
Closing before the end drops the connection: this tells the engine that its client left.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import aiohttp
import yarl
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from engine_adapter.errors import EngineUnavailable

# Seconds an idle connection is kept. Engines close theirs after 5 s (llama-server, uvicorn): stay below.
KEEPALIVE_S = 4.0
# Failures before anything of a request was sent.
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request to one engine. The URL is sent as it is, already percent-encoded. `tls` is the engine's own
    context, None where it has none."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | AsyncIterator[bytes] | None = None
    tls: ssl.SSLContext | None = None


class IncomingResponse(Protocol):
    """An engine's answer, its body unread. Used as an async context manager."""

    status: int
    headers: Mapping[str, str]
    received: int
    """Chunks of the body read so far."""

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Body bytes as they arrive. Raises EngineUnavailable when the engine goes away."""

    async def read(self) -> bytes:
        """The whole body. Raises EngineUnavailable when the engine goes away."""

    def hang_up(self, reason: str) -> None:
        """Drops the connection. The reader of the body gets EngineUnavailable with that reason."""

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

    async def aclose(self) -> None:
        """Closes all connections."""


class AiohttpResponse:
    """`IncomingResponse` over aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse, upload: _Upload | None) -> None:
        self._response = response
        self._upload = upload
        self._hung_up: EngineUnavailable | None = None
        self.received = 0
        if upload is not None:
            upload.response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """See `IncomingResponse.chunks`."""
        content = self._response.content
        try:
            while chunk := await content.readany():
                self.received += 1
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise self._cause(error) from error

    async def read(self) -> bytes:
        """See `IncomingResponse.read`."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._cause(error) from error

    def hang_up(self, reason: str) -> None:
        """See `IncomingResponse.hang_up`."""
        self._hung_up = EngineUnavailable(reason)
        self._response.close()

    def _cause(self, error: Exception) -> Exception:
        """Why the body ended early; `error` is what aiohttp says."""
        if self._upload is not None and self._upload.error is not None:
            return self._upload.error
        broke_off = f"the engine stopped in mid-answer: {describe(error)}"
        return self._hung_up or EngineUnavailable(broke_off, dropped=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        # After the end of the body, the connection is back in the pool and close() does nothing. Before it,
        # close() drops the connection and the engine cancels the request.
        self._response.close()


class AiohttpTransport:
    """`Transport` over aiohttp: no limit on connections, no decompression, no redirects.

    A POST that the engine may have read is never sent again: the engine may have died of it. aiohttp sends
    requests with idempotent methods a second time, which HTTP allows.
    """

    def __init__(self, *, connect_timeout_s: float = 5.0) -> None:
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(self, request: OutgoingRequest) -> AiohttpResponse:
        """See `Transport.send`."""
        body = request.body
        upload = None if isinstance(body, bytes) or body is None else _Upload(body)
        try:
            response = await self._session.request(
                request.method,
                yarl.URL(request.url, encoded=True),
                data=upload or body or None,
                headers=request.headers,
                allow_redirects=False,
                ssl=request.tls or True,
            )
        except (aiohttp.ClientError, OSError) as error:
            if upload is not None and upload.error is not None:
                raise upload.error from error
            raise EngineUnavailable(describe(error), dropped=not isinstance(error, _NOT_SENT)) from error
        return AiohttpResponse(response, upload)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        await self._session.close()
        # aiohttp closes sockets in the next loop cycle; without it, warnings at shutdown.
        await asyncio.sleep(0)


def describe(error: BaseException) -> str:
    """An I/O error in one line, also if its text is empty."""
    return str(error) or type(error).__name__


class _Connector(aiohttp.TCPConnector):
    """Never reuses a connection that the engine has closed.

    The event loop may not have seen the close yet. A request on such a connection would fail, and kvpin could
    not know whether the engine has read it.
    """

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        while (connection := await super()._get(key, traces)) is not None:
            if not _is_readable(connection):
                return connection
            connection.close()
        return None


def _is_readable(connection: Connection) -> bool:
    """Whether its socket has something to read. On an idle connection, that can only be its end."""
    if connection.transport is None:
        return True
    poll = select.poll()
    poll.register(connection.transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


class _Upload:
    """A streamed body. Keeps an error of its source, which aiohttp would report as the engine's."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self.error: Exception | None = None
        self.response: aiohttp.ClientResponse | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._source:
                yield chunk
        except Exception as error:
            self.error = error
            if self.response is not None:
                # The engine waits for the rest of the body, so a reader of its answer would wait forever.
                self.response.close()
            raise
