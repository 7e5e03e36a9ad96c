"""The leg of a request on another engine than the one that answers: that engine computes the prompt.

FirstLeg     before the answer. Its engine keeps the prompt's KV for the one that answers. If it fails, is
             late or its engine is lost, the attempt goes on without it: the other engine computes the prompt.
             Where the request's own answer does not show when the KV was fetched, the other engine fetches
             it before.
PromptHalf   at the same time, where neither engine can answer alone:

                 prefill engine   the request ─┐ where      the prompt, and one token
                 decode engine    the request ─┘ to meet    → the answer

             It is a task beside the answer. If it fails before the answer begins, the attempt fails, and this
             half's engine is to blame. However the attempt ends, its connection is closed by then.

Either runs within the attempt on the engine that answers, which is leased by then. It has its own lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any, Self, TypeVar

import structlog
from msgspec.structs import replace

from engine_adapter import (
    EngineError,
    EngineLate,
    EngineLost,
    EngineRejected,
    Handover,
    Hold,
    HttpTransport,
    IncomingResponse,
    JsonBody,
    Transfer,
    log_text,
    read_answer_usage,
    read_error,
    route_of,
    tell_cached,
)
from proxy.core.life import Blame, Cause
from proxy.errors import cause_of
from proxy.fleet.engine import Engine
from proxy.fleet.ingest import Ingest
from proxy.fleet.lease import Lease
from proxy.request.engine_errors import REFUSALS
from proxy.steps.checks import check_prediction
from proxy.steps.preparation import Ready

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

# How often kvpin looks whether an answer has begun, in seconds.
TICK_S = 1.0
# A prompt half's engine answers first. If the answer of the other one is over, kvpin waits so many seconds
# more for it.
LAST_S = 2.0


@dataclass(slots=True, eq=False, kw_only=True)
class OtherLeg:
    """The part of a request that another engine than the one that answers does."""

    transport: HttpTransport
    ready: Ready
    engine: Engine  # that other engine
    lease: Lease  # of it
    ingest: Ingest | None
    patience_s: float | None = None  # seconds after which this leg is given up; None for never
    # Prompt tokens that the engine reused; None before it has told, and if it does not.
    cached_tokens: int | None = None
    is_fetched: bool = False  # the engine that answers had the KV before it got the request
    # This leg's engine took all fields of the request: one that refuses them refuses the KV.
    is_checked: bool = False

    def moves_since(self, sent: float) -> float:
        """When the KV began to move, for a request that was `sent` to the engine that answers then."""
        return sent

    def begins(self) -> None:
        """The answer begins. Raises EngineLate: too late."""
        raise NotImplementedError

    async def in_time(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """The answer, as long as it may be used. Raises EngineError."""
        raise NotImplementedError

    async def _computed(self, compute: Callable[[], Awaitable[_T]]) -> _T:
        """What `compute` returns, once no other request computes the prompt's beginning. Then the prompt is
        computed. Raises EngineError."""
        lease, limit = self.lease, asyncio.timeout(self.patience_s)
        lease.on_lost = lambda: _end_now(limit)
        try:
            async with limit:
                if lease.is_lost:
                    raise EngineLost(_LOST)
                if lease.has_company():
                    await lease.gather()
                computed = await compute()
        except TimeoutError:
            if lease.is_lost:
                raise EngineLost(_LOST) from None
            if self.patience_s is None:
                raise
            raise EngineLate(f"the engine did not compute a prompt within {self.patience_s:.1f} s") from None
        lease.first_byte(streamed=True)  # its one token is seen
        return computed

    def _succeeded(self, cached: int | None) -> None:
        """The engine holds the prompt, of which it reports to have reused `cached` tokens."""
        self.lease.succeeded, self.cached_tokens = True, cached
        unchecked = check_prediction(self.ingest, self.engine, self.ready, self.lease, None, cached)
        if unchecked is not None:
            self.engine.audit.skip(unchecked)


_LOST = "the engine was lost while it computed a prompt"


@dataclass(slots=True, eq=False, kw_only=True)
class FirstLeg(OtherLeg):
    """The leg before the answer. `path` and `body`: of the leg that fetches the KV, before it is told where
    that lies."""

    transfer: Transfer
    path: str
    body: JsonBody
    is_apart: bool  # that is not the request itself
    handover: Handover | None = None  # where the KV lies
    until: float = 0.0  # when its engine may drop the KV, in monotonic seconds
    _limit: asyncio.Timeout | None = None

    async def run(self) -> bool:
        """Computes the prompt on its engine. False if that failed: the engine is blamed for it."""
        try:
            with self.lease:
                asked = self.transfer.first_leg(self.body)
                content, silent = await self._computed(lambda: self._ask(self.engine, asked))
                self.handover = self.transfer.handover(content, asked)
                self._succeeded(self.handover.cached_tokens if self.handover is not None else None)
        except EngineError as error:
            self._blame(error)
            return False
        self.until = silent + self.transfer.usable_s
        if self.handover is None:
            self.engine.keeps_no_kv = True
            log.warning("an engine keeps no KV for others: see its findings", engine=self.engine.id)
        return self.handover is not None and not self.is_over  # kvpin may have been paused

    async def hand_over(self, target: Engine, hold: Hold) -> bool:
        """Tells the request where the KV lies, or lets its engine fetch that before. False if the engine
        refused to, or there is none: it computes the prompt then. Raises EngineUnavailable if that engine
        failed, or did not fetch the KV in time."""
        handover = self.handover
        if handover is None or not handover.fields:
            return False
        asked = self.transfer.second_leg(self.body, handover)
        if not self.is_apart:
            hold.body = asked
        elif not await self._fetch(target, asked):
            return False
        tell_cached(hold, self.ready.call.route, handover.cached_tokens or 0)
        return True

    async def _fetch(self, target: Engine, asked: JsonBody) -> bool:
        async def fetched() -> None:
            await self._ask(target, asked)
            self.begins()

        try:
            await self.in_time(fetched())
        except EngineRejected as error:
            log.warning("an engine did not fetch the KV of a prompt", engine=target.id, error=log_text(error))
            return False
        self.is_fetched = True
        return True

    @property
    def is_over(self) -> bool:
        """True if the KV may have been dropped."""
        return monotonic() >= self.until

    async def in_time(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """The answer of the other engine, which `begins` while the KV is surely there.

        Raises:
            EngineLate: it did not begin in time: it may be from other KV.
            EngineRejected: it refused the request.
        """
        if self.is_over:
            answer.close()
            raise self._late()
        self._limit = asyncio.timeout(self.until - monotonic())
        try:
            async with self._limit:
                return await answer
        except TimeoutError:
            if not self._limit.expired():
                raise
            raise self._late() from None
        except EngineRejected as error:
            if not self.is_checked or error.status in REFUSALS:
                raise
            message = f"it refused the KV that engine {self.engine.id!r} keeps for it: {error}"
            raise EngineRejected(message, status=HTTPStatus.BAD_GATEWAY) from error

    def begins(self) -> None:
        """The answer begins. Raises EngineLate: too late; kvpin may have been paused meanwhile."""
        if self.is_over:
            raise self._late()
        if self._limit is not None:
            self._limit.reschedule(None)

    def _late(self) -> EngineLate:
        return EngineLate(f"no answer while engine {self.engine.id!r} surely kept the prompt's KV for it")

    async def _ask(self, engine: Engine, body: JsonBody) -> tuple[bytes, float]:
        """An engine's answer, and a time at which it had surely not begun. Raises EngineRejected for an
        error."""
        # For its adapter, a leg is a request like others. Its body is as its transfer made it.
        async with engine.adapter.hold(route_of(self.path), body, None):
            with _Silence() as silence:
                response = await _send(self.transport, engine, self.ready, self.path, body)
            return await _read(response), silence.surely

    def _blame(self, error: EngineError) -> None:
        """Notes what the failure says about the engine. The other engine tells the client what is wrong with
        its request."""
        engine, cause = self.engine, cause_of(error)
        log.warning("a prompt was not computed for another engine", engine=engine.id, error=log_text(error))
        if isinstance(error, EngineRejected):
            if error.status in REFUSALS:
                engine.refused(error)
        elif cause is Cause.ENGINE_LATE:
            engine.refused(error)
            engine.check_now.set()
        elif cause.blame is Blame.SUSPECT:
            engine.suspect(error)


@dataclass(slots=True, eq=False, kw_only=True)
class PromptHalf(OtherLeg):
    """The half beside the answer. Its lease ends with its engine's answer, or with the context that it is."""

    meeting: Mapping[str, object]  # the fields that both engines get
    # Holds the engine for a request, and lets this half `compute` it there.
    leg: Callable[[PromptHalf, Ready], Awaitable[None]]
    is_refused: Callable[[], bool]  # whether the client gets an error as the other engine's answer
    error: BaseException | None = None  # why it failed before the answer began; None if it did not
    answered: float | None = None  # when its engine had answered, in monotonic seconds; None before
    took_s: float | None = None  # how long that took
    _has_begun: bool = False
    _leased: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self._leased.enter_context(self.lease)
        return self

    def __exit__(self, *_: object) -> None:
        self._leased.close()

    def moves_since(self, sent: float) -> float:
        """When the KV began to move: the engine sends it once it has computed the prompt."""
        return sent if self.answered is None else max(self.answered, sent)

    def is_to_blame(self, cause: Cause) -> bool:
        """True if an attempt that failed for that cause failed here: the other engine waits for this one."""
        return self.error is not None or (cause is Cause.ENGINE_LATE and self.answered is None)

    def begins(self) -> None:
        """The other engine's answer begins: it has the KV."""
        self._has_begun = True

    async def in_time(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """Runs this half beside the `answer` of the other engine, and returns that. Raises EngineError if
        either of them failed."""
        limit = asyncio.timeout(None)
        task = asyncio.get_running_loop().create_task(self._run(), name="prompt half")
        task.add_done_callback(lambda done: self._ended(done, limit))
        try:
            async with limit:
                answered = await answer
            if self._has_begun:
                await asyncio.wait([task], timeout=LAST_S)
        except TimeoutError:
            if self.error is None or not limit.expired():
                raise
            raise self.error from None
        finally:
            task.cancel()
            await asyncio.wait([task])
        return answered

    def _ended(self, done: asyncio.Task[None], limit: asyncio.Timeout) -> None:
        """Ends the other half if this one failed, unless its answer has come."""
        error = None if done.cancelled() else done.exception()
        if error is None:
            return
        if isinstance(error, EngineError):  # any other is a bug
            log.warning(
                "a prompt was not computed for another engine", engine=self.engine.id, error=log_text(error)
            )
        if not (self._has_begun or self.is_refused()):
            self.error = error
            _end_now(limit)

    async def _run(self) -> None:
        """Raises EngineError: it failed."""
        call, body = self.ready.call, self.ready.call.body
        assert isinstance(body, JsonBody)  # noqa: S101 - only such requests have two halves
        whole = replace(call, body=body.replace(stream=None, stream_options=None))  # only its end is read
        with self._leased:
            await self._computed(lambda: self.leg(self, replace(self.ready, call=whole)))
            self._succeeded(self.cached_tokens)

    async def compute(self, ready: Ready, hold: Hold) -> None:
        """Lets the engine compute the prompt, and notes what it reports. Raises EngineError."""
        self.lease.refine(hold)
        assert isinstance(hold.body, JsonBody)  # noqa: S101 - only such requests have two halves
        body = hold.body.replace(**self.meeting)
        content = await _read(await _send(self.transport, self.engine, ready, ready.call.path, body))
        cached = read_answer_usage(content).cached_tokens
        if cached is None and hold.answer is not None:
            hold.answer.feed(content)
            hold.answer.finish()
            cached = hold.answer.cached_tokens()
        self.answered, self.cached_tokens = monotonic(), cached
        self.took_s = self.answered - self.lease.started


async def _send(
    transport: HttpTransport, engine: Engine, ready: Ready, path: str, body: JsonBody
) -> IncomingResponse:
    """Sends a leg of a request to an engine: with that engine's name of the model and salt, and with the id
    that the request has on the other one. Raises EngineUnavailable."""
    if ready.rendering is not None and engine.prompts is not ready.rendering:
        raise EngineLost("the engine makes other tokens of the prompt now")
    call, own = ready.call, ready.body_for(engine)
    if isinstance(own, JsonBody):
        body = body.replace(model=own.get("model"), cache_salt=own.get("cache_salt"))
    sent = engine.adapter.prepare("POST", path, call.headers, body)
    named = [pair for pair in sent.headers if pair[0] != b"x-request-id"]
    sent = replace(sent, headers=[*named, (b"x-request-id", call.request_id.encode())])
    return await transport.send(sent, partial(engine.confirm, engine.connections))


async def _read(response: IncomingResponse) -> bytes:
    """The whole answer. Raises EngineUnavailable; EngineRejected for an error."""
    async with response:
        content = await response.read()
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise EngineRejected(read_error(content).message, status=response.status)
        return content


def _end_now(limit: asyncio.Timeout) -> None:
    """Ends what the limit is for, unless it has ended."""
    with suppress(RuntimeError):  # it was left, e.g. because both halves failed in one turn
        limit.reschedule(asyncio.get_running_loop().time())


class _Silence:
    """The time in which an answer has not begun, as a context.

    kvpin may be paused, and then find an answer that came long before. So when it came is not known. But what
    had come by a tick is read before the next one: if that finds silence, too, nothing had come by the first.
    """

    def __init__(self) -> None:
        # A time at which the answer had not begun, in monotonic seconds; at most two ticks ago while kvpin is
        # not paused.
        self.surely = self._last = monotonic()

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self.surely, self._last = self._last, monotonic()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
