"""The one transport seam of the data plane.

`Transport.send` opens a request and returns once the status line and headers are there; the body is
then read chunk by chunk, as the engine sends it. Reading slowly slows the engine down: nothing is
buffered here beyond a few socket reads. Closing before the end drops the connection, which is how an
engine learns that its client left.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, Self

import aiohttp
import yarl
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace

from engine_adapter.errors import EngineUnavailable

# Engines close idle connections after 5 s (llama-server, uvicorn's default): stay below.
KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request ready to be sent to one engine. The URL goes on as it stands, percent signs and all. `tls` is
    the engine's own context, None where it has none."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | AsyncIterator[bytes] | None = None
    tls: ssl.SSLContext | None = None


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
        """Returns when the headers have come. Raises EngineUnavailable when they do not; an error of the
        request's body, where that is an iterator, comes through as it is, here or while reading."""

    async def aclose(self) -> None:
        """Closes all connections."""


class AiohttpResponse:
    """`IncomingResponse` over aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse, upload: _Upload | None) -> None:
        self._response = response
        self._upload = upload
        if upload is not None:
            upload.response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `IncomingResponse.chunks`."""
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise _cause(self._upload) or _broke_off(error) from error

    async def read(self) -> bytes:
        """See `IncomingResponse.read`."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _cause(self._upload) or _broke_off(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        # At the end of the body the connection went back to the pool and close() does nothing;
        # before it, close() drops the connection and the engine cancels the request.
        self._response.close()


class AiohttpTransport:
    """`Transport` over aiohttp: no limit on connections, no decompression, no redirects.

    An engine may close an idle connection in the very moment it is used again. It has not read the
    request then, so it is sent once more, on a new connection; on a new connection nothing is repeated.
    """

    def __init__(self, *, connect_timeout_s: float = 5.0) -> None:
        self._session = _session(
            _Connector(limit=0, keepalive_timeout=KEEPALIVE_S), connect_timeout_s=connect_timeout_s
        )
        self._fresh = _session(
            aiohttp.TCPConnector(limit=0, force_close=True), connect_timeout_s=connect_timeout_s
        )

    async def send(self, request: OutgoingRequest) -> AiohttpResponse:
        """See `Transport.send`."""
        body = request.body
        upload = None if isinstance(body, bytes) or body is None else _Upload(body)
        _reused.set(True)
        try:
            try:
                response = await _open(self._session, request, upload)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if upload is not None or not _reused.get():
                    raise
                response = await _open(self._fresh, request, None)
        except (aiohttp.ClientError, OSError) as error:
            raise _cause(upload) or EngineUnavailable(describe(error)) from error
        return AiohttpResponse(response, upload)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        await self._session.close()
        await self._fresh.close()
        # aiohttp closes sockets in the next loop cycle; without it, warnings at shutdown.
        await asyncio.sleep(0)


def describe(error: BaseException) -> str:
    """One line that names an I/O error, also one with an empty text."""
    return str(error) or type(error).__name__


# Whether the request the running task sends goes over a connection that carried another one before.
_reused: ContextVar[bool] = ContextVar("_reused")


class _Connector(aiohttp.TCPConnector):
    """Notes in `_reused` when it has to make a connection."""

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's signature
    ) -> ResponseHandler:
        _reused.set(False)
        return await super()._create_connection(req, traces, timeout)


class _Upload:
    """A streamed body that keeps the error of its source, which aiohttp would take for the engine's."""

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
                # Who reads the answer already would wait for an engine that waits for the rest of this.
                self.response.close()
            raise


def _cause(upload: _Upload | None) -> Exception | None:
    return upload.error if upload is not None else None


def _broke_off(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"the engine stopped in mid-answer: {describe(error)}")


def _session(connector: aiohttp.TCPConnector, *, connect_timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


async def _open(
    session: aiohttp.ClientSession, request: OutgoingRequest, upload: _Upload | None
) -> aiohttp.ClientResponse:
    return await session.request(
        request.method,
        yarl.URL(request.url, encoded=True),
        data=upload or request.body or None,
        headers=request.headers,
        allow_redirects=False,
        ssl=request.tls or True,
    )
