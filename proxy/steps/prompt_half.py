"""The half of a request that another engine serves at the same time, where neither can answer alone.

    prefill engine   the request ─┐ where      the prompt, and one token
    decode engine    the request ─┘ to meet    → the answer

It runs as a task beside the other half, within the attempt, and takes a lease of its own. If it fails before
the answer begins, the attempt fails, and this half's engine is to blame. However the attempt ends, its
connection is closed by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self, TypeVar

import structlog
from msgspec.structs import replace

from engine_adapter import (
    EngineError,
    EngineLost,
    Hold,
    HttpTransport,
    JsonBody,
    log_text,
    read_answer_usage,
)
from proxy.core.life import Cause
from proxy.fleet.engine import Engine
from proxy.fleet.ingest import Ingest
from proxy.fleet.lease import Lease
from proxy.steps.checks import check_leg
from proxy.steps.legs import end_now, read_leg, send_leg
from proxy.steps.preparation import Ready

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

_LOST = "the engine that was to compute the prompt was lost"
# Its engine answers first. If the answer of the other one is over, kvpin waits so many seconds more for it.
LAST_S = 2.0


@dataclass(slots=True, eq=False)
class PromptHalf:
    """The prompt's half of one attempt.

    Attributes:
        engine: the engine that computes the prompt.
        lease: of that engine; it ends with the engine's answer, or with the context that this half is.
        meeting: the fields that both engines get.
        leg: holds the engine for a request, and lets this half `compute` it there.
        is_refused: whether the client gets an error as the other engine's answer.
        error: why it failed before the answer began; None if it did not.
        cached_tokens: prompt tokens that its engine reused; None before it has told.
        answered: when its engine had answered, in monotonic seconds; None before.
        took_s: how long that took.
    """

    transport: HttpTransport
    ready: Ready
    engine: Engine
    lease: Lease
    meeting: Mapping[str, object]
    leg: Callable[[PromptHalf, Ready], Awaitable[None]]
    is_refused: Callable[[], bool]
    ingest: Ingest | None
    error: BaseException | None = None
    cached_tokens: int | None = None
    answered: float | None = None
    took_s: float | None = None
    is_fetched: bool = False  # the KV comes with the request
    is_checked: bool = False
    _has_begun: bool = False
    _leased: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self._leased.enter_context(self.lease)
        return self

    def __exit__(self, *_: object) -> None:
        self._leased.close()

    @property
    def source(self) -> str:
        """Its engine's name."""
        return self.engine.id

    @property
    def may_be_evicted(self) -> bool:
        """True if requests in flight may evict what its engine is to reuse."""
        return self.lease.placed.may_be_evicted

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
        """Runs this half beside the `answer` of the other engine, and returns that.

        Raises:
            EngineError: either of them failed.
        """
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
                "a prompt was not computed for another engine", engine=self.source, error=log_text(error)
            )
        if not (self._has_begun or self.is_refused()):
            self.error = error
            end_now(limit)

    async def _run(self) -> None:
        """Raises EngineError: it failed."""
        lost = asyncio.timeout(None)
        self.lease.on_lost = lambda: end_now(lost)
        with self._leased:
            try:
                async with lost:
                    if self.lease.is_lost:
                        raise EngineLost(_LOST)
                    if self.lease.has_company():
                        await self.lease.gather()
                    await self.leg(self, _in_one_piece(self.ready))
            except TimeoutError:
                if not self.lease.is_lost:
                    raise
                raise EngineLost(_LOST) from None

    async def compute(self, ready: Ready, hold: Hold) -> None:
        """Lets the engine compute the prompt, and notes what it reports. Raises EngineError."""
        self.lease.refine(hold)
        assert isinstance(hold.body, JsonBody)  # noqa: S101 - only such requests have two halves
        body = hold.body.replace(**self.meeting)
        response = await send_leg(self.transport, self.engine, ready, ready.call.path, body)
        content = await read_leg(response)
        cached = read_answer_usage(content).cached_tokens
        if cached is None and hold.answer is not None:
            hold.answer.feed(content)
            hold.answer.finish()
            cached = hold.answer.cached_tokens()
        self.answered, self.cached_tokens = monotonic(), cached
        self.took_s = self.answered - self.lease.started
        self.lease.first_byte(streamed=True)
        self.lease.succeeded = True
        check_leg(self.ingest, self.engine, ready, self.lease, cached)


def _in_one_piece(ready: Ready) -> Ready:
    """The request with an answer that is no stream: only its end is read."""
    body = ready.call.body
    assert isinstance(body, JsonBody)  # noqa: S101 - only such requests have two halves
    whole = body.replace(stream=None, stream_options=None)
    return replace(ready, call=replace(ready.call, body=whole))
