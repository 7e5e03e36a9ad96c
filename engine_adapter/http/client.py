"""The HTTP client towards engines, on the data plane and beside it."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache

import httpx

from engine_adapter.errors import EngineDied, EngineUnavailable, EngineUnhealthy, EngineUnreachable
from engine_adapter.http.connection import Connection, IncomingResponse
from engine_adapter.http.prepare import OutgoingRequest, describe
from engine_adapter.http.web_pages import is_address

# --- one address of an engine, and the idle connections to it -------------------------------------------

# Seconds an idle connection is kept. Engines close theirs after 5 s (llama-server, uvicorn): stay below.
KEEPALIVE_S = 4.0
# Seconds for which the addresses of a name are remembered.
DNS_S = 10.0
# Seconds for which an address without connections is remembered.
UNUSED_S = 600.0


class Origin:
    """Scheme, host and port, and the connections there. `host`: the `host` header."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        unix: str | None = None,
        setting: str | None = None,
        closed: Callable[[], None] | None = None,
    ) -> None:
        """`url`: scheme, host and port. `tls` is for https; None is the default there. `unix`: path of the
        Unix socket to connect to instead. `setting`: where `connect_timeout_s` comes from, for errors.
        `closed` is called when the other side closes an idle connection."""
        parsed = httpx.URL(url)
        is_tls = parsed.scheme == "https"
        self.host = parsed.netloc
        self._name = parsed.raw_host.decode("ascii")
        self._port = parsed.port or (443 if is_tls else 80)
        self._tls = (tls or ssl.create_default_context()) if is_tls else None
        self._connect_timeout_s, self._unix = connect_timeout_s, unix
        self._limit = f"{connect_timeout_s:g} s" + (f" ({setting})" if setting is not None else "")
        self._closed = closed
        self._addresses: list[str] = []
        self._addresses_until = 0.0
        self._reached: str | None = None
        self._used_at = 0.0
        self._open: set[Connection] = set()
        self._idle: dict[Connection, float] = {}  # since when; the last in is the first out
        self._sweep: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Event | None = None  # while the client closes
        self._hung_up: str | None = None  # why nothing is asked here any more

    def take(self) -> Connection | None:
        """The idle connection used last; None if there is none.

        Never one that the engine has closed: a request on it would fail, and kvpin could not know whether the
        engine has read it."""
        self._used_at = now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.popitem()
            is_old = now - since > KEEPALIVE_S
            if not is_old and connection.is_usable:
                return connection
            connection.close()
            if not is_old and self._closed is not None:
                self._closed()
        return None

    def is_unused(self, now: float) -> bool:
        """True if it has no connections, and nothing was asked there for `UNUSED_S`."""
        return not self._open and now - self._used_at > UNUSED_S

    @property
    def is_over(self) -> bool:
        """True if nothing is asked here any more."""
        return self._hung_up is not None

    async def connect(self) -> Connection:
        """A new connection. Tries the addresses of the host one by one; the one that answered last is first.
        Raises EngineUnavailable: there is none."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = await self._resolved()
        except (OSError, UnicodeError) as error:
            raise self._unreachable(error) from error
        failure: OSError | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    connection = await self._dial(address)
            except OSError as error:  # TimeoutError and TLS errors are some
                failure = error
            else:
                if self._hung_up is not None:
                    connection.close()
                    raise EngineUnreachable(self._hung_up)
                self._reached = address
                # Not in `connection_made`: a caller that is cancelled right after it leaves a connection that
                # uvloop closes without `connection_lost`.
                if not connection.is_lost:
                    self._open.add(connection)
                return connection
        self._addresses_until = 0.0
        raise self._unreachable(failure) from failure

    def hang_up(self, reason: str) -> None:
        """Drops all connections, for good. Who waits for an answer gets EngineUnavailable with the reason."""
        self._hung_up = reason
        for connection in list(self._open):
            connection.fail(EngineDied(reason))

    async def aclose(self) -> None:
        """Closes all connections, for good. Who waits for an answer gets EngineUnavailable."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._idle.clear()  # nobody else closes them
        self.hang_up("the engine was removed, or kvpin stops")
        if self._open:
            self._all_closed = asyncio.Event()
            await self._all_closed.wait()

    # --- What connections tell ------------------------------------------------------------------------

    def give_back(self, connection: Connection) -> None:
        """A connection is idle: the next request may use it."""
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(KEEPALIVE_S, self._close_old)

    def lost(self, connection: Connection) -> None:
        """A connection is closed."""
        self._open.discard(connection)
        if self._all_closed is not None and not self._open:
            self._all_closed.set()
        if self._idle.pop(connection, None) is not None and self._closed is not None:
            self._closed()

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() - KEEPALIVE_S
        for connection in [each for each, since in self._idle.items() if since <= latest]:
            del self._idle[connection]
            connection.close()
        self._sweep = loop.call_later(KEEPALIVE_S, self._close_old) if self._idle else None

    async def _dial(self, address: str) -> Connection:
        loop = asyncio.get_running_loop()
        if self._unix is not None:
            return (await loop.create_unix_connection(lambda: Connection(self), address))[1]
        _, connection = await loop.create_connection(
            lambda: Connection(self),
            address,
            self._port,
            ssl=self._tls,
            server_hostname=self._name if self._tls is not None else None,
        )
        return connection

    async def _resolved(self) -> list[str]:
        """The addresses of the host. Raises OSError or UnicodeError if it has none."""
        if self._unix is not None:
            return [self._unix]
        loop = asyncio.get_running_loop()
        if loop.time() >= self._addresses_until:
            if is_address(self._name):
                self._addresses, self._addresses_until = [self._name], float("inf")
            else:
                found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
                self._addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
                self._addresses_until = loop.time() + DNS_S
        return sorted(self._addresses, key=lambda address: address != self._reached)

    def _unreachable(self, error: BaseException | None) -> EngineUnavailable:
        why = "the name has no address" if error is None else describe(error)
        if isinstance(error, TimeoutError) and not str(error):
            why = f"no answer within {self._limit}"
        if isinstance(error, ssl.SSLCertVerificationError):
            why += "; name the authorities that signed its certificate: ca=FILE"
        kind = EngineUnhealthy if isinstance(error, TimeoutError) else EngineUnreachable
        return kind(f"cannot connect to {self._unix or self.host.decode('ascii')}: {why}")


# --- client ---------------------------------------------------------------------------------------------

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
    changes nothing is sent a second time if its connection, used before, ended without an answer."""

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
        before. What it raises is raised here, and nothing was sent. Raises EngineUnavailable: they did not
        arrive. An error raised by a streamed request body is raised as it is, here or while the answer is
        read."""
        end = request.url.find("/", len("https://"))
        address, target = (request.url[:end], request.url[end:]) if end > 0 else (request.url, "/")
        origin = self._origin(address, request.tls, request.unix)
        head = _head(request, target, origin.host)
        connection = origin.take()
        if connection is not None:
            try:
                return await connection.ask(request, head)
            except EngineUnavailable:
                if request.method not in _SAFE or request.body or origin.is_over:
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
    """The request line and the headers, up to the body. Raises ValueError: the target is not
    percent-encoded."""
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
