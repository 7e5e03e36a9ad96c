"""Sends one request to one engine and passes the answer back, byte for byte.

send → refused (REFUSALS)       raise: nothing was sent to the client, so another engine can be tried
     → any other error          pass on with its status, as the client's API words errors
     → JSON                     read whole, so that an engine that dies in mid-answer costs the client nothing
     → stream                   pass on chunk by chunk; if the engine dies, another one may go on with it
     → stream, JSON wanted      read whole and assemble (for adapters that must stream)
     → a WebSocket              pass on both ways, byte for byte, until one side closes it
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import msgspec
from msgspec.structs import replace

from engine_adapter import (
    UNREAD,
    AnswerReader,
    EngineAdapter,
    EngineDied,
    EngineGarbled,
    EngineRejected,
    EngineUnavailable,
    HeaderPairs,
    Hold,
    HttpTransport,
    IncomingResponse,
    OutgoingRequest,
    Speech,
    TokenUsage,
    WholeEvents,
    is_json,
    read_answer_usage,
    read_error,
    read_streamed_usage,
)
from proxy.errors.codes import Code
from proxy.headers import REQUEST_ID_HEADER, SHOULD_RETRY_HEADER
from proxy.request.answer_headers import of_cached, of_json, pairs, passed_on, told_with_error
from proxy.request.calls import Call, Reply
from proxy.request.known_routes import did_you_mean
from proxy.request.migration import ROUTES, Passage
from proxy.request.retries import REFUSALS, is_no_websocket
from proxy.request.transcript import is_whole, without_half

_CLIENTS = "invalid_request_error"
_EVENTS, _JSON = "text/event-stream", "application/json"
# Bytes kept of the end of a stream: usage, and what follows it, fit well within this.
_TAIL_BYTES = 8192


class Forwarded(msgspec.Struct, frozen=True):
    """A complete answer: the status that the client got, the engine's own error about the request, and what
    the engine reported: cached tokens, generated tokens, its own timings. `called_tool`: it ended so."""

    status: int
    cached_tokens: int | None = None
    error: str | None = None
    output_tokens: int | None = None
    prefill: tuple[int, float] | None = None
    decode_s: float | None = None
    called_tool: bool = False


@dataclass(slots=True, eq=False)
class Forwarding:
    """One request on its way to one engine, and the answer on its way back.

    Attributes:
        hold: the body for the engine, and who reads the answer as it passes.
        headers: added to the answer.
        refusals: statuses with which the engine leaves the request to another one.
        passage: reads the stream for a later engine; None if the stream ends with its engine.
        begins: called with the answer when it begins, and `cached`.
        speaks: called at the first bytes that say something, which comments of a stream do not.
        cached: cached tokens that the headers of the answer tell; None if they do not.
    """

    adapter: EngineAdapter
    call: Call
    hold: Hold
    reply: Reply
    headers: Mapping[str, str]
    refusals: Container[int]
    passage: Passage | None
    begins: Callable[[IncomingResponse, int | None], None]
    speaks: Callable[[], None]
    cached: int | None = None

    async def run(self, transport: HttpTransport) -> Forwarded:
        """Forwards and answers.

        Raises:
            EngineUnavailable, EngineRejected: the engine failed. The client keeps what `reply` has sent.
        """
        # Nothing here keeps the request: its body may be long.
        async with await transport.send(self._outgoing()) as response:
            call = self.call
            if call.socket is not None and is_no_websocket(response.status):
                raise _no_websocket(response.status, read_error(await response.read()).message)
            if response.status >= 400:  # noqa: PLR2004 - HTTP
                return await self._as_error(response)
            self.cached = self.adapter.cached_tokens(response.headers)
            kind = response.headers.get("content-type", "").lower()
            headers = self._headers(response, kind)
            if call.socket is not None:
                return await self._as_websocket(response, headers)
            # A compressed stream, which no engine is asked for, is passed on as it is.
            is_events = kind.startswith(_EVENTS) and _is_plain(response)
            if self.reply.started and not is_events:
                raise EngineGarbled("the engine that was to go on with a stream sent none")
            if kind.startswith(_JSON):
                return await self._as_json(response, headers)
            reader = self.hold.answer
            if reader is not None and reader.assembles:
                return await self._assembled(response, headers, reader)
            return await self._as_stream(response, headers, is_events=is_events)

    def _outgoing(self) -> OutgoingRequest:
        call = self.call
        request = self.adapter.prepare(call.method, call.path, call.headers, self.hold.body)
        return request if call.socket is None else replace(request, socket=call.socket)

    def _headers(self, response: IncomingResponse, kind: str) -> HeaderPairs:
        """The headers that the client gets; `kind` is the content type. A reader of the answer may change its
        length, and so may a translation of a stream, or another engine that goes on with it."""
        kept = passed_on(response, self.adapter.spec)
        if self.hold.answer is not None or kind.startswith(_EVENTS):
            kept = [pair for pair in kept if pair[0] != b"content-length"]
        return kept + pairs(self.headers)

    async def _as_json(self, response: IncomingResponse, headers: HeaderPairs) -> Forwarded:
        """Reads the whole JSON answer before sending any of it: until then, another engine can be tried."""
        content, reader = await response.read(), self.hold.answer
        usage = read_answer_usage(content)
        must_be_json = _is_plain(response) and self.call.runs_prompt and self.call.native is None
        if usage is UNREAD and must_be_json and not is_json(content):
            raise EngineGarbled("the engine's answer is not JSON")
        self.begins(response, self.cached)
        self.speaks()
        cached = self.cached if self.cached is not None else usage.cached_tokens
        if reader is not None:
            kept = reader.feed(content)
            if not reader.assembles:
                content = kept + reader.finish()
                cached = reader.cached_tokens() if cached is None else cached
        return await self._send(response.status, content, headers, cached, usage)

    async def _assembled(
        self, response: IncomingResponse, headers: HeaderPairs, reader: AnswerReader
    ) -> Forwarded:
        """Sends nothing before the engine's stream is complete: until then another engine can be tried."""
        while chunk := await response.receive():
            reader.feed(chunk)
        content = reader.finish()
        self.begins(response, self.cached)
        self.speaks()
        usage = read_answer_usage(content)
        return await self._send(response.status, content, of_json(headers), reader.cached_tokens(), usage)

    async def _send(
        self, status: int, content: bytes, headers: HeaderPairs, cached: int | None, usage: TokenUsage
    ) -> Forwarded:
        await self.reply.start(status, [*headers, *of_cached(self._told(cached))])
        await self.reply.finish(content)
        return _forwarded(status, cached, usage)

    def _told(self, cached: int | None) -> int | None:
        """The cached tokens that the client is told, where the engine reports `cached`."""
        return cached if self.hold.told_cached is None else self.hold.told_cached

    async def _as_stream(
        self, response: IncomingResponse, headers: HeaderPairs, *, is_events: bool
    ) -> Forwarded:
        """Sends nothing before the engine's first byte: until then another engine can be tried."""
        reply, reader, cached = self.reply, self.hold.answer, self.cached
        must_end = is_events and self.call.streams and self.call.route in ROUTES
        stream = _Stream(
            response,
            reader,
            self.passage if is_events else None,
            WholeEvents() if is_events and self.passage is None else None,
            partial(self.begins, response, cached),
            self.speaks,
            must_end=must_end,
        )
        first = chunk = await stream.receive()
        await reply.start(response.status, [*headers, *of_cached(self._told(cached))], is_events=is_events)
        try:
            while chunk:
                await reply.write(chunk)
                chunk = await stream.receive()
        except EngineUnavailable:
            if not reply.complete:
                raise
        if rest := stream.finish():
            await reply.write(rest)
        told = reader.cached_tokens() if reader is not None else None
        cached = cached if told is None else told
        await reply.finish()
        usage = read_streamed_usage(bytes(stream.tail))
        if cached is None:
            # /v1/messages reports it in the first event, other routes in the last.
            cached = usage.cached_tokens
            cached = cached if cached is not None else read_streamed_usage(first).cached_tokens
        return _forwarded(response.status, cached, usage)

    async def _as_websocket(self, response: IncomingResponse, headers: HeaderPairs) -> Forwarded:
        """Passes a WebSocket on. The client's frames travel at the same time."""
        self.begins(response, self.cached)
        self.speaks()
        await self.reply.start(response.status, headers)
        chunk = b""  # the head leaves at once: the client waits for it before it sends
        while True:
            await self.reply.write(chunk)
            if not (chunk := await response.receive()):
                break
        await self.reply.finish()
        return Forwarded(response.status)

    async def _as_error(self, response: IncomingResponse) -> Forwarded:
        """Passes the engine's error on: unchanged on an engine's own route, else in the form of the client's
        API.

        Raises:
            EngineRejected: another engine may succeed.
        """
        content, reply = await response.read(), self.reply
        error, told = read_error(content), told_with_error(response.headers)
        status = HTTPStatus.BAD_REQUEST if error.is_clients else response.status
        message = error.message
        if status == HTTPStatus.NOT_FOUND and self.call.native is None:
            message += did_you_mean(self.call.route)
        # With this header, the engine says that the request itself is at fault.
        is_refusal = status in self.refusals and told.get(SHOULD_RETRY_HEADER) != "false"
        if is_refusal or reply.started:  # in the middle of a stream, another engine may still go on with it
            raise EngineRejected(
                message,
                status=status,
                param=error.param,
                type=error.type,
                code=error.code,
                more=error.more,
                headers=told,
            )
        as_it_is = self.call.native is not None and self.call.socket is None
        body = reply.dialect.error(
            status,
            message,
            kind=error.type or ("server_error" if status in REFUSALS else _CLIENTS),
            param=error.param,
            code=error.code,
            request_id=self.headers.get(REQUEST_ID_HEADER),
            more=error.more,
        )
        content_type = response.headers.get("content-type", "") if as_it_is else _JSON
        await reply.start(status, pairs({"content-type": content_type, **told, **self.headers}))
        await reply.finish(content if as_it_is else body)
        return Forwarded(status, error=message)


