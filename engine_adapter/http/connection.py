"""One HTTP/1.1 connection to an engine, and the answers that come over it.

`Connection` writes requests and feeds what it reads to httptools' parser. Each answer has its own parser,
which calls the `on_` methods of `IncomingResponse`. When the engine agrees to a WebSocket, all that follows
is the answer's body.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Self, cast

import httptools

from engine_adapter.errors import EngineDied, EngineGarbled, EngineUnreachable
from engine_adapter.http.prepare import HeaderPairs, Headers, OutgoingRequest, describe

if TYPE_CHECKING:
    from engine_adapter.http.client import Origin

# Body bytes of one answer that wait for their reader. Above this, the connection is not read.
MAX_WAITING_BYTES = 256 * 1024
# The longest answer that is read whole: 2,048 embeddings of 16,384 numbers each fit in it.
MAX_WHOLE_BYTES = 512 << 20
# The longest head of an answer, interim answers included.
MAX_HEAD_BYTES = 64 * 1024
_CLOSES = (b"connection", b"close")
_SWITCHED = 101
# Codings of a body that can be read. The second one is an old name for none.
_READABLE = (b"chunked", b"identity")
_NO_HEADERS = Headers([])


class IncomingResponse:
    """An engine's answer, its body unread. Used as an async context manager.

    A slow reader slows the engine down: only a few socket reads are buffered.

    Attributes:
        connection: the one that it comes over; None once it has all of it, or gets no more.
        failure: why the rest of the answer will never come.
        overran: bytes came after the end of the answer, so the connection cannot be used again.
        parts: the pieces of the body that wait for the reader.
        on_body: takes the next piece, see `Connection.data_received`.
        ends_at: the place among them where the body has ended.
        received: pieces of the body that have arrived.
        waiting_bytes: bytes of `parts`, without the end of an answer.
    """

    __slots__ = (
        "_has_body", "_may_switch", "_pairs", "_pass_on", "_waiter", "connection", "ends_at", "failure",
        "headers", "is_complete", "keeps_connection", "on_body", "overran", "parts", "received", "status",
        "waiting_bytes",
    )  # fmt: skip

    def __init__(self, connection: Connection, *, has_body: bool, may_switch: bool) -> None:
        """`has_body`: False for the answer to a HEAD request, whatever its headers say. `may_switch`: the
        request asks for a WebSocket."""
        self.connection: Connection | None = connection
        self._has_body = has_body
        self._may_switch = may_switch
        self._pairs: HeaderPairs = []
        self.parts: list[bytes] = []
        self.on_body = self.parts.append  # called for each piece of a stream, so not a function of ours
        self.ends_at = 0
        self.waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._pass_on: Callable[[bytes], bool] | None = None
        self.status = 0  # until the head is there
        self.headers = _NO_HEADERS
        self.received = 0
        self.is_complete = False
        self.failure: Exception | None = None
        self.keeps_connection = False
        self.overran = False

    # --- For the reader -------------------------------------------------------------------------------

    async def head(self) -> None:
        """Waits for status and headers. Raises EngineUnavailable if they do not come."""
        while not self.status:
            await self._more()

    async def receive(self) -> bytes:
        """The body bytes that arrived since the last call; waits until there are some. b"" at the end. Raises
        EngineUnavailable if the engine went away."""
        while not self.parts:
            if self.is_complete:
                return b""
            await self._more()
        return self._taken()

    async def relay(self, pass_on: Callable[[bytes], bool]) -> bool:
        """Gives the rest of the body to `pass_on`, each piece in the callback that reads it: no task wakes.

        `pass_on` returns False if it takes no more for now: then `relay` returns False. Returns True at the
        end. Raises EngineUnavailable if the engine went away, and what `pass_on` raises."""
        while True:
            while self.parts:
                if not pass_on(self._taken()):
                    return False
            if self.is_complete:
                return True
            more, self._pass_on = self._more(), pass_on
            try:
                await more
            finally:
                is_full = self._pass_on is None
                # An error of `pass_on` holds this frame, and its future the error.
                self._pass_on = self._waiter = None
                del more
            if is_full:
                return False

    async def read(self) -> bytes:
        """The whole body. Raises EngineGarbled if it is longer than MAX_WHOLE_BYTES."""
        if self.is_complete:
            return self._taken()
        parts, size = [], 0
        while part := await self.receive():
            parts.append(part)
            size += len(part)
            if size > MAX_WHOLE_BYTES:
                raise EngineGarbled(f"the engine's answer is longer than {MAX_WHOLE_BYTES >> 20} MiB")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Drops the connection if the answer is not complete: the engine cancels the request."""
        if self.connection is not None:
            self.connection.drop()

    # --- For the connection ---------------------------------------------------------------------------

    @property
    def ends_with_connection(self) -> bool:
        """True if the head gives the body no other end than that of the connection."""
        coding = self.headers.get("transfer-encoding")
        if coding is not None:
            return coding.lower() != "chunked"
        return self.status != 0 and "content-length" not in self.headers

    def wake(self) -> None:
        """Tells the reader that there is something new: bytes, the end, or a failure."""
        waiter, pass_on = self._waiter, self._pass_on
        if waiter is None or waiter.done():
            return
        parts = self.parts
        if pass_on is not None and parts:
            # As `_taken` does. Nothing has paused the connection: this reader waits for the next piece.
            piece = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            try:
                if not pass_on(piece):
                    self._pass_on = None
                elif not self.is_complete and self.failure is None:
                    return
            except Exception as error:  # noqa: BLE001 - the reader's own: it gets it
                waiter.set_exception(error)
                return
        waiter.set_result(None)

    def _taken(self) -> bytes:
        parts = self.parts
        taken = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.waiting_bytes = 0
        if self.connection is not None and self.connection.is_paused:
            self.connection.resume_reading()
        return taken

    def _more(self) -> asyncio.Future[None]:
        """Done when there is something new."""
        if self.failure is not None:
            raise self.failure
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    # --- For the parser -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins: the first, or the one after an interim answer."""
        if self.is_complete:
            self.overran = True
        self._pairs = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Fields that follow a chunked body are ignored."""
        if self.status:
            return
        name, value = name.lower(), value.rstrip(b" \t")
        self._pairs.append((name, value))
        if name == b"transfer-encoding" and value.lower() not in _READABLE and self.connection is not None:
            # Its framing would reach the client as text.
            coding = value[:40].decode("latin-1")
            self.connection.fail(EngineGarbled(f"the engine's answer has the transfer coding {coding!r}"))

    def on_headers_complete(self) -> None:
        """The head is there. Interim answers (1xx) are skipped."""
        connection = self.connection
        if connection is None or self.status or connection.parser is None:
            return
        status = connection.parser.get_status_code()
        is_switch = status == _SWITCHED and self._may_switch
        if 100 <= status < 200 and not is_switch:  # noqa: PLR2004 - HTTP
            return
        if not 100 <= status <= 599:  # noqa: PLR2004 - HTTP
            connection.fail(EngineGarbled(f"the engine answered with status {status}"))
            return
        self.headers = Headers(self._pairs)
        self.keeps_connection = connection.parser.should_keep_alive()
        self.status = status
        if not self._has_body:
            self.is_complete, self.ends_at = True, 0

    def on_message_complete(self) -> None:
        """The answer is over, or an interim one. What follows a switch is its body."""
        if self.status and self.status != _SWITCHED and not self.is_complete:
            self.is_complete, self.ends_at = True, len(self.parts)


class Connection(asyncio.Protocol):
    """A connection, for one request at a time.

    Attributes:
        parser: parses the answer that is being read; None once it is a WebSocket.
        is_paused: the connection is not read, because much waits for the reader.
        is_lost: the connection is closed, and its owner has been told.
    """

    __slots__ = (
        "_answer", "_closes", "_head_bytes", "_owner", "_poll", "_room", "_transport", "_upload", "is_lost",
        "is_paused", "parser",
    )  # fmt: skip

    def __init__(self, owner: Origin) -> None:
        self._owner = owner
        self._answer: IncomingResponse | None = None
        self.parser: httptools.HttpResponseParser | None = None
        self._head_bytes = 0
        self._closes = False  # the request asked for it
        self._upload: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None  # while the socket is full
        self.is_paused = False
        self.is_lost = False

    async def ask(self, request: OutgoingRequest, head: bytes) -> IncomingResponse:
        """Sends a request; returns when the head of its answer is there. `head`: that of the request. Raises
        EngineUnavailable: there was no answer, or no HTTP/1.1. An error of a streamed body is raised as it
        is."""
        if self.is_lost:
            raise EngineUnreachable("the engine closed the connection before a request was sent")
        answer = self._answer = IncomingResponse(
            self, has_body=request.method != "HEAD", may_switch=request.socket is not None
        )
        self.parser = httptools.HttpResponseParser(answer)
        self._head_bytes, self._closes = 0, _CLOSES in request.headers
        body = request.body
        if body is None or isinstance(body, bytes):
            self._transport.writelines((head, body) if body else (head,))
        else:
            self._transport.write(head)
            length = Headers(request.headers).get("content-length")
            upload = self._send_stream(body, None if length is None else int(length))
            self._upload = asyncio.get_running_loop().create_task(upload)
        try:
            await answer.head()
        except BaseException:
            self.drop()
            raise
        if answer.status == _SWITCHED and request.socket is not None and self._answer is answer:
            self._upload = asyncio.get_running_loop().create_task(self._send_raw(request.socket))
        return answer

    @property
    def is_usable(self) -> bool:
        """True if an idle connection can take a request. Something to read can only be the connection's end,
        which the event loop has not seen yet."""
        return not self._transport.is_closing() and not self._poll.poll(0)

    def resume_reading(self) -> None:
        """The reader has room again."""
        if self.is_paused and not self.is_lost:
            self.is_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Closes an idle connection."""
        self._transport.close()

    def drop(self) -> None:
        """Closes the connection in mid-answer. Nothing more is told to the reader."""
        if self._answer is not None:
            self._forget_answer()
        self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, and closes the connection."""
        answer = self._answer
        if answer is not None:
            answer.failure = error
            answer.wake()
        self.drop()

    # --- asyncio.Protocol -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open. The event loop has switched Nagle's algorithm off."""
        self._transport = cast("asyncio.Transport", transport)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Parses bytes from the engine. Stops reading while the answer is full."""
        answer = self._answer
        if answer is None:
            self.close()  # nobody asked for anything
            return
        parts = answer.parts
        waiting = len(parts)
        try:
            if self.parser is None:  # it is a WebSocket
                answer.on_body(data)
            else:
                self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._stop_parsing(answer, error, data, waiting)
        if self._answer is not answer:
            return  # it was refused
        if answer.is_complete:
            self._end(answer)
        elif not answer.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                too_long = f"the headers of the engine's answer are longer than {MAX_HEAD_BYTES} bytes"
                self.fail(EngineGarbled(too_long))
            return
        answer.received += len(parts) - waiting
        answer.wake()
        if parts and self._answer is answer:  # its reader is busy
            answer.waiting_bytes += sum(map(len, parts[waiting:]))
            if answer.waiting_bytes > MAX_WAITING_BYTES and not self.is_paused:
                self.is_paused = True
                self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: ends the running answer, or fails it."""
        self.is_lost = True
        self._owner.lost(self)
        self.resume_writing()
        answer = self._answer
        if answer is None:
            return
        why = describe(exc) if exc is not None else "it closed the connection"
        if exc is None and answer.ends_with_connection:
            answer.is_complete, answer.ends_at = True, len(answer.parts)
            self._end(answer)
            answer.wake()
        elif answer.status:
            self.fail(EngineDied(f"the engine stopped in mid-answer: {why}"))
        else:
            self.fail(EngineDied(f"the engine gave no answer: {why}"))

    def pause_writing(self) -> None:
        """The socket is full: senders wait."""
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The socket has room again: senders go on."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    # --- Within ---------------------------------------------------------------------------------------

    def _stop_parsing(self, answer: IncomingResponse, error: Exception, data: bytes, waiting: int) -> None:
        """The parser stops within `data`, when so many parts were waiting. The rest is a WebSocket's, or not
        HTTP/1.1."""
        if isinstance(error, httptools.HttpParserUpgrade) and answer.status == _SWITCHED:
            self.parser = None
            if rest := data[error.args[0] :]:
                answer.on_body(rest)
        elif answer.is_complete:
            answer.overran = True
        else:
            del answer.parts[waiting:]  # they may hold what could not be parsed
            self.fail(EngineGarbled(f"the engine's answer is not HTTP/1.1: {error}"))

    async def _send_stream(self, source: AsyncIterator[bytes], length: int | None) -> None:
        """Sends a streamed body. An error of its source ends the answer: the engine waits for the rest of the
        body, so a reader of the answer would wait forever."""
        try:
            async for chunk in source if length is None else _of_length(source, length):
                if length is not None:
                    self._transport.write(chunk)
                elif chunk:  # an empty one would end the body
                    self._transport.writelines((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
                if self._room is not None:
                    await self._room
                if self.is_lost:
                    return
        except Exception as error:  # noqa: BLE001 - the source's own: its reader is told
            self.fail(error)
            return
        if length is None:
            self._transport.write(b"0\r\n\r\n")

    async def _send_raw(self, source: AsyncIterator[bytes]) -> None:
        """Sends what the client sends on a WebSocket. At its end, closes the connection when all is sent."""
        async for chunk in source:
            self._transport.write(chunk)
            if self._room is not None:
                await self._room
        self._transport.close()

    def _end(self, answer: IncomingResponse) -> None:
        """The answer is complete. The connection is used again if both sides want that and all was sent."""
        if len(answer.parts) > answer.ends_at:
            del answer.parts[answer.ends_at :]
            answer.overran = True
        is_sent = self._upload is None or self._upload.done()
        self._forget_answer()
        if self.is_lost:
            return
        if is_sent and answer.keeps_connection and not self._closes and not answer.overran:
            if self.is_paused:
                self.resume_reading()
            self._owner.give_back(self)
        elif is_sent:
            self._transport.close()
        else:
            self._transport.abort()

    def _forget_answer(self) -> None:
        """Parts the connection from its answer, and from a body that is still being sent."""
        if self._answer is not None:
            self._answer.connection = None
        self._answer = self.parser = None
        if self._upload is not None:
            # An upload that fails the answer runs this itself: it must not be cancelled by its own error.
            if self._upload is not asyncio.current_task():
                self._upload.cancel()
            self._upload = None


async def _of_length(source: AsyncIterator[bytes], length: int) -> AsyncIterator[bytes]:
    """The chunks of a body. Raises ValueError before they become more than `length` bytes, and at the end if
    they are fewer: the engine would take what follows for another request."""
    left = length
    async for chunk in source:
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
    if left:
        raise ValueError(f"a streamed body does not have the {length} bytes that its header announced")
