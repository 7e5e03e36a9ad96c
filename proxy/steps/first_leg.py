"""The first leg of a request that two engines serve: one computes the prompt, and keeps its KV for the other.

It runs within the attempt on the other engine, which is leased by then, and takes a lease of its own. If it
fails, is late or its engine is lost, the attempt goes on without it: the other engine computes the prompt.

Where the request's own answer does not show when the KV was fetched, the other engine fetches it before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, Self, TypeVar

import structlog

from engine_adapter import (
    EngineError,
    EngineLate,
    EngineLost,
    EngineRejected,
    Handover,
    Hold,
    HttpTransport,
    JsonBody,
    Role,
    Transfer,
    log_text,
    route_of,
    tell_cached,
)
from proxy.core.life import Blame, Cause
from proxy.core.placement.decision import Pair
from proxy.errors import cause_of
from proxy.fleet.engine import Engine
from proxy.fleet.ingest import Ingest
from proxy.request.engine_errors import REFUSALS
from proxy.steps.checks import check_leg
from proxy.steps.legs import end_now, read_leg, send_leg
from proxy.steps.preparation import Ready

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

# How often kvpin looks whether an answer has begun, in seconds.
TICK_S = 1.0


@dataclass(slots=True, eq=False)
class Prefilled:
    """A prompt that was computed, whose KV waits for the second leg.

    Attributes:
        source: the engine that computed it.
        until: when that engine may drop the KV, in monotonic seconds.
        is_checked: its engine took all fields of the request: another one that refuses it refuses the KV.
        is_fetched: the other engine has it.
        may_be_evicted: requests in flight could evict what that engine was to reuse.
    """

    source: str
    handover: Handover
    until: float
    is_checked: bool
    is_fetched: bool = False
    may_be_evicted: bool = False
    _limit: asyncio.Timeout | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine reused; None if it did not tell."""
        return self.handover.cached_tokens

    def moves_since(self, sent: float) -> float:
        """When the KV began to move, for a request that was `sent` to the other engine then."""
        return sent

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
            message = f"it refused the KV that engine {self.source!r} keeps for it: {error}"
            raise EngineRejected(message, status=HTTPStatus.BAD_GATEWAY) from error

    def begins(self) -> None:
        """The answer begins. Raises EngineLate: too late; kvpin may have been paused meanwhile."""
        if self.is_over:
            raise self._late()
        if self._limit is not None:
            self._limit.reschedule(None)

    def _late(self) -> EngineLate:
        return EngineLate(f"no answer while engine {self.source!r} surely kept the prompt's KV for it")


@dataclass(slots=True, eq=False)
class FirstLeg:
    """The first leg of one attempt.

    Attributes:
        path, body: of the leg that fetches the KV, before it is told where that lies.
        is_apart: that is not the request itself.
    """

    ready: Ready
    pair: Pair
    engine: Engine
    transfer: Transfer
    path: str
    body: JsonBody
    ingest: Ingest | None
    is_apart: bool

    @classmethod
    def of(
        cls,
        ready: Ready,
        pair: Pair,
        engine: Engine,
        transfer: Transfer,
        body: JsonBody,
        ingest: Ingest | None,
    ) -> FirstLeg:
        """The first leg of a request that another engine would get with this `body`."""
        call, prompt = ready.call, ready.prompt
        apart = transfer.fetch(call.route, body, prompt.token_ids) if prompt is not None else None
        path, body = apart or (call.path, body)
        return cls(ready, pair, engine, transfer, path, body, ingest, is_apart=apart is not None)

    async def run(self, transport: HttpTransport) -> Prefilled | None:
        """Computes the prompt on its engine. None if that failed: the engine is blamed for it."""
        try:
            prefilled = await self._run(transport)
        except EngineError as error:
            self._blame(error)
            return None
        return None if prefilled is None or prefilled.is_over else prefilled  # kvpin may have been paused

    async def hand_over(
        self, transport: HttpTransport, target: Engine, hold: Hold, prefilled: Prefilled
    ) -> bool:
        """Tells the request where the KV lies, or lets its engine fetch that before. False if the engine
        refused to, or there is none: it computes the prompt then.

        Raises:
            EngineUnavailable: that engine failed, or did not fetch the KV in time.
        """
        if not prefilled.handover.fields:
            return False
        if not self.is_apart:
            hold.body = self.transfer.second_leg(self.body, prefilled.handover)
        elif not await self._fetch(transport, target, prefilled):
            return False
        tell_cached(hold, self.ready.call.route, prefilled.handover.cached_tokens or 0)
        return True

    async def _fetch(self, transport: HttpTransport, target: Engine, prefilled: Prefilled) -> bool:
        asked = self.transfer.second_leg(self.body, prefilled.handover)

        async def fetched() -> None:
            await self._ask(transport, target, asked)
            prefilled.begins()

        try:
            await prefilled.in_time(fetched())
        except EngineRejected as error:
            log.warning("an engine did not fetch the KV of a prompt", engine=target.id, error=log_text(error))
            return False
        prefilled.is_fetched = True
        return True

    async def _run(self, transport: HttpTransport) -> Prefilled | None:
        """Raises EngineUnavailable, EngineRejected: it failed."""
        ready, patience_s = self.ready, self.pair.patience_s
        limit = asyncio.timeout(patience_s)
        with ready.pool.lease(
            self.pair.prefill,
            ready.chain,
            streams=True,  # its one token is seen
            part=Role.PREFILL,
            on_lost=lambda: end_now(limit),
        ) as lease:
            try:
                async with limit:
                    if lease.has_company():
                        await lease.gather()
                    asked = self.transfer.first_leg(self.body)
                    content, silent = await self._ask(transport, self.engine, asked)
            except TimeoutError:
                if lease.is_lost:
                    raise EngineLost("the engine was lost while it computed a prompt") from None
                raise EngineLate(f"the engine did not compute a prompt within {patience_s:.1f} s") from None
            lease.first_byte(streamed=True)
            handover = self.transfer.handover(content, asked)
            lease.succeeded = True
            reported = handover.cached_tokens if handover is not None else None
            check_leg(self.ingest, self.engine, ready, lease, reported)
        if handover is None:
            self.engine.keeps_no_kv = True
            log.warning("an engine keeps no KV for others: see its findings", engine=self.engine.id)
            return None
        until, may_be_evicted = silent + self.transfer.usable_s, lease.placed.may_be_evicted
        return Prefilled(
            self.engine.id, handover, until, self.transfer.checks_all, may_be_evicted=may_be_evicted
        )

    async def _ask(self, transport: HttpTransport, engine: Engine, body: JsonBody) -> tuple[bytes, float]:
        """An engine's answer, and a time at which it had surely not begun. Raises EngineRejected for an
        error."""
        # For its adapter, a leg is a request like others. Its body is as its transfer made it.
        async with engine.adapter.hold(route_of(self.path), body, None):
            with _Silence() as silence:
                response = await send_leg(transport, engine, self.ready, self.path, body)
            return await read_leg(response), silence.surely

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


class _Silence:
    """The time in which an answer has not begun, as a context.

    kvpin may be paused, and then find an answer that came long before. So when it came is not known. But what
    had come by a tick is read before the next one: if that finds silence, too, nothing had come by the first.

    Attributes:
        surely: a time at which the answer had not begun, in monotonic seconds; at most two ticks ago while
            kvpin is not paused.
    """

    def __init__(self) -> None:
        self.surely = self._last = monotonic()

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self.surely, self._last = self._last, monotonic()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