def _forwarded(status: int, cached: int | None, usage: TokenUsage) -> Forwarded:
    return Forwarded(
        status, cached, None, usage.output_tokens, usage.prefill, usage.decode_s, usage.called_tool
    )


def _is_plain(response: IncomingResponse) -> bool:
    return response.headers.get("content-encoding", "identity") == "identity"


def _no_websocket(status: int, said: str) -> EngineRejected:
    """The error of an engine that takes no WebSocket. A 403 keeps its status: only the engine knows its
    meaning."""
    text = f"the engine takes no WebSocket here: {said}"
    if status == HTTPStatus.FORBIDDEN:
        return EngineRejected(text, status=status)
    return EngineRejected(text, status=404, type=_CLIENTS, code=Code.NOT_FOUND)


class _Stream:
    """An engine's stream as the client gets it."""

    __slots__ = (
        "_begins", "_events", "_is_whole", "_must_end", "_passage", "_reader", "_response", "_speaks",
        "_speech", "tail",
    )  # fmt: skip

    def __init__(
        self,
        response: IncomingResponse,
        reader: AnswerReader | None,
        passage: Passage | None,
        events: WholeEvents | None,
        begins: Callable[[], None],
        speaks: Callable[[], None],
        *,
        must_end: bool,
    ) -> None:
        """A stream.

        Args:
            response: the engine's.
            reader: reads it, and may change it.
            passage: reads it for a later engine.
            events: holds back half events, which an error event must not follow; None for other streams.
            begins: called at its first bytes.
            speaks: called at the first bytes that are no comments, or at the end.
            must_end: a whole answer has an end mark.
        """
        self._response = response
        self._reader = reader
        self._passage = passage
        self._events = events
        self._must_end = must_end
        self._is_whole = False  # what was dropped from the tail had an end mark
        self._begins: Callable[[], None] | None = begins
        self._speaks: Callable[[], None] | None = speaks
        self._speech = Speech()
        self.tail = bytearray()

    async def receive(self) -> bytes:
        """The next bytes for the client; b"" at the end.

        Raises:
            EngineUnavailable: the engine failed, or ended its stream too early.
        """
        while chunk := await self._response.receive():
            if self._speaks is not None:
                self._note_begin(chunk)
            self.tail += chunk
            if len(self.tail) > 2 * _TAIL_BYTES:
                self._is_whole = self._is_whole or (self._must_end and is_whole(bytes(self.tail)))
                del self.tail[:-_TAIL_BYTES]
            kept = chunk if self._reader is None else self._reader.feed(chunk)
            if self._passage is not None:
                kept = self._passage.feed(kept)
            elif self._events is not None and kept:
                kept = self._whole_events(self._events, kept)
            if kept:
                return kept
        if self._speaks is not None:
            self._note_begin(b"")
        if self._must_end and not (self._is_whole or is_whole(bytes(self.tail))):
            raise EngineDied("the engine ended its answer too early")
        return b""

    def finish(self) -> bytes:
        """The last bytes for the client."""
        rest = self._reader.finish() if self._reader is not None else b""
        if self._passage is not None:
            rest = (self._passage.feed(rest) if rest else b"") + self._passage.finish()
        elif self._events is not None:
            rest = self._events.rest + rest
        return without_half(rest) if rest and self._must_end else rest

    def _whole_events(self, events: WholeEvents, chunk: bytes) -> bytes:
        """The events that a chunk completes. From one on that is too long to be held back, the stream passes
        as it comes."""
        if events.may_hold(chunk):
            return events.joined(chunk)
        self._events = None
        return events.take_rest() + chunk

    def _note_begin(self, chunk: bytes) -> None:
        """`chunk`: the next bytes; b"" at the end."""
        begins, speaks = self._begins, self._speaks
        if begins is not None:
            self._begins = None
            begins()
        if speaks is not None and (not chunk or self._speech.begins_in(chunk)):
            self._speaks = None
            speaks()
