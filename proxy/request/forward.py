"""Sends one request to one engine and passes the answer back, byte for byte.

send → refused (REFUSALS)       raise: nothing was sent to the client, so another engine can be tried
     → any other error          pass on with its status, as the client's API words errors
     → JSON                     read whole, so that an engine that dies in mid-answer costs the client nothing
     → stream                   pass on chunk by chunk; if the engine dies, another one may go on with it
                                (migration.py), else send an error event and break off
     → stream, JSON wanted      read whole and assemble (for adapters that must stream)
     → a WebSocket              pass on both ways, byte for byte, until one side closes it
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec
from msgspec.structs import replace

from engine_adapter import (
    UNREAD,
    AnswerReader,
    EngineAdapter,
    EngineRejected,
    EngineUnavailable,
    HeaderPairs,
    Hold,
    IncomingResponse,
    OutgoingRequest,
    Transport,
    Usage,
    is_json,
    read_answer_usage,
    read_error,
    read_streamed_usage,
)
from proxy.error_codes import Code
from proxy.headers import REQUEST_ID_HEADER, SHOULD_RETRY_HEADER
from proxy.request.answer_headers import of_cached, of_json, pairs, passed_on, told_with_error
from proxy.request.calls import Call, Reply
from proxy.request.retries import REFUSALS, is_no_websocket
from proxy.request.transcript import is_whole

_CLIENTS = "invalid_request_error"
_EVENTS, _JSON = "text/event-stream", "application/json"
# Bytes kept of the end of a stream: usage, and what follows it, fit well within this.
_TAIL_BYTES = 8192


# Called with an answer when it begins.
OnFirstByte = Callable[[IncomingResponse], None]


class Passage(Protocol):
    """A stage that a stream passes on its way to the client, so that another engine can go on with it."""

    def feed(self, chunk: bytes) -> bytes:
        """Takes the stream's next bytes; returns those for the client.

        Raises:
            EngineUnavailable: the engine's answer does not fit.
        """

    def finish(self) -> bytes:
        """The bytes still held back, of a stream that is over."""


class Outcome(msgspec.Struct, frozen=True):
    """The result of a forwarded request: the status sent to the client, an error in mid-answer, and what the
    engine reported: cached tokens, generated tokens, and its own timing of the prefill if the answer is no
    stream. `broken_off`: the client was told nothing of the error yet; another engine may go on."""

    status: int
    cached_tokens: int | None = None
    error: str | None = None
    output_tokens: int | None = None
    prefill: tuple[int, float] | None = None
    broken_off: bool = False


class Forwarder:
    """Sends requests to engines through the one transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def forward(
        self,
        adapter: EngineAdapter,
        call: Call,
        hold: Hold,
        reply: Reply,
        headers: Mapping[str, str],
        on_first_byte: OnFirstByte,
        refusals: Container[int],
        passage: Passage | None,
    ) -> Outcome:
        """Forwards and answers.

        Args:
            adapter: the engine's adapter.
            call: the request.
            hold: the body for the engine, and who reads the answer as it passes.
            reply: the way back to the client.
            headers: added to the answer.
            on_first_byte: called when the answer begins.
            refusals: statuses with which the engine leaves the request to another one.
            passage: what a stream passes; None if it ends with its engine.

        Raises:
            EngineUnavailable, EngineRejected: before anything of this engine was sent to the client.
        """
        # Nothing here keeps the request: its body may be long.
        async with await self._transport.send(_outgoing(adapter, call, hold)) as response:
            if call.socket is not None and is_no_websocket(response.status):
                raise _no_websocket(response.status, read_error(await response.read()).message)
            if response.status >= 400:  # noqa: PLR2004 - HTTP
                as_it_is = call.native is not None and call.socket is None
                return await _answer_error(response, reply, headers, refusals, as_it_is=as_it_is)
            kept, reader = passed_on(response, adapter.spec), hold.answer
            if reader is not None:  # it may change the length
                kept = [pair for pair in kept if pair[0] != b"content-length"]
            cached = adapter.cached_tokens(response.headers)
            answer = _Answer(response, reply, kept + pairs(headers), reader, on_first_byte, cached)
            if call.socket is not None:
                return await answer.as_websocket()
            is_events = _is_of(response, _EVENTS)
            if reply.started and not is_events:
                raise EngineUnavailable("the engine that was to go on with a stream sent none")
            if _is_of(response, _JSON):
                is_plain = response.headers.get("content-encoding") is None
                return await answer.as_json(
                    must_be_json=is_plain and call.runs_prompt and call.native is None
                )
            if reader is not None and reader.assembles:
                return await answer.assembled(reader)
            return await answer.as_stream(passage if is_events else None)


