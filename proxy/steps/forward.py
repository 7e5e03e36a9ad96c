"""Sends one request to one engine and passes the answer back, byte for byte.

send → refused                  raise: nothing was sent to the client, so another engine can be tried
     → any other error          pass on with its status, as the client's API words errors
     → an error in a 200        the same, with the status that it names
     → no answer to a prompt    raise: a redirection, nothing, a page, JSON of another form
     → JSON                     read whole, so that an engine that dies in mid-answer costs the client nothing
     → stream                   pass on chunk by chunk; if the engine dies, another one may go on with it
     → stream, JSON wanted      read whole and assemble (for adapters that must stream)
     → a WebSocket              pass on both ways, byte for byte, until one side closes it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from time import monotonic

import msgspec
from msgspec.structs import replace

from engine_adapter import (
    UNREAD,
    AnswerReader,
    EngineDied,
    EngineGarbled,
    EngineRejected,
    EngineUnavailable,
    HeaderPairs,
    Hold,
    HttpTransport,
    IncomingResponse,
    Opening,
    OutgoingRequest,
    Says,
    Speech,
    WholeEvents,
    read_answer_usage,
    read_error,
    read_streamed_error,
    read_streamed_usage,
    what_is_said,
)
from engine_adapter.causes import Cause, Code
from engine_adapter.http.answer_fields import NOTHING
from engine_adapter.off_loop import MOST_MS, off_loop
from engine_adapter.types import Usage
from proxy.core.placement.pairs import TransferResult
from proxy.fleet.engine import Engine
from proxy.fleet.lease import Lease
from proxy.headers import (
    ENGINE_HEADER,
    FIRM_HEADER,
    NOTE_HEADER,
    POLICY_HEADER,
    PREDICTED_HEADER,
    REQUEST_ID_HEADER,
    RETENTION_HEADER,
)
from proxy.request.calls import Call
from proxy.request.engine_errors import REFUSALS, engines_code, is_no_websocket, naming_call
from proxy.request.known_routes import of_lacking
from proxy.request.migration import ROUTES, is_whole, without_half
from proxy.request.records import RequestRecord
from proxy.request.stages import of_cached, of_json, pairs, passed_on, told_with_error
from proxy.steps.other_leg import OtherLeg
from proxy.steps.preparation import Ready
from proxy.steps.request import Request

_CLIENTS = "invalid_request_error"
_EVENTS, _JSON, _HTML = "text/event-stream", "application/json", "text/html"
_SWITCHED = 101
# Statuses below 400 that answer no prompt: nothing, and redirections.
_NO_ANSWERS = frozenset({204, *range(300, 400)})
_STOPPED = re.compile(rb'"finish_reason"\s*:\s*"stop"')
_LINE_FEEDS = b"\n\n"
# Bytes kept of the end of a stream: usage, and what follows it, fit well within this.
_TAIL_BYTES = 8192
_MOST_RECENT_BYTES = 2 * _TAIL_BYTES


class Forwarded(msgspec.Struct, frozen=True):
    """A complete answer: the status that the client got, what the engine reported, and the engine's own error
    about the request. `is_empty`: it ended by itself, and said nothing."""

    status: int
    usage: Usage = NOTHING
    error: str | None = None
    is_empty: bool = False


class Attempt(msgspec.Struct, eq=False):
    """An attempt on one engine: the request on its way there, and the answer on its way back."""

    request: Request
    ready: Ready  # the request
    call: Call  # the request as this engine gets it
    engine: Engine
    lease: Lease
    hold: Hold  # the body for the engine, and who reads the answer as it passes
    leg: OtherLeg | None = None  # its leg on another engine; None without one, and if that failed
    beside: OtherLeg | None = None  # that leg, where its end matters to the answer
    headers: dict[str, str] = {}  # added to the answer
    cached: int | None = None  # cached tokens that the headers of the answer tell; None if they do not
    sent: float = 0.0  # when the request was sent, in monotonic seconds
    continues: bool = False  # the client has the beginning of the answer from another engine

    def is_sent(self) -> None:
        """It goes to the engine now."""
        ready, leg, lease, hold, reply = self.ready, self.leg, self.lease, self.hold, self.request.reply
        self.beside = None if leg is None or leg.is_fetched else leg
        self.sent, self.continues = monotonic(), reply.started
        record = self.request.record
        placement = record.placement if leg is not None and record.placement else lease.placement
        headers = self.headers = {
            **dict.fromkeys(reply.dialect.id_headers, self.call.answer_id),
            ENGINE_HEADER: placement.chosen.engine,
            PREDICTED_HEADER: str(placement.predicted_tokens),
            # A page that an engine answered must not act as kvpin's own page, which may use the admin API.
            POLICY_HEADER: "sandbox",
        }
        if not placement.firm:
            headers[FIRM_HEADER] = "not-firm"
        if hold.note:
            headers[NOTE_HEADER] = hold.note
        if ready.rules or self.call.changed:
            headers |= ready.told
        if ready.retention is not None and ready.retention.priority:
            headers[RETENTION_HEADER] = f"{ready.retention.ttl_s:g}" if hold.retains else "0"
        if ready.translation is not None:
            ready.translation.predicted = ready.predicted(placement, self.engine)

    def begins(self, response: IncomingResponse) -> None:
        """The answer begins."""
        request, reply = self.request, self.request.reply
        request.cached = self.cached
        request.progress = lambda: (response.received, reply.waits)
        request.blame(request.began(monotonic(), is_socket=response.status == _SWITCHED))

    def speaks(self) -> None:
        """The first bytes are here that say something, which comments of a stream do not."""
        lease, record = self.lease, self.request.record
        if self.beside is not None:
            self.beside.begins()
            note_moved(record, self.beside, lease, self.sent)
        lease.first_byte(streamed=self.call.streams)
        if record.first_byte_s is None or not self.continues:
            # Now, because the client may leave before the end.
            record.begins(lease.started, lease.gathered, self.sent, lease.first_byte_s or 0.0)

    def refuses(self, error: EngineRejected) -> bool:
        """True if the engine leaves the request to another one with this error."""
        if self.beside is not None and self.beside.is_checked:
            return True
        return self.request.cause_for(error) is not Cause.ENGINE_REJECTED

    async def run(self, transport: HttpTransport) -> Forwarded:
        """Forwards and answers. Raises EngineUnavailable or EngineRejected if the engine failed: the client
        keeps what `reply` has sent."""
        # Nothing here keeps the request: its body may be long.
        response = await transport.send(self._outgoing(), self.lease.confirm)
        try:
            call = self.call
            if call.socket is not None and is_no_websocket(response.status):
                raise _no_websocket(response.status, read_error(await response.read()).message)
            if response.status >= HTTPStatus.BAD_REQUEST:
                return await self._as_error(response, await response.read(), response.status)
            # The answer has to have the form of its API's answers to prompts.
            has_form = call.runs_prompt and call.native is None
            if has_form and response.status in _NO_ANSWERS:
                raise EngineGarbled(f"the engine answered {response.status} to a prompt")
            self.cached = self.engine.adapter.cached_tokens(response.headers)
            kind = response.headers.first.get(b"content-type", b"").decode("latin-1").lower()
            headers = self._headers(response, kind)
            if call.socket is not None:
                return await self._as_websocket(response, headers)
            # A compressed stream, which no engine is asked for, is passed on as it is.
            is_events = kind.startswith(_EVENTS) and _is_plain(response)
            if self.request.reply.started and not is_events:
                raise EngineGarbled("the engine that was to go on with a stream sent none")
            if kind.startswith(_JSON) or (has_form and kind.startswith(_HTML)):
                return await self._as_json(response, headers, has_form=has_form and _is_plain(response))
            reader = self.hold.answer
            if reader is not None and reader.assembles:
                return await self._assembled(response, headers, reader)
            opening = Opening() if is_events and has_form else None
            return await self._as_stream(response, headers, opening, is_events=is_events)
        finally:
            response.leave()

    def _outgoing(self) -> OutgoingRequest:
        call, hold = self.call, self.hold
        if hold.is_lost is not None and hold.is_lost():
            raise EngineUnavailable("the engine was lost before it could start")
        request = self.engine.adapter.prepare(call.method, call.path, call.headers, hold.body)
        return request if call.socket is None else replace(request, socket=call.socket)

    def _headers(self, response: IncomingResponse, kind: str) -> HeaderPairs:
        """The headers that the client gets; `kind` is the content type. A reader of the answer may change its
        length, and so may a translation of a stream, or another engine that goes on with it."""
        kept = passed_on(response, self.engine.adapter.spec)
        if self.hold.answer is not None or kind.startswith(_EVENTS):
            kept = [pair for pair in kept if pair[0] != b"content-length"]
        return kept + pairs(self.headers)

    async def _as_json(
        self, response: IncomingResponse, headers: HeaderPairs, *, has_form: bool
    ) -> Forwarded:
        """Reads the whole JSON answer before sending any of it: until then, another engine can be tried.
        `has_form`: it has to have that of its API's answers to prompts."""
        content, reader = await response.read(), self.hold.answer
        usage, says = read_answer_usage(content), Says.SOMETHING
        if has_form:
            says = what_is_said(self.call.route, content, is_json=usage is not UNREAD)
            if says is Says.ERROR:
                return await self._as_error(response, content, None)
            if says is Says.NO_ANSWER:
                kind = response.headers.get("content-type", "")
                raise EngineGarbled(_other_form(self.call.route, kind, content))
        self.begins(response)
        self.speaks()
        cached = self.cached if self.cached is not None else usage.cached_tokens
        if reader is not None:
            kept = reader.feed(content)
            if not reader.assembles:
                content = kept + reader.finish()
                cached = reader.cached_tokens() if cached is None else cached
        sent = await self._send(response.status, content, headers, cached, usage)
        return sent if says is Says.SOMETHING else replace(sent, is_empty=True)

    async def _assembled(
        self, response: IncomingResponse, headers: HeaderPairs, reader: AnswerReader
    ) -> Forwarded:
        """Sends nothing before the engine's stream is complete: until then another engine can be tried."""
        while chunk := await response.receive():
            reader.feed(chunk)
        content = await off_loop(reader.finish, ms=reader.finish_ms)
        self.begins(response)
        self.speaks()
        usage, headers = read_answer_usage(content), of_json(headers)
        if reader.note:
            headers += pairs({NOTE_HEADER: reader.note})
        sent = await self._send(response.status, content, headers, reader.cached_tokens(), usage)
        is_empty = what_is_said(self.call.route, content, is_json=True) is Says.NOTHING
        return replace(sent, is_empty=True) if is_empty else sent

    async def _send(
        self, status: int, content: bytes, headers: HeaderPairs, cached: int | None, usage: Usage
    ) -> Forwarded:
        await self.request.reply.start(status, [*headers, *of_cached(self._told(cached))])
        await self.request.reply.finish(content)
        return _forwarded(status, cached, usage)

    def _told(self, cached: int | None) -> int | None:
        """The cached tokens that the client is told, where the engine reports `cached`."""
        return cached if self.hold.told_cached is None else self.hold.told_cached

    async def _as_stream(
        self, response: IncomingResponse, headers: HeaderPairs, opening: Opening | None, *, is_events: bool
    ) -> Forwarded:
        """Sends nothing before the engine's first byte: until then another engine can be tried."""
        reply, reader, cached = self.request.reply, self.hold.answer, self.cached
        stream = _Stream(self, response, opening, is_events=is_events)
        first = await stream.receive()
        await reply.start(response.status, [*headers, *of_cached(self._told(cached))], is_events=is_events)
        try:
            if first:
                await reply.write(first)
                while not await response.relay(stream.pass_on):
                    await reply.drain()
                stream.end()
        except EngineUnavailable:
            if not reply.complete:
                raise
        if reader is None or reader.finish_ms <= MOST_MS:
            rest = stream.finish()
        else:
            rest = await off_loop(stream.finish, ms=reader.finish_ms)
        if rest:
            await reply.write(rest)
        told = reader.cached_tokens() if reader is not None else None
        cached = cached if told is None else told
        await reply.finish()
        usage = read_streamed_usage(stream.tail)
        if cached is None:
            # /v1/messages reports it in the first event, other routes in the last.
            cached = usage.cached_tokens
            cached = cached if cached is not None else read_streamed_usage(first).cached_tokens
        if stream.error is not None:  # the client has read it
            raise stream.error
        sent = _forwarded(response.status, cached, usage)
        return replace(sent, is_empty=True) if stream.is_empty else sent

    async def _as_websocket(self, response: IncomingResponse, headers: HeaderPairs) -> Forwarded:
        """Passes a WebSocket on. The client's frames travel at the same time."""
        self.begins(response)
        self.speaks()
        await self.request.reply.start(response.status, headers)
        chunk = b""  # the head leaves at once: the client waits for it before it sends
        while True:
            await self.request.reply.write(chunk)
            if not (chunk := await response.receive()):
                break
        await self.request.reply.finish()
        return Forwarded(response.status)

    async def _as_error(self, response: IncomingResponse, content: bytes, status: int | None) -> Forwarded:
        """Passes the engine's error on: unchanged on an engine's own route, else in the form of the client's
        API. `status`: None for an error that came with status 200. Raises EngineRejected if another engine
        may succeed."""
        reply = self.request.reply
        told = await naming_call(read_error(content), self.call.body)
        is_unknown = status == HTTPStatus.NOT_FOUND and self.call.native is None
        hint = of_lacking(self.call.route, told.message) if is_unknown else ""
        error = told.rejection(status, told_with_error(response.headers), hint=hint)
        if self.refuses(error) or reply.started:  # another engine may still go on with a stream
            raise error
        status, message = error.status, str(error)
        as_it_is = self.call.native is not None and self.call.socket is None
        body = reply.dialect.error(
            status,
            message,
            kind=error.type or ("server_error" if status in REFUSALS else _CLIENTS),
            param=error.param,
            code=engines_code(error),
            request_id=self.headers.get(REQUEST_ID_HEADER),
            more=error.more,
        )
        content_type = response.headers.get("content-type", "") if as_it_is else _JSON
        await reply.start(status, pairs({"content-type": content_type, **error.headers, **self.headers}))
        await reply.finish(content if as_it_is else body)
        return Forwarded(status, error=message)


