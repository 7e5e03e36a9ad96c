"""The HTTP/1.1 protocol of the server, over httptools' parser.

    bytes → parser → Exchange → the dispatcher, in a task of its own → bytes

A connection serves one request at a time: while an answer runs, pipelined requests wait. When many wait, the
connection is not read. A request for a WebSocket is the last one: its exchange gets the bytes that follow as
they come.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import termios
import time
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from functools import partial
from itertools import chain
from typing import Any

import httptools
import structlog
from typing_extensions import override

from engine_adapter import HeaderPairs, Headers
from proxy.http.exchange import STOPPING_S, Exchange
from proxy.http.listeners import ConnectionLimits, Permission

log = structlog.get_logger(__name__)

# The longest head of a request, in bytes, and the most between two pieces of its body or after the last one.
MAX_HEAD = 65_536
_HEADER_MARKS = 4  # characters of a header's line beside its name and value: a colon, a space, the line's end
# Pieces that a body may come in, and the bytes after which it may come in one more: each takes as much time.
MAX_PIECES, PIECE_BYTES = 16_384, 256
MAX_WAITING = 8  # pipelined requests at which a connection is not read any more
LOOK_S = 1.0  # seconds between two looks whether the client of a connection that is not read has left
# Seconds in which a client must take `SEND_BYTES` of an answer that fills its socket.
SEND_S = 60.0
SEND_BYTES = 16_384
# Seconds that a connection beyond the limit may idle, or take for a head, or its client to read its 503.
RESERVED_IDLE_S = 5.0
# Seconds that a connection may wait for a request, and those after which one that has served a request may be
# closed for another.
IDLE_S, EVICTABLE_S = 75.0, 1.0
_NO_PLACE = 503, b"kvpin serves as many connections as it can; try again shortly.", b"retry-after: 1\r\n"
_TOO_LONG = 431, b"The head of the request is too long."
_TOO_FINE = 400, b"The body of the request comes in too many pieces."
_NOT_ONE_HOST = 400, b"The request must have one host header."  # RFC 9112 3.2
# The client has closed its side, or the connection is broken.
_LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Port:
    """What the connections of a kvpin share."""

    def __init__(
        self,
        handler: Callable[[Exchange], Coroutine[Any, Any, None]],
        limits: ConnectionLimits,
        refused: Callable[[int], None],
        idle_s: float = IDLE_S,
    ) -> None:
        """`handler` answers a request, in a task of its own. `limits` admits connections, and knows those
        that are open. `refused` is called with the status of each request that no handler sees."""
        self.handler, self.limits, self.refused, self.idle_s = handler, limits, refused, idle_s
        self.answers: set[asyncio.Task[None]] = set()  # the tasks of running requests
        self.is_stopping = False  # what arrives from now on gets a few seconds
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


class Http1Protocol(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_body_bytes", "_close_after", "_current", "_fault", "_head_bytes", "_headers", "_idle_s",
        "_idle_since", "_is_new", "_is_reserved", "_lookout", "_loop", "_parser", "_paused", "_pieces",
        "_reading", "_room", "_socket", "_target", "_timer", "_to_websocket", "_unsent", "_waiting",
        "is_full", "is_of_peer", "port", "transport",
    )  # fmt: skip

    def __init__(self, port: Port, *, is_of_peer: bool = False) -> None:
        """`is_of_peer`: other kvpins of this machine make these connections; their requests are trusted."""
        self.transport: asyncio.Transport
        self.is_full, self.is_of_peer = False, is_of_peer
        self.port, self._idle_s = port, port.idle_s
        self._loop = asyncio.get_running_loop()
        self._parser: Any = _parser(self)  # httptools has no types
        self._target = b""
        self._headers: HeaderPairs = []
        self._head_bytes = 0  # of a head that is not complete, or of what follows a piece of a body
        self._reading: Exchange | None = None  # its body arrives
        self._current: Exchange | None = None  # its answer runs
        self._waiting: list[Exchange] = []  # pipelined behind it
        self._to_websocket = False  # the request that is parsed asks for that
        self._socket: Exchange | None = None  # it asked, and gets all that follows
        self._pieces = self._body_bytes = 0  # of the body that is being read
        self._close_after = False  # no request after the current one
        self._fault: tuple[int, bytes] | None = None  # of a complete head: status, reason
        self._paused = False
        self._room: asyncio.Future[None] | None = None
        self._idle_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._lookout: asyncio.TimerHandle | None = None  # while it is not read
        self._unsent: int | None = None  # bytes of a full socket when it was last looked at
        self._is_reserved = False  # beyond the limit on connections
        self._is_new = True  # until the end of its first head

    # --- the connection -------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # asyncio names its base class
        place = self.port.limits.admit(self)
        if place is Permission.RESERVED:
            self._is_reserved, self._idle_s = True, min(self._idle_s, RESERVED_IDLE_S)
        self._timer = self._loop.call_later(self._idle_s, self._watch)
        if place is Permission.NONE:
            self._turn_away()
        elif self.port.is_stopping:  # its TLS handshake ended after the stop began
            self.hurry()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.port.limits.connections.discard(self)
        for timer in (self._timer, self._lookout):
            if timer is not None:
                timer.cancel()
        self._waiting.clear()
        self._end_fullness()
        left, self._current, self._reading = self._current, None, None
        self._parser = None  # it refers to this connection
        if left is not None:
            left.leave()

    def hurry(self) -> None:
        """Kvpin stops: what has begun to arrive gets a few seconds."""
        if self._current is not None:
            self._current.hurry()
        self._loop.call_later(STOPPING_S, self._give_up)

    def _give_up(self) -> None:
        """Closes the connection if it waits for the rest of a head; else looks again."""
        if self.transport.is_closing():
            return
        if self._current is None and self._loop.time() - self._idle_since >= STOPPING_S:
            self.transport.close()
        else:
            self._loop.call_later(LOOK_S, self._give_up)

    def close_if_idle(self, for_s: float) -> None:
        """Closes the connection if it has had no request for that long, and none is on its way here."""
        is_idle = self._current is None and not (self._waiting or self._reading or self._head_bytes)
        if is_idle and self._loop.time() - self._idle_since >= for_s and not _unread(self.transport):
            self.transport.close()

    @property
    def idle_since(self) -> float | None:
        """When its last answer ended; None while a request runs, or right after one, when the next one may be
        on its way. A request runs from the end of its head."""
        is_due = not self._is_new and self._loop.time() - self._idle_since < EVICTABLE_S
        return None if self._is_running or is_due else self._idle_since

    @property
    def _is_running(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def evict(self) -> bool:
        """Closes it for another connection, unless a request is here and unread. Returns whether it does. A
        client without an answer so far is told."""
        if self.transport.is_closing():
            return True
        if _unread(self.transport):
            return False
        if self._is_new:
            self._turn_away()
        elif self.is_full:
            self.transport.abort()
        else:
            self.transport.close()
        return True

    def abort(self) -> None:
        """Breaks it off."""
        self.transport.abort()

    def _turn_away(self) -> None:
        """Tells the client that there is no place for it. What it sends is dropped until it has read that:
        a connection that is closed with unread bytes is reset, which may take the answer away."""
        self._close_after = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(RESERVED_IDLE_S, self.abort)
        self._write_plain(*_NO_PLACE)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.port.limits.turned_away(self)
        else:
            self.transport.close()

    def _watch(self) -> None:
        """Closes the connection if its client sends no request for too long, or does not take an answer."""
        if self.is_full or self.transport.is_closing():
            self._end_if_stuck()
            return
        idle_s = 0.0 if self._is_running else self._loop.time() - self._idle_since
        if idle_s >= self._idle_s:
            self.transport.close()
        self._timer = self._loop.call_later(max(self._idle_s - idle_s, LOOK_S), self._watch)

    def _end_if_stuck(self) -> None:
        """Breaks the connection off if its client has read almost nothing since the last check. If more was
        written than read since then, that is not known: the next check tells."""
        unsent = self.transport.get_write_buffer_size()
        if self._unsent is not None and self._unsent - SEND_BYTES < unsent <= self._unsent:
            if self._current is not None:
                self._current.is_slow = True
            self.transport.abort()
            return
        self._unsent = unsent
        self._timer = self._loop.call_later(SEND_S, self._watch)

    def _look_out(self) -> None:
        """Notices that the client has left, although its earlier bytes are not read yet."""
        self._lookout = None
        if not self._paused or self.transport.is_closing():
            return
        socket, poll = self.transport.get_extra_info("socket"), select.poll()
        if socket is not None:
            poll.register(socket.fileno(), _LEFT)
        if socket is None or poll.poll(0):
            self.transport.abort()
        else:
            self._lookout = self._loop.call_later(LOOK_S, self._look_out)

    # --- what the client sends ------------------------------------------------------------------------

    @override
    def data_received(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.feed(data)
            return
        if self._close_after and self._reading is None:
            return
        self._head_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            is_bug = isinstance(error, httptools.HttpParserCallbackError)
            if is_bug and not isinstance(error.__context__, httptools.HttpParserInvalidURLError):
                log.exception("request crashed")
            self._refuse(400, b"Invalid HTTP request received.")
        fault = _TOO_LONG if self._head_bytes > MAX_HEAD else self._fault
        if fault is not None:
            self._refuse(*fault)

    def _parse(self, data: memoryview) -> None:
        """Parses bytes. Raises HttpParserError if they are not HTTP."""
        while data and not (self._close_after and self._reading is None):
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            else:
                return
            self._consider()
            if self._socket is not None and data:
                self._socket.feed(bytes(data))
                return
            self._head_bytes += len(data)

    def on_message_begin(self) -> None:
        """The parser found the beginning of a request."""
        self._target, self._headers, self._reading = b"", [], None
        self._pieces = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The parser found a piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser found a header, or a trailer, which nobody reads."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The parser found the end of the head. A request with an offer begins when it is parsed again."""
        if self._close_after or self._parser.should_upgrade():
            return
        is_1_0 = self._parser.get_http_version() == "1.0"
        headers = Headers(self._headers)
        self._fault = self._fault_of(headers, is_1_0=is_1_0)
        if self._fault is not None:
            self._close_after = True
            return
        target = self._target
        if not target.startswith(b"/") or target.find(b"#") >= 0:
            target = _origin_form(target)
        exchange = self._reading = Exchange(
            self,
            self._parser.get_method().decode("ascii"),
            target,
            headers,
            is_1_0=is_1_0,
            keep_alive=self._parser.should_keep_alive() and not (self._to_websocket or self._is_reserved),
            asks_for_websocket=self._to_websocket,
            is_reserved=self._is_reserved,
        )
        self._is_new = False
        if self.port.is_stopping:
            exchange.hurry()
        if self._to_websocket:
            self._socket = exchange
        self._headers = []  # trailers must not become headers
        self._close_after = not exchange.keep_alive
        if self._current is None and not self.is_full:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            if len(self._waiting) >= MAX_WAITING:
                self.pause_reading()

    def _fault_of(self, headers: Headers, *, is_1_0: bool) -> tuple[int, bytes] | None:
        """Status and reason for a head that cannot be served; None for a good one."""
        pairs = headers.raw
        size = len(self._target) + sum(map(len, chain.from_iterable(pairs)))
        if size + _HEADER_MARKS * len(pairs) > MAX_HEAD:
            return _TOO_LONG
        hosts = int(b"host" in headers.first)
        if hosts and len(headers.first) < len(pairs):
            hosts = [name for name, _ in pairs].count(b"host")
        return None if hosts == 1 or (is_1_0 and not hosts) else _NOT_ONE_HOST

    def on_body(self, body: bytes) -> None:
        """The parser found a piece of a body."""
        self._head_bytes = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > MAX_PIECES + self._body_bytes // PIECE_BYTES:
            self._fault = _TOO_FINE
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        """The parser found the end of a request."""
        self._head_bytes = 0
        if self._reading is not None:
            self._reading.feed_end()
            self._reading = None
            if self._current is None:  # it was answered before: only now may the next request begin
                self._idle_since = self._loop.time()
                if self._close_after:
                    self.transport.close()

    def _consider(self) -> None:
        """Parses a request with an offer to upgrade to another protocol again, without the offer. Only the
        offer of a WebSocket is noted. Java's HttpClient offers h2c with every request. The parser stops at
        the offer and leaves the body unread."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(400, b"CONNECT is not served.")
            return
        head = [method, b" ", self._target, b" HTTP/", version, b"\r\n"]
        for name, value in self._headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self._to_websocket = version == b"1.1" and _asks_for_websocket(method, Headers(self._headers))
        self._parser = _parser(self)
        self._head_bytes = sum(map(len, head))
        self._parser.feed_data(b"".join([*head, b"\r\n"]))

    def _refuse(self, status: int, reason: bytes) -> None:
        """Refuses bytes that are not HTTP and stops reading. A running answer is still completed."""
        current, reading, waiting = self._current, self._reading, self._waiting
        self._reading, self._waiting, self._close_after = None, [], True
        if current is not None and current is not reading:
            current.keep_alive = False
            return
        if not (waiting or (current is not None and current.started)):
            self._write_plain(status, reason)
        self.transport.close()

    def _write_plain(self, status: int, reason: bytes, more: bytes = b"") -> None:
        """Sends the connection's last answer, of no handler; `more`: lines of its head."""
        self.port.refused(status)
        head = b"HTTP/1.1 %d \r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        end = b"connection: close\r\n\r\n"
        self.transport.write(head % (status, len(reason)) + more + end + reason)

    # --- requests -------------------------------------------------------------------------------------

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        task = exchange.task = self._loop.create_task(self.port.handler(exchange))
        self.port.answers.add(task)
        task.add_done_callback(partial(self._over, exchange))

    def _over(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        """Ends the exchange after its handler. An incomplete answer breaks the connection: so the client
        notices."""
        self.port.answers.discard(task)
        exchange.task = exchange.on_left = None
        if not task.cancelled() and task.exception() is not None:
            log.error("request crashed", exc_info=task.exception())
        if not exchange.finished:
            self.transport.close()

    def answered(self, exchange: Exchange) -> None:
        """Goes on with the next request, or closes."""
        if exchange.left or self.transport.is_closing():
            return
        self._current, self._idle_since = None, self._loop.time()
        if not exchange.keep_alive:
            self._close_after = True
            if self._reading is exchange and not exchange.is_late and self.transport.can_write_eof():
                self.transport.write_eof()  # a reset by more bytes of it would take the answer away
            else:
                self.transport.close()
            return
        self._go_on()

    def _go_on(self) -> None:
        """Begins the next request, once the client has read enough of the answers before it."""
        if self._waiting and not self.is_full:
            self._begin(self._waiting.pop(0))
        self.resume_reading()

    # --- flow control ---------------------------------------------------------------------------------

    @override
    def pause_writing(self) -> None:
        self.is_full = True

    @override
    def resume_writing(self) -> None:
        self._end_fullness()
        if self._current is None:
            self._go_on()

    def _end_fullness(self) -> None:
        self.is_full, self._unsent = False, None
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def drain(self) -> None:
        """Waits until the socket takes more bytes, or the client has left."""
        while self.is_full:
            self._room = self._loop.create_future()
            await self._room

    def pause_reading(self) -> None:
        """Stops reading from the client. Checks now and then whether it has left."""
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()
            if self._lookout is None:
                self._lookout = self._loop.call_later(LOOK_S, self._look_out)

    def resume_reading(self) -> None:
        """Goes on reading, unless a pipelined request waits."""
        if self._paused and not self._waiting:
            self._paused = False
            self.transport.resume_reading()


def _unread(transport: asyncio.Transport) -> bool:
    """True if its socket holds bytes that the event loop has not read yet."""
    socket, held = transport.get_extra_info("socket"), bytearray(4)
    if socket is not None:  # else TLS has lost it: the protocol is told in the next round of the loop
        fcntl.ioctl(socket.fileno(), termios.FIONREAD, held)
    return any(held)


def _parser(protocol: Http1Protocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    # A client that sends something after `connection: close` still gets its answer.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _asks_for_websocket(method: bytes, headers: Headers) -> bool:
    """True if a request with an offer is the opening handshake of a WebSocket (RFC 6455 4.1)."""
    is_whole = "content-length" not in headers and "transfer-encoding" not in headers
    is_websocket = headers.get("upgrade", "").lower() == "websocket" and "sec-websocket-key" in headers
    return method == b"GET" and is_whole and is_websocket


def _origin_form(target: bytes) -> bytes:
    """Path and query of a target that is a whole address or has a fragment; the parser's error for others."""
    url = httptools.parse_url(target)
    path: bytes = url.path or b"/"
    if not path.startswith(b"/"):
        raise httptools.HttpParserInvalidURLError(f"{target!r} names no path")
    return path + b"?" + url.query if url.query else path
