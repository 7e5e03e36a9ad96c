"""Serves the parts of a split request side by side.

The first part that fails decides. Before anything was sent, its error is the answer. Later, its error is an
event of the stream, which then breaks off. The other parts are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from engine_adapter import NATIVE_ROUTES, Capability, HeaderPairs, JsonBody
from engine_adapter.off_loop import VALUES_PER_MS, off_loop
from proxy.api.fan_out.join import Joined, JoinedList, is_error
from proxy.api.fan_out.split import (
    CHAT,
    COMPLETIONS,
    AnswerPlace,
    OnePrompt,
    Several,
    SingleRequest,
    prompts_of,
    several_of,
)
from proxy.core.life import Cause
from proxy.errors import ANSWERED, EngineFailed, NoEngine, NotFound, Overloaded
from proxy.flow import Flow
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.stages import Event, Stage
from proxy.request.translate.wording import error_body

# Parts of one request that are served at the same time, and the most that their bodies take. Others wait.
AT_ONCE = 128
BYTES_AT_ONCE = 256 << 20
# Answers that are joined in about 1 ms.
_JOINED_PER_MS = 128
_ROUTES = frozenset({CHAT, COMPLETIONS})
_OK = 200
_BROKEN_OFF = "an engine's answer broke off"


def serve(flow: Flow, call: Call, reply: Reply, admitted: Admission) -> Coroutine[Any, Any, object]:
    """Answers a request, split if its pool needs that. The caller closes `admitted`. Raises ProxyError,
    EngineError: the request failed before the answer began."""
    body, route = call.body, call.route
    if not isinstance(body, JsonBody) or body.is_plain:  # of one choice and one prompt
        return flow.serve(call, reply, admitted)
    native = NATIVE_ROUTES.get(call.native or "")
    listed = route not in _ROUTES and native is not None and native.lists
    if not (listed or route in _ROUTES):
        return flow.serve(call, reply, admitted)

    def work(prompts: list[OnePrompt] | None) -> Coroutine[Any, Any, object]:
        several = None
        with suppress(NoEngine, NotFound):  # the flow finds that, too, and keeps a record
            several = several_of(
                body,
                lambda: flow.fleet.pool(call.model),
                prompts,
                reuse=flow.attempts.ingest is not None,
                listed=listed,
                takes_best=route == COMPLETIONS,
            )
        if several is None:
            return flow.serve(call, reply, admitted)
        return _serve(flow, call, several, reply, admitted)

    async def work_off_loop() -> None:
        ms = body.n_values / VALUES_PER_MS
        await work(await off_loop(lambda: prompts_of(body, listed=listed), ms=ms))

    if route == CHAT or (native is not None and native.prompt is None):  # of one prompt
        return work(None)
    if len(body.raw) > VALUES_PER_MS:  # it may have very many prompts
        return work_off_loop()
    return work(prompts_of(body, listed=listed))


async def _serve(flow: Flow, call: Call, several: Several, reply: Reply, admitted: Admission) -> None:
    answer = _Answer(reply, several, streams=call.streams)
    size = several.part_bytes
    at_once = max(min(AT_ONCE, BYTES_AT_ONCE // size), 1)

    def parts() -> Iterator[Coroutine[Any, Any, None]]:
        for number, part in enumerate(several.parts()):
            yield _serve_part(flow, call, number, part, answer, admitted.part(len(part.body.raw)))
        several.forget()
        admitted.free_body()

    reply.recorded = True
    try:
        if several.shares_prompt:
            answer.joined.cached = await compute_once(flow, call, next(several.parts()).body, admitted)
        await _run(parts(), lambda running: running < at_once and admitted.has_room(size))
    except _Failed as failed:
        if failed.status is None or reply.started:
            await answer.fail(failed.content, failed.headers)
        else:
            await reply.start(failed.status, failed.headers)
            await reply.finish(failed.content)
    except ANSWERED as error:
        if not reply.started:
            raise
        await answer.fail(error_body(str(error), kind="server_error"))
    else:
        await answer.finish()


async def _run(works: Iterator[Coroutine[Any, Any, None]], may_begin: Callable[[int], bool]) -> None:
    """Does all works side by side. If one fails, or the caller is cancelled, cancels all that run and waits
    for their end. Raises the first error.

    `may_begin` is asked before each work, with how many run now. One always may."""
    running: set[asyncio.Task[None]] = set()
    why: Cause = Cause.PART_FAILED
    try:
        for work in works:
            running.add(asyncio.create_task(work))
            await asyncio.sleep(0)  # other requests have their turn between two parts
            while running and not may_begin(len(running)):
                running = await _some_end(running)
        while running:
            running = await _some_end(running)
    except asyncio.CancelledError as cancelled:
        why = cancelled.args[0] if cancelled.args else Cause.CLIENT_LEFT
        raise
    finally:
        for task in running:
            task.cancel(why)
        await asyncio.gather(*running, return_exceptions=True)


async def _some_end(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits until a task ends. Returns the tasks that still run, and the error of one that failed."""
    ended, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    errors = [task.exception() for task in ended]
    running -= ended
    ended.clear()
    failed = list(filter(None, errors))
    errors.clear()
    if failed:
        # No name for it: a traceback holds this frame, and what failed would stay until garbage collection.
        raise failed.pop()
    return left


