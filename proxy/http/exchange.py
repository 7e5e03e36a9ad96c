"""One HTTP request and its answer, between the connection and the handler."""

from __future__ import annotations

import asyncio
import http
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from engine_adapter import HeaderPairs, Headers
from proxy.errors import BodyTooLarge, NoEngine, SlowBody

if TYPE_CHECKING:
    from proxy.http.http1 import Http1Protocol

HIGH_WATER = 65_536  # unread bytes of a streamed body at which its connection is not read any more
# The most seconds that a reader waits for a body. Waiting uses the seconds up. Each `BODY_BYTES_PER_S` that
# arrive give one back, up to `BODY_S`. So a client may be silent for `BODY_S`, and slower than that rate only
# for a short time.
BODY_S = 60.0
BODY_BYTES_PER_S = 1024
# Seconds that the rest of a body gets when kvpin stops.
STOPPING_S = 5.0
_STATUS_LINES = {each.value: b"HTTP/1.1 %d %b\r\n" % (each, each.phrase.encode()) for each in http.HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SWITCHED, _NO_CONTENT, _NOT_MODIFIED = 101, 204, 304
_TO_WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"


class ClientLeft(Exception):
    """The client disconnected before its body was read."""


class Exchange:
    """One request, and the way back to its client. The head of the answer leaves together with the first
    bytes of its body. `write` does not wait: a sender of much data awaits `drain` while `is_full`."""

    __slots__ = (
        "_arrived", "_chunked", "_chunks", "_complete", "_connection", "_credited", "_has_body", "_head",
        "_invited", "_is_1_0", "_is_hurried", "_left_to_send", "_patience_s", "_pauses", "_silence",
        "_switched", "_unread", "_wakes", "added", "asks_for_websocket", "finished", "headers",
        "is_from_peer", "is_late", "is_reserved", "is_slow", "keep_alive", "left", "method", "on_left",
        "reword", "started", "status", "target", "task",
    )  # fmt: skip

    def __init__(
        self,
        connection: Http1Protocol,
        method: str,
        target: bytes,
        headers: Headers,
        *,
        is_1_0: bool,
        keep_alive: bool,
        asks_for_websocket: bool = False,
        is_reserved: bool = False,
    ) -> None:
        """`target`: path and query as sent; begins with a slash. `is_1_0`: the client speaks HTTP/1.0, which
        has no chunks. `keep_alive`: the connection stays open after the answer. `asks_for_websocket`: one
        begins if the answer has status 101. `is_reserved`: the connection is one beyond the limit, which is
        not for the data plane."""
        self.method, self.target, self.headers = method, target, headers
        self.asks_for_websocket = asks_for_websocket
        self.task: asyncio.Task[None] | None = None
        self.added: HeaderPairs = []  # headers of every answer to it
        # Changes the headers of its answer, when that begins; None leaves them.
        self.reword: Callable[[HeaderPairs], HeaderPairs] | None = None
        # Called once if the client disconnects before its answer is complete.
        self.on_left: Callable[[], None] | None = None
        # The client was disconnected because it read almost nothing of its answer; the body did not arrive in
        # time; the beginning of the answer was sent; all of it was.
        self.left = self.is_slow = self.is_late = self.started = self.finished = False
        self.status: int | None = None  # of the answer; None before it begins
        self.keep_alive, self.is_reserved = keep_alive and not is_1_0, is_reserved
        self.is_from_peer = connection.is_of_peer  # another kvpin of this machine passes this request on
        self._connection, self._is_1_0 = connection, is_1_0
        # The body: its first piece as it came, and all others in one growing piece: small ones would take 33
        # bytes more each, and large ones leave holes in the heap when they are joined and freed.
        self._chunks: list[bytes | bytearray] = []
        self._arrived = self._unread = 0  # bytes
        self._complete = self._invited = False
        self._pauses = True
        self._wakes: asyncio.Future[None] | None = None
        self._patience_s, self._credited = BODY_S, 0  # with the body; bytes that gave some back
        self._silence: asyncio.Timeout | None = None
        self._is_hurried = False
        # The answer.
        self._head = b""
        self._has_body, self._chunked, self._switched = method != "HEAD", False, False
        self._left_to_send: int | None = None  # of its content-length

    @property
    def transport(self) -> asyncio.Transport:
        """The client's socket."""
        return self._connection.transport

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.transport.get_extra_info("sslcontext") is None else "https"

    def address(self, end: str) -> tuple[str, int] | None:
        """Host and port of one end of the connection, `peername` or `sockname`; None where it has none."""
        address = self.transport.get_extra_info(end)
        return (address[0], address[1]) if isinstance(address, tuple) else None

    # --- the request ----------------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """True if all of the request's body was read."""
        return self._complete and not self._chunks

    async def read(self, limit: int, hold: Callable[[int], None] = lambda _size: None) -> bytes:
        """The whole body. `hold` is told how many bytes are here so far, and may refuse them. Raises
        BodyTooLarge above `limit` bytes, SlowBody if it does not arrive in time, NoEngine if not before kvpin
        stops, ClientLeft."""
        self._pauses = False
        hold(self._arrived)
        while not self._complete and self._arrived <= limit:
            await self._more()
            hold(self._arrived)
        _check_size(self._arrived, limit)
        return self._take()

    async def chunks(self, limit: int | None = None) -> AsyncGenerator[bytes, None]:
        """The body as it arrives. A slow reader slows the client down. Raises what `read` raises."""
        while not self.is_read:
            if not self._chunks:
                await self._more()
            if limit is not None:
                _check_size(self._arrived, limit)
            if self._chunks:
                yield self._take()

    async def socket(self) -> AsyncGenerator[bytes, None]:
        """Yields the WebSocket bytes of the client, until it leaves. A slow reader slows the client down."""
        while self._chunks or not self.left:
            if not self._chunks:
                self._connection.resume_reading()
                await self._woken()
            if self._chunks:
                yield self._take()

    async def until_left(self) -> None:
        """Returns when the client has left, or has its answer."""
        while not (self.left or self.finished):
            await self._woken()

    def feed(self, chunk: bytes) -> None:
        """Takes bytes of the body. Bytes that arrive after the answer are dropped: nothing reads them."""
        if self.finished:
            return
        if self._chunks:
            if not isinstance(self._chunks[-1], bytearray):
                self._chunks.append(bytearray())
            self._chunks[-1] += chunk
        else:
            self._chunks.append(chunk)
        self._arrived += len(chunk)
        self._unread += len(chunk)
        if self._unread > HIGH_WATER and self._pauses:
            self._connection.pause_reading()
        self._wake()

    def feed_end(self) -> None:
        """The body is complete."""
        self._complete = True
        self._wake()

    def leave(self) -> None:
        """The client has disconnected."""
        self.left = True
        self._wake()
        if self.on_left is not None:
            self.on_left()

    async def _more(self) -> None:
        """Waits for more of the body, or for its end, within the client's time limit."""
        if self.left:
            raise ClientLeft
        if self._awaits_invitation():
            self._invited = True
            self.transport.write(_CONTINUE)
        self._connection.resume_reading()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        earned_s = (self._arrived - self._credited) / BODY_BYTES_PER_S
        self._patience_s, self._credited = min(self._patience_s + earned_s, BODY_S), self._arrived
        try:
            async with asyncio.timeout(STOPPING_S if self._is_hurried else self._patience_s) as silence:
                self._silence = silence
                await self._woken()
        except TimeoutError as error:
            self.is_late, self.keep_alive = True, False  # what follows may be the rest of the body
            if self._is_hurried:
                raise NoEngine("kvpin is stopping; try again shortly") from error
            raise SlowBody("the body of the request did not arrive in time") from error
        finally:
            self._silence = None
            self._patience_s -= loop.time() - begun
        if self.left:
            raise ClientLeft

    def hurry(self) -> None:
        """Limits the rest of the body to a few seconds, because kvpin stops."""
        self._is_hurried = True
        if self._silence is not None and not self._silence.expired():
            self._silence.reschedule(asyncio.get_running_loop().time() + STOPPING_S)

    def _awaits_invitation(self) -> bool:
        """True if the client holds its body back until it is told to send it."""
        if self._complete or self._arrived or self._invited or self.started or self._is_1_0:
            return False
        return self.headers.get("expect", "").lower() == "100-continue"

    async def _woken(self) -> None:
        self._wakes = asyncio.get_running_loop().create_future()
        await self._wakes

    def _wake(self) -> None:
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    def _take(self) -> bytes:
        chunks, self._chunks, self._unread = self._chunks, [], 0
        return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)

    # --- the answer -----------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if the client's socket takes no more bytes for now."""
        return self._connection.is_full

    async def drain(self) -> None:
        """Waits until the socket takes more bytes, or the client has left."""
        await self._connection.drain()

    def start(self, status: int, headers: HeaderPairs) -> None:
        """Begins the answer; names of headers are in lower case. Raises ValueError for a header with a line
        break in it."""
        if self.added:
            headers = [*headers, *self.added]
        if self.reword is not None:
            headers = self.reword(headers)
        head = b"\r\n".join([*map(b": ".join, headers), b""])
        if not head.count(b"\n") == head.count(b"\r") == len(headers) or head.find(b"\0") >= 0:
            raise ValueError("a header of the answer has a line break in it")
        if self._awaits_invitation():
            self.keep_alive = False  # without an invitation, clients may leave the body out or send it
        status_line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        for name, value in headers:
            if name == b"content-length":
                self._left_to_send = int(value)
        self._has_body = self._has_body and status not in (_NO_CONTENT, _NOT_MODIFIED)
        self._switched = status == _SWITCHED
        self._head = status_line + self._connection.port.date + head
        self.started, self.status = True, status

    def write(self, chunk: bytes) -> None:
        """Sends bytes of the body."""
        if self._chunked and chunk:
            data = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        else:
            data = (self._end_of_head() if self._head else b"") + self._framed(chunk)
        if data and not self.left:
            self._connection.transport.write(data)

    def finish(self, chunk: bytes = b"") -> None:
        """Sends the last bytes of the body."""
        data = (self._end_of_head(len(chunk)) if self._head else b"") + self._framed(chunk)
        if self._chunked:
            data += b"0\r\n\r\n"
        elif self._left_to_send and self._has_body:
            raise RuntimeError("the answer is shorter than its content-length")
        if data and not self.left:
            self._connection.transport.write(data)
        self._chunked, self._left_to_send = False, 0  # what is written now is an error
        self.finished = True
        self._wake()
        self._connection.answered(self)

    def _end_of_head(self, length: int | None = None) -> bytes:
        """The head, which was not sent yet. `length`: that of the body, if all of it is here."""
        head, self._head = self._head, b""
        if self._switched:
            return head + _TO_WEBSOCKET
        if self._has_body and self._left_to_send is None:
            if length is not None:
                self._left_to_send = length
                head += b"content-length: %d\r\n" % length
            elif not self._is_1_0:
                self._chunked = True
                head += b"transfer-encoding: chunked\r\n"
        return head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def _framed(self, chunk: bytes) -> bytes:
        if not (chunk and self._has_body):
            return b""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(chunk), chunk)
        if self._left_to_send is not None:
            self._left_to_send -= len(chunk)
            if self._left_to_send < 0:
                raise RuntimeError("the answer goes on after its end")
        return chunk


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"the body is longer than the limit of {limit} bytes")