def _is_of(response: IncomingResponse, content_type: str) -> bool:
    return response.headers.get("content-type", "").startswith(content_type)


def _no_websocket(status: int, said: str) -> EngineRejected:
    """The error of an engine that takes no WebSocket. Of a 403, only the engine knows what it means."""
    text = f"the engine takes no WebSocket here: {said}"
    if status == HTTPStatus.FORBIDDEN:
        return EngineRejected(text, status=status)
    return EngineRejected(text, status=404, type=_CLIENTS, code=Code.NOT_FOUND)


def _outgoing(adapter: EngineAdapter, call: Call, hold: Hold) -> OutgoingRequest:
    """The request for the engine."""
    request = adapter.prepare(call.method, call.path, call.headers, hold.body)
    return request if call.socket is None else replace(request, socket=call.socket)


@dataclass(slots=True, eq=False)
class _Answer:
    """An engine's good answer, on its way to the client.

    Attributes:
        response: the engine's.
        reply: the way back to the client.
        headers: those that the client gets.
        reader: reads the answer as it passes, and may change it; None if nobody does.
        begins: called when it begins.
        cached: cached tokens that the engine's headers tell; None if they do not.
    """

    response: IncomingResponse
    reply: Reply
    headers: HeaderPairs
    reader: AnswerReader | None
    begins: OnFirstByte
    cached: int | None

    async def as_json(self, *, must_be_json: bool) -> Outcome:
        """Sends nothing before all of it is here and readable: until then another engine can be tried."""
        content, reader = await self.response.read(), self.reader
        usage = read_answer_usage(content)
        if usage is UNREAD and must_be_json and not is_json(content):
            raise EngineUnavailable("the engine's answer is not JSON", dropped=True)
        self.begins(self.response)
        reported = self.cached if self.cached is not None else usage.cached_tokens
        if reader is not None:
            kept = reader.feed(content)
            if not reader.assembles:
                content = kept + reader.finish()
                reported = reader.cached_tokens() if reported is None else reported
        return await self._send(content, self.headers, reported, usage)

    async def assembled(self, reader: AnswerReader) -> Outcome:
        """Sends nothing before the engine's stream is complete: until then another engine can be tried."""
        while chunk := await self.response.receive():
            reader.feed(chunk)
        content = reader.finish()
        self.begins(self.response)
        return await self._send(
            content, of_json(self.headers), reader.cached_tokens(), read_answer_usage(content)
        )

    async def _send(self, content: bytes, headers: HeaderPairs, cached: int | None, usage: Usage) -> Outcome:
        await self.reply.start(self.response.status, [*headers, *of_cached(cached)])
        await self.reply.finish(content)
        return Outcome(self.response.status, cached, output_tokens=usage.output_tokens, prefill=usage.prefill)

    async def as_stream(self, passage: Passage | None) -> Outcome:
        """Sends nothing before the engine's first byte: until then another engine can be tried."""
        status, reply, cached = self.response.status, self.reply, self.cached
        stream = _Stream(self.response, self.reader, passage, self.begins)
        first = await stream.receive()
        await reply.start(status, [*self.headers, *of_cached(cached)])
        try:
            chunk = first
            while chunk:
                await reply.write(chunk)
                chunk = await stream.receive()
        except EngineUnavailable as error:
            if not reply.complete:
                if passage is None and _is_of(self.response, _EVENTS):
                    await tell_broken(reply, error)
                # No `finish`, on purpose: clients take a clean end for a complete answer.
                return Outcome(status, cached, error=str(error), broken_off=passage is not None)
        rest = stream.finish()
        if rest:
            await reply.write(rest)
        told = self.reader.cached_tokens() if self.reader is not None else None
        cached = cached if told is None else told
        await reply.finish()
        usage = read_streamed_usage(bytes(stream.tail))
        if cached is None:
            # /v1/messages reports it in the first event, other routes in the last.
            cached = usage.cached_tokens
            cached = cached if cached is not None else read_streamed_usage(first).cached_tokens
        return Outcome(status, cached, output_tokens=usage.output_tokens)

    async def as_websocket(self) -> Outcome:
        """Passes a WebSocket on. What the client sends is sent meanwhile."""
        self.begins(self.response)
        await self.reply.start(self.response.status, self.headers)
        try:
            chunk = b""  # the head leaves at once: the client waits for it before it sends
            while True:
                await self.reply.write(chunk)
                if not (chunk := await self.response.receive()):
                    break
        except EngineUnavailable as error:
            return Outcome(self.response.status, error=str(error))
        await self.reply.finish()
        return Outcome(self.response.status)