async def _serve_part(
    flow: Flow, call: Call, number: int, part: SingleRequest, answer: _Answer, admitted: Admission
) -> None:
    """Serves a part as a request of its own. Its record has the whole request's id, and a number."""
    client = _PartClient(part.place, answer)
    own = replace(call, request_id=f"{call.request_id}-{number}", client_id=call.answer_id, body=part.body)
    reply = Reply(client, reads_ahead=False)
    reply.stages.append(client)
    with admitted:
        await flow.serve(own, reply, admitted)
    client.check()


class _Failed(Exception):
    """An engine failed a part.

    Attributes:
        content: its error, as JSON.
        headers: those of its answer.
        status: that of its answer; None if that began as a stream.
    """

    def __init__(self, content: bytes, headers: HeaderPairs, status: int | None = None) -> None:
        super().__init__()
        self.content, self.headers, self.status = content, headers, status


class _Answer:
    """The one answer that all parts give.

    Attributes:
        streams: the client asked for a stream.
        joined: joins the answers of the parts.
        whole: the parts' answers that are no streams, by the index of their first choice; as bytes: with
            very many, a walk of the garbage collector through objects would hold up all other requests.
        headers: those of the first part's answer.
    """

    def __init__(self, reply: Reply, several: Several, *, streams: bool) -> None:
        self.streams = streams
        self.joined = (JoinedList if several.listed else Joined)(several)
        self.whole: dict[int, tuple[AnswerPlace, bytes]] = {}
        self.headers: HeaderPairs = []
        self._reply = reply
        self._turn = asyncio.Lock()

    async def send(self, events: bytes, headers: HeaderPairs) -> None:
        """Sends events of a part, whose answer has these headers. A slow client slows all parts down."""
        async with self._turn:
            if not self._reply.started:
                await self._reply.start(_OK, headers, is_events=True)
            await self._reply.write(events)

    async def fail(self, error: bytes, headers: HeaderPairs = ()) -> None:  # type: ignore[assignment]
        """Breaks the stream off. It does not call `finish`: clients would take a clean end for a complete
        answer."""
        await self.send(b"data: " + error + b"\n\n", headers)

    async def finish(self) -> None:
        """Sends the end of a stream, or the joined answer with the headers of the first part."""
        if self.streams:
            await self._reply.finish(self.joined.end())
            return
        pairs = [self.whole[index] for index in sorted(self.whole)]
        content = await off_loop(lambda: self.joined.whole(pairs), ms=len(pairs) / _JOINED_PER_MS)
        await self._reply.start(_OK, self.headers)
        await self._reply.finish(content)


