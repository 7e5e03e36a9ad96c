"""The HTTP client towards engines, on the data plane and beside it."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.connection import IncomingResponse
from engine_adapter.http.origin import Origin
from engine_adapter.http.transport import OutgoingRequest

# Methods that change nothing at the engine (RFC 9110 9.2.1).
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Methods whose requests have a body; where it is empty, some servers want to be told so.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_UPGRADE = (b"connection: upgrade", b"upgrade: websocket")
# A request's target: no space, and nothing that could end its line.
_TARGET = re.compile(r"/[!-~\x80-\xff]*")


class HttpTransport:
    """HTTP/1.1: no limit on connections, no decompression, no redirects, no cookies.

    A POST that the engine may have read is never sent again: the engine may have died of it. A request that
    changes nothing is sent a second time if its connection, used before, ended without an answer.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        setting: str | None = None,
        closed: Callable[[], None] | None = None,
    ) -> None:
        """`setting`: the operator's name of the time for a connection, for errors. `closed` is called when
        the other side closes a connection that waits for the next request: its process may have ended."""
        self._connect_timeout_s, self._setting, self._closed = connect_timeout_s, setting, closed
        self._origins: dict[tuple[str, ssl.SSLContext | None, str | None], Origin] = {}

    async def send(
        self, request: OutgoingRequest, confirm: Callable[[], Awaitable[None]] | None = None
    ) -> IncomingResponse:
        """Sends a request and returns when the headers have arrived.

        `confirm` is awaited before a new connection is used, which may lead to another process than those
        before. What it raises is raised here, and nothing was sent.

        Raises:
            EngineUnavailable: they did not arrive. An error raised by a streamed request body is raised as it
                is, here or while the answer is read.
        """
        end = request.url.find("/", len("https://"))
        address, target = (request.url[:end], request.url[end:]) if end > 0 else (request.url, "/")
        origin = self._origin(address, request.tls, request.unix)
        head = _head(request, target, origin.host)
        connection = origin.take()
        if connection is not None:
            try:
                return await connection.ask(request, head)
            except EngineUnavailable:
                if request.method not in _SAFE or request.body:
                    raise
        connection = await origin.connect()
        if confirm is not None:
            try:
                await confirm()
            except BaseException:
                connection.close()
                raise
        return await connection.ask(request, head)

    def hang_up(self, unix: str, reason: str) -> None:
        """Drops the connections to a Unix socket. Who waits for an answer from there gets EngineUnavailable
        with that reason."""
        for key in [each for each in self._origins if each[2] == unix]:
            self._origins.pop(key).hang_up(reason)

    async def aclose(self) -> None:
        """Closes all connections."""
        for origin in self._origins.values():
            await origin.aclose()
        self._origins.clear()

    def _origin(self, address: str, tls: ssl.SSLContext | None, unix: str | None) -> Origin:
        origin = self._origins.get((address, tls, unix))
        if origin is None:
            now = asyncio.get_running_loop().time()
            for key in [key for key, each in self._origins.items() if each.is_unused(now)]:
                del self._origins[key]
            origin = Origin(address, tls, self._connect_timeout_s, unix, self._setting, self._closed)
            self._origins[address, tls, unix] = origin
        return origin


@lru_cache(256)
def _first_lines(method: str, target: str, host: bytes) -> bytes:
    if not _TARGET.fullmatch(target):
        raise ValueError("the target of a request must be percent-encoded")
    return f"{method} {target} HTTP/1.1\r\nhost: ".encode("latin-1") + host


def _head(request: OutgoingRequest, target: str, host: bytes) -> bytes:
    """The request line and the headers, up to the body.

    Raises:
        ValueError: the target is not percent-encoded.
    """
    lines = [_first_lines(request.method, target, host), *map(b": ".join, request.headers)]
    if request.socket is not None:
        lines += _UPGRADE
    body = request.body
    if isinstance(body, bytes) and body:
        lines.append(b"content-length: %d" % len(body))
    elif not body:
        if request.method in _WITH_BODY:
            lines.append(b"content-length: 0")
    elif not any(name == b"content-length" for name, _ in request.headers):
        lines.append(b"transfer-encoding: chunked")
    return b"\r\n".join([*lines, b"", b""])