class _Stream:
    """An engine's stream as the client gets it.

    Attributes:
        tail: the last bytes from the engine.
    """

    __slots__ = ("_begins", "_passage", "_reader", "_response", "tail")

    def __init__(
        self,
        response: IncomingResponse,
        reader: AnswerReader | None,
        passage: Passage | None,
        begins: OnFirstByte,
    ) -> None:
        self._response = response
        self._reader = reader
        self._passage = passage
        self._begins: OnFirstByte | None = begins
        self.tail = bytearray()

    async def receive(self) -> bytes:
        """The next bytes for the client; b"" at the end.

        Raises:
            EngineUnavailable: the engine failed, or ended an answer too early with which another can go on.
        """
        while chunk := await self._response.receive():
            if self._begins is not None:
                self._note_begin(self._begins)
            self.tail += chunk
            if len(self.tail) > 2 * _TAIL_BYTES:
                del self.tail[:-_TAIL_BYTES]
            kept = chunk if self._reader is None else self._reader.feed(chunk)
            if self._passage is not None:
                kept = self._passage.feed(kept)
            if kept:
                return kept
        if self._begins is not None:
            self._note_begin(self._begins)
        if self._passage is not None and not is_whole(bytes(self.tail)):
            raise EngineUnavailable("the engine ended its answer too early", dropped=True)
        return b""

    def finish(self) -> bytes:
        """The last bytes for the client."""
        rest = self._reader.finish() if self._reader is not None else b""
        return rest if self._passage is None else self._passage.feed(rest) + self._passage.finish()

    def _note_begin(self, begins: OnFirstByte) -> None:
        self._begins = None
        begins(self._response)


async def tell_broken(reply: Reply, error: Exception) -> None:
    """Tells the client that its stream ends before its answer does."""
    body = reply.dialect.error(502, str(error), kind="server_error")
    await reply.write(b"\n\n" + reply.dialect.error_event(body))


async def _answer_error(
    response: IncomingResponse,
    reply: Reply,
    headers: Mapping[str, str],
    refusals: Container[int],
    *,
    as_it_is: bool,
) -> Outcome:
    """Passes the engine's error on, as the client's API words errors or `as_it_is`.

    Raises:
        EngineRejected: another engine may succeed.
    """
    content = await response.read()
    error, told = read_error(content), told_with_error(response.headers)
    status = HTTPStatus.BAD_REQUEST if error.is_clients else response.status
    # With this header the engine says: the request itself is the cause.
    is_refusal = status in refusals and told.get(SHOULD_RETRY_HEADER) != "false"
    if is_refusal or reply.started:  # in the middle of a stream, another engine may still go on with it
        raise EngineRejected(
            error.message,
            status=status,
            param=error.param,
            type=error.type,
            code=error.code,
            more=error.more,
            headers=told,
        )
    kind = error.type or ("server_error" if status in REFUSALS else _CLIENTS)
    body = reply.dialect.error(
        status,
        error.message,
        kind=kind,
        param=error.param,
        code=error.code,
        request_id=headers.get(REQUEST_ID_HEADER),
        more=error.more,
    )
    content_type = response.headers.get("content-type", "") if as_it_is else _JSON
    every = {"content-type": content_type, **told, **headers}
    await reply.start(status, pairs(every))
    await reply.finish(content if as_it_is else body)
    return Outcome(status, error=error.message)