class _PartClient(Stage):
    """The client of one part, and the last stage that its answer passes: of a stream, it makes the client's
    events, and holds them until it is drained."""

    changes = True

    def __init__(self, place: AnswerPlace, answer: _Answer) -> None:
        self._place, self._answer = place, answer
        self._headers = HeaderPairs()
        self._content: list[bytes] = []  # of an answer that is no stream
        self._to_send = b""
        self._error: bytes | None = None
        self._is_complete = False

    @property
    def is_full(self) -> bool:
        return bool(self._to_send)

    async def drain(self) -> None:
        events, self._to_send = self._to_send, b""
        await self._answer.send(events, self._headers)

    @override
    def event(self, event: Event) -> Iterable[Event]:
        joined = self._answer.joined
        if not self._is_merged:
            return (event,)
        if event.is_whole:  # no stream: it counts as one that broke off
            return (Event(b"", is_whole=True),)
        if not event.data or self._error is not None:
            return ()
        self._is_complete = self._is_complete or joined.ends(event)
        if is_error(event):
            self._error = event.data
            return ()
        return (Event(joined.event(self._place, event)),)

    def start(self, status: int, headers: HeaderPairs) -> None:
        self.status, self._headers = status, headers

    def write(self, chunk: bytes) -> None:
        if self._is_merged:
            self._to_send += chunk
        else:
            self._content.append(chunk)

    def finish(self, chunk: bytes) -> None:
        self.write(chunk)
        self._is_complete = self._is_complete or not self._answer.streams

    @property
    def _is_merged(self) -> bool:
        """True if its events are events of the client's."""
        return self._answer.streams and self.status == _OK

    def check(self) -> None:
        """The part has ended: notes its answer. Raises _Failed if that is an error or not complete."""
        content = b"".join(self._content)
        if self.status != _OK:
            raise _Failed(content, self._headers, self.status)
        if not (self._answer.streams or self._is_complete):
            raise EngineFailed(_BROKEN_OFF)
        if self._error is not None or not self._is_complete:
            error = self._error or error_body(_BROKEN_OFF, kind="server_error")
            raise _Failed(error, self._headers)
        if not self._answer.streams:
            self._answer.whole[self._place.index] = self._place, content
            if not self._place.index:
                self._answer.headers = self._headers


# Fewer tokens are computed with each choice. One request more would cost about as much.
LEAST_TOKENS = 256
_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "stream": None, "stream_options": None}


async def compute_once(flow: Flow, call: Call, body: JsonBody, admitted: Admission) -> int | None:
    """Computes the prompt of a choice on the engine it would go to, if that has to compute much of it and can
    restore it afterwards. It waits for its turn like any request, and its tenant pays for its tokens here and
    not again with the choices.

    Returns the tokens that were cached before; None if nothing was computed, or if that failed. The choices
    then find out why. Raises Overloaded: all engines are too busy."""
    limits = _ONE_TOKEN if call.native is None else {**_ONE_TOKEN, "n_predict": 1}
    own = replace(
        call, request_id=f"{call.request_id}-prompt", client_id=call.answer_id, body=body.replace(**limits)
    )
    try:
        if not await _is_worth_it(flow, own):
            return None
        with admitted.part(len(body.raw)) as part:
            record = await flow.serve(own, Reply(Nobody()), part)
    except Overloaded:
        raise
    except ANSWERED:
        return None
    admitted.prompt_is_paid = record.error is None
    return record.reported_tokens


async def _is_worth_it(flow: Flow, call: Call) -> bool:
    try:
        async with asyncio.timeout(flow.rules.placed_s):
            ready = await flow.preparation.prepare(call)
    except TimeoutError:
        return False
    candidates = flow.candidates(ready)
    if ready.prompt is None or not candidates:
        return False
    placement = ready.pool.place(candidates, ready.chain)
    to_compute = len(ready.prompt.token_ids) - placement.predicted_tokens
    can_restore = ready.pool.engines[placement.engine].can(Capability.RESTORE)
    return to_compute >= LEAST_TOKENS and can_restore