def note_moved(record: RequestRecord, prefilled: OtherLeg, lease: Lease, sent: float) -> None:
    """Notes that an engine has the KV that another one computed, and how long moving that took."""
    now, book = monotonic(), lease.placed.book
    record.transfer, record.transfer_s = TransferResult.MOVED, now - prefilled.moves_since(sent)
    pulled = record.placement.chosen.pulled_tokens if record.placement is not None else 0
    waited = book.ledger.view(now).queue_s > 0  # then the time is not that of the transfer alone
    measured = 0 if waited else pulled
    lease.placer.transfers.measured(now, prefilled.engine.id, book.engine, measured, record.transfer_s)


def _forwarded(status: int, cached: int | None, usage: Usage) -> Forwarded:
    return Forwarded(status, usage if cached == usage.cached_tokens else replace(usage, cached_tokens=cached))


def _other_form(route: str, kind: str, content: bytes) -> str:
    """What an operator needs to know of an answer that is none. Its text may repeat a prompt."""
    what = f"its type is {kind[:60]!r}" if not kind.lower().startswith(_JSON) else "it holds no answer"
    return f"the engine's answer has not the form of {route}: {what if content else 'it is empty'}"


def _is_plain(response: IncomingResponse) -> bool:
    return response.headers.first.get(b"content-encoding", b"identity") == b"identity"


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
        "_begins", "_events", "_held", "_is_whole", "_marks", "_must_end", "_opening", "_passage", "_put",
        "_read_piece", "_reader", "_reads_all", "_recent", "_recent_bytes", "_response", "_speaks",
        "_speech", "_stages", "error", "is_empty",
    )  # fmt: skip

    def __init__(
        self, attempt: Attempt, response: IncomingResponse, opening: Opening | None, *, is_events: bool
    ) -> None:
        """`opening`: reads its first events, where these must be an answer to a prompt. `is_events`: half
        events are held back: an error event must not follow them."""
        reader, call = attempt.hold.answer, attempt.call
        passage = self._passage = attempt.request.passage if is_events else None
        # Once it has begun: whole events without these bytes pass unread. None: all are read.
        self._marks: tuple[bytes, ...] | None = None
        self._response, self._reader, self._put = response, reader, attempt.request.reply.put
        # A reader of events gets whole ones, whatever the engine calls its stream.
        reads_events = reader is not None and not reader.takes_pieces
        self._events = WholeEvents() if is_events or reads_events else None
        # What whole events pass in turn, and the bytes without which they need not; None: they do anyway.
        self._stages: list[tuple[tuple[bytes, ...] | None, Callable[[bytes], bytes]]] = []
        self._read_piece: Callable[[bytes], bytes] | None = None
        if reader is not None and reads_events:
            self._stages.append((reader.marks, reader.feed))
        elif reader is not None:
            self._read_piece = reader.feed
        if passage is not None:
            self._stages += [(None, stage) for stage in passage.stages]
        reads_text = passage is not None and passage.reads_text
        reads_each = reader is not None and reader.marks is None
        self._reads_all = self._events is None or self._read_piece is not None or reads_each or reads_text
        self._must_end = is_events and call.streams and call.route in ROUTES  # a whole answer has an end mark
        self._is_whole = False  # what was dropped from the tail had an end mark
        # Called at its first bytes, and at the first that are no comments, or at the end.
        self._begins: Callable[[], None] | None = partial(attempt.begins, response)
        self._speaks: Callable[[], None] | None = attempt.speaks
        self._speech = Speech()
        self._opening = opening
        self._held = b""  # the client's part of events that may be no answer
        self.error: EngineRejected | None = None  # the one that ended it
        self.is_empty = False
        self._recent: list[bytes] = []  # the last pieces
        self._recent_bytes = 0

    @property
    def tail(self) -> bytes:
        """The stream's last bytes."""
        return b"".join(self._recent)

    async def receive(self) -> bytes:
        """The first bytes for the client; b"" if the stream ends before.

        Raises:
            EngineUnavailable: the engine failed, or ended its stream too early.
            EngineRejected: it has begun with an error.
        """
        while chunk := await self._response.receive():
            if kept := self.take(chunk):
                return kept
        self.end()
        return b""

    def take(self, chunk: bytes) -> bytes:
        """Takes the engine's next bytes; returns those for the client. Raises as `receive` does."""
        self._recent.append(chunk)
        self._recent_bytes += len(chunk)
        if self._recent_bytes > _MOST_RECENT_BYTES:
            self._trim()
        events, kept = self._events, chunk
        if self._read_piece is not None:
            kept = self._read_piece(chunk)
        if events is not None and (kept[-2:] != _LINE_FEEDS or not events.is_between):
            kept = self._whole_events(events, kept)
        for marks, stage in self._stages:
            if marks is None:
                kept = stage(kept)
                continue
            for mark in marks:
                if kept.rfind(mark) >= 0:  # what is not there is found out in a third of the time of `in`
                    kept = stage(kept)
                    break
        return kept if self._speaks is None else self._begun(chunk, kept)

    def pass_on(self, chunk: bytes) -> bool:
        """Passes the engine's next bytes on. Returns False if the client has to take some before it gets
        more. Raises as `receive` does."""
        # Most pieces are one event that nobody reads.
        if self._marks is not None and chunk[-2:] == _LINE_FEEDS:
            for mark in self._marks:
                if chunk.rfind(mark) >= 0:
                    break
            else:
                self._recent.append(chunk)
                self._recent_bytes += len(chunk)
                if self._recent_bytes > _MOST_RECENT_BYTES:
                    self._trim()
                return self._put(chunk)
        kept = self.take(chunk)
        if not self._reads_all:
            self._marks = self._unread()
        return not kept or self._put(kept)

    def _unread(self) -> tuple[bytes, ...] | None:
        """The bytes without which the next events need not be read, if whole ones come; None: all must."""
        if self._speaks is not None or self._events is None or not self._events.is_between:
            return None
        found = [
            self._passage.marks if marks is None and self._passage else marks for marks, _ in self._stages
        ]
        if None in found:
            return None
        return tuple(mark for marks in found if marks is not None for mark in marks)

    def _trim(self) -> None:
        self._is_whole = self._is_whole or (self._must_end and is_whole(self.tail))
        self._recent, self._recent_bytes = [self.tail[-_TAIL_BYTES:]], _TAIL_BYTES

    def end(self) -> None:
        """The engine has ended its stream. Raises EngineUnavailable: too early."""
        tail = self.tail
        if self._speaks is not None and self._opening is None:
            self._note_begin(b"")
        if self._must_end and not (self._is_whole or is_whole(tail)):
            raise EngineDied("the engine ended its answer too early")
        if self._opening is None:
            return
        if self._begins is not None:
            raise EngineGarbled("the engine's stream has no answer")
        if (error := read_streamed_error(tail)) is not None:
            self.error = error.rejection()
        elif self._speaks is not None:
            self.is_empty = _STOPPED.search(tail) is not None

    def finish(self) -> bytes:
        """The last bytes for the client."""
        rest = self._events.take_rest() if self._events is not None else b""
        if self._reader is not None:
            rest = self._reader.finish(rest)
        return without_half(rest) if rest and self._must_end else rest

    def _whole_events(self, events: WholeEvents, chunk: bytes) -> bytes:
        """The events that a chunk completes. From one on that is too long to be held back, the stream passes
        as it comes, if nobody reads its events."""
        if self._stages or events.may_hold(chunk):
            return events.joined(chunk)
        self._events = None
        return events.take_rest() + chunk

    def _begun(self, chunk: bytes, kept: bytes) -> bytes:
        """The bytes for the client of the stream's beginning, of which `chunk` is the next part, and `kept`
        the client's part of that; b"" while it may be no answer. Raises EngineRejected: it is an error."""
        opening = self._opening
        if opening is None:
            self._note_begin(chunk)
            return kept
        says = opening.read(chunk)
        if says is Says.ERROR and (error := read_streamed_error(self.tail)) is not None:
            raise error.rejection()
        kept = self._held + kept
        if says is Says.NOTHING and opening.waits:
            self._held = kept
            return b""
        self._held = b""
        if self._begins is not None:
            self._begins()
            self._begins = None
        if says is Says.SOMETHING and self._speaks is not None:
            self._speaks()
            self._speaks = None
        return kept

    def _note_begin(self, chunk: bytes) -> None:
        """`chunk`: the next bytes; b"" at the end."""
        begins, speaks = self._begins, self._speaks
        if begins is not None:
            self._begins = None
            begins()
        if speaks is not None and (not chunk or self._speech.begins_in(chunk)):
            self._speaks = None
            speaks()
