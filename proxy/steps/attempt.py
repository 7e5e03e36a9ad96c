"""One attempt of a request on one engine.

    lease → gather → hold → (first leg on another engine) → forward → audit → release

Where two engines serve a request together, the other one's half runs beside `forward`.

Running takes an `InTurn`, which only the machine of the request's life makes (`core/life/`). A failure is
raised; the machine decides whether to try another engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any, Protocol, TypeVar

import structlog
from msgspec.structs import replace

from engine_adapter import (
    EngineError,
    EngineRejected,
    Hold,
    HttpTransport,
    IncomingResponse,
    JsonBody,
    ModelFailed,
    Role,
    log_text,
)
from proxy.core.audit import Unchecked
from proxy.core.budget import ByteBudget
from proxy.core.life import (
    Answered,
    Answering,
    Attempt,
    Began,
    Blame,
    Cause,
    Entered,
    Failed,
    InTurn,
    Life,
    Sent,
)
from proxy.core.placement.decision import Pair, Placement
from proxy.core.placement.transfers import TransferResult
from proxy.core.placement.whole_answers import Report
from proxy.fleet.engine import Engine
from proxy.fleet.ingest import Ingest
from proxy.fleet.lease import Lease
from proxy.fleet.lower_tiers import expect_below, look_below
from proxy.fleet.pool import Pool
from proxy.headers import ENGINE_HEADER, NOTE_HEADER, POLICY_HEADER, PREDICTED_HEADER, RETENTION_HEADER
from proxy.prompt import audit_tokens
from proxy.request.alarm import Alarm
from proxy.request.calls import Call, Reply
from proxy.request.error_table import cause_of
from proxy.request.forward import Forwarded, Forwarding
from proxy.request.gate import Admission
from proxy.request.migration import MAX_BODIES, Passage, passage_for
from proxy.request.records import RequestRecord
from proxy.request.retries import ERRORS, PASSED_ON, is_not_here, refusals_of
from proxy.request.tenants import Tenants
from proxy.request.transcript import SentStream
from proxy.steps.first_leg import FirstLeg, Prefilled
from proxy.steps.preparation import Ready
from proxy.steps.prompt_half import PromptHalf

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

_SWITCHED = 101
_ALONE = nullcontext[None]()


class OtherLeg(Protocol):
    """The part of a request that another engine than the one that answers does.

    Attributes:
        is_fetched: the engine that answers had the KV before it got the request.
    """

    is_fetched: bool

    @property
    def source(self) -> str:
        """The other engine."""

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that it reused; None if it did not tell."""

    def moves_since(self, sent: float) -> float:
        """When the KV began to move, if the request was `sent` then."""

    def begins(self) -> None:
        """The answer begins. Raises EngineLate: too late."""

    async def in_time(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """The answer, as long as it may be used. Raises EngineError."""


@dataclass(slots=True, eq=False)
class Serving:
    """A request that is being served: what the steps of its life have made so far.

    Attributes:
        call: the request as it came.
        reply: the way back to its client.
        record: the request's entry in the log.
        life: the machine that decides what comes next.
        alarm: ends a step that takes too long.
        admitted: the permission to serve it: its tenant's quota, and memory for its body.
        ready: the request for the next attempt; `first`: the request of the first attempt.
        placement: the engine it goes to, one of `n_candidates`.
        engine: the engine of the running attempt, or of the last one.
        half: the half of that attempt on another engine, if neither can answer alone.
        passage: reads the running stream for a later engine; None if the stream ends with its engine.
        cached: prompt tokens that the engine of the running attempt reused, as its headers tell.
        told: what the client has of the answer; None before another engine goes on with it.
        kept: bytes of its body that are kept so that another engine can go on.
    """

    call: Call
    reply: Reply
    record: RequestRecord
    life: Life
    alarm: Alarm
    admitted: Admission
    ready: Ready | None = None
    first: Ready | None = None
    placement: Placement | None = None
    n_candidates: int = 0
    engine: Engine | None = None
    half: PromptHalf | None = None
    passage: Passage | None = None
    cached: int | None = None
    told: SentStream | None = None
    kept: int = 0

    def is_ready(self, ready: Ready) -> None:
        """Notes the prepared request. Drops the client's body if engines get a translated one."""
        self.ready = self.first = ready
        self.call = ready.call

    def failure(self, cause: Cause, error: Exception) -> Failed:
        """The running step failed. Notes what the client has, for the engine that goes on with it."""
        has_begun = self.reply.started
        if has_begun and isinstance(self.life.state, Answering) and cause is not Cause.DIVERGED:
            self.record.interrupted += 1
            self.record.died.append(self.record.attempts[-1])
        if has_begun and self.passage is not None:
            self.told = self.passage.told(self.cached)
        self.passage = None
        if self.told is not None and self.first is not None:
            self.ready = self.first.going_on(self.told)
        error.__traceback__ = None  # it holds frames, and they hold the body
        blamed = None
        if self.half is not None and self.half.is_to_blame(cause):
            self.engine, blamed = self.half.engine, self.half.source
        return Failed(cause, error, has_begun, can_go_on=self.told is not None, engine=blamed)


@dataclass(frozen=True, slots=True)
class Attempts:
    """Runs attempts.

    Attributes:
        transport: sends requests to engines.
        ingest: audits predictions; None when reuse is off.
        tenants: whose KV lies under which salt.
        room: memory for what running streams need to go on when their engine dies.
    """

    transport: HttpTransport
    ingest: Ingest | None
    tenants: Tenants
    room: ByteBudget = field(default_factory=lambda: ByteBudget(MAX_BODIES))

    async def run(self, serving: Serving, turn: InTurn) -> Answered:
        """Leases the engine whose turn it is, sends the request there, and audits the prediction.

        Raises:
            EngineUnavailable, EngineRejected: the engine failed.
        """
        ready, placement, record = serving.ready, serving.placement, serving.record
        assert ready is not None and placement is not None  # noqa: S101, PT018 - `turn` says so
        pool, pair, engine = ready.pool, placement.pair, ready.pool.engines[turn.engine]
        serving.engine, serving.passage, serving.cached, serving.half = engine, None, None, None
        record.placement = placement
        unchecked: Unchecked | None = Unchecked.ENDED_EARLY
        try:
            with (
                self._lease(serving, ready, placement) as lease,
                self.prompt_half(serving, ready, pair) if pair is not None else _ALONE as half,
            ):
                serving.half = half
                serving.life.take(monotonic(), Entered())
                engine.salts.note(self.tenants.owner(ready.salt), ready.salt)
                await lease.gather()
                lease.gathered = monotonic()
                async with self._hold(engine, ready) as hold:
                    prefilled: OtherLeg | None = None
                    if pair is None:
                        await look_below(pool, engine, lease, ready.prompt, ready.chain)
                    elif pair.together:
                        prefilled = half
                        _begin_together(lease, hold, half)
                    else:
                        prefilled = await self.first_leg(serving, ready, pair, engine, lease, hold)
                    refined = lease.refine(hold)
                    record.placement = refined if prefilled is None else placement
                    record.note, record.slot = hold.note, hold.slot
                    forwarded = await self.forward(serving, ready, engine, lease, hold, prefilled)
                unchecked = self._close(serving, ready, engine, lease, hold, forwarded, prefilled)
        except EngineError:
            unchecked = Unchecked.FAILED
            raise
        finally:
            if serving.half is not None:
                record.first_leg_s = serving.half.took_s
            if unchecked is not None:
                engine.audit.skip(unchecked)
        return Answered(is_error=forwarded.error is not None)

    @contextmanager
    def _lease(self, serving: Serving, ready: Ready, placement: Placement) -> Iterator[Lease]:
        """The request's lease of the engine that answers."""
        pair = placement.pair
        leasing = ready.pool.lease(
            placement if pair is None else pair.decode,
            ready.chain,
            streams=ready.call.streams,
            known=ready.prompt is not None and ready.prompt.whole,
            session=ready.session,
            part=Role.BOTH if pair is None else Role.DECODE,
            on_lost=serving.alarm.engine_lost,
        )
        with leasing as lease:
            try:
                yield lease
            except asyncio.CancelledError:
                # The engine was lost or too slow, or the client has left.
                lease.failed = serving.alarm.has_interrupted and not serving.reply.complete
                raise

    async def first_leg(
        self, serving: Serving, ready: Ready, pair: Pair, engine: Engine, lease: Lease, hold: Hold
    ) -> Prefilled | None:
        """Lets another engine compute the prompt. None without success: then the leased engine does so."""
        record, name, began = serving.record, pair.prefill.engine, monotonic()
        source = ready.pool.engines.get(name)
        transfer = source.adapter.transfer if source is not None else None  # its lease is the one that counts
        record.prefilled_by, record.transfer, prefilled = name, TransferResult.FAILED, None
        if source is not None and transfer is not None and isinstance(hold.body, JsonBody):
            source.salts.note(self.tenants.owner(ready.salt), ready.salt)
            serving.life.take(monotonic(), Sent())
            leg = FirstLeg.of(ready, pair, source, transfer, hold.body, self.ingest)
            prefilled = await leg.run(self.transport)
            record.first_leg_s = monotonic() - began
            if prefilled is not None:
                record.transfer = TransferResult.LATE  # until the engine has shown that it has the KV
                if not await leg.hand_over(self.transport, engine, hold, prefilled):
                    record.transfer, prefilled = TransferResult.FAILED, None
        record.legs_s = monotonic() - began
        if prefilled is None:
            lease.computes(streams=ready.call.streams)
        else:
            if prefilled.is_fetched:
                _moved(record, prefilled, lease, began + (record.first_leg_s or 0.0))
            lease.begins()
        return prefilled

    def prompt_half(
        self, serving: Serving, ready: Ready, pair: Pair
    ) -> AbstractContextManager[PromptHalf | None]:
        """The half of the request that another engine serves at the same time, with its lease; None for a
        request that has no halves."""
        if not pair.together:
            return _ALONE
        reply, record, source = serving.reply, serving.record, ready.pool.engines[pair.prefill.engine]
        rendezvous = source.adapter.rendezvous
        takes = rendezvous is not None and rendezvous.takes(ready.call.route)
        if rendezvous is None or not takes or not isinstance(ready.call.body, JsonBody):
            return _ALONE
        source.salts.note(self.tenants.owner(ready.salt), ready.salt)
        record.prefilled_by, record.transfer = source.id, TransferResult.FAILED
        return PromptHalf(
            transport=self.transport,
            ready=ready,
            engine=source,
            lease=ready.pool.lease(pair.prefill, ready.chain, streams=True, part=Role.PREFILL),
            meeting=rendezvous.meet(),
            leg=self.half_leg,
            is_refused=lambda: (reply.status or 0) >= HTTPStatus.BAD_REQUEST,
            ingest=self.ingest,
        )

    async def half_leg(self, half: PromptHalf, ready: Ready) -> None:
        """Holds the prefill engine and lets the half compute the request there. Raises EngineError."""
        async with self._hold(half.engine, ready) as hold:
            await half.compute(ready, hold)

    async def forward(
        self,
        serving: Serving,
        ready: Ready,
        engine: Engine,
        lease: Lease,
        hold: Hold,
        prefilled: OtherLeg | None = None,
    ) -> Forwarded:
        """Sends the request to the engine that it holds, and the answer to the client.

        `prefilled`: another engine has computed its prompt, or does so meanwhile. Raises EngineLate if the
        engine was to fetch its KV, and does not begin to answer while it is surely kept.
        """
        call, reply, record = ready.call_for(engine), serving.reply, serving.record
        placement = record.placement if prefilled is not None and record.placement else lease.placement
        kept = None if prefilled is None or prefilled.is_fetched else prefilled
        sent, has_begun = monotonic(), reply.started

        def began(answer: IncomingResponse, cached: int | None) -> None:
            serving.cached = cached
            serving.alarm.progress = lambda: (answer.received, reply.waits)
            serving.life.take(monotonic(), Began(is_socket=answer.status == _SWITCHED))

        def spoke() -> None:
            if kept is not None:
                kept.begins()
                _moved(record, kept, lease, sent)
            lease.first_byte(streamed=call.streams)
            if record.first_byte_s is None or not has_begun:
                # Now, because the client may leave before the end.
                record.begins(lease.started, lease.gathered, sent, lease.first_byte_s or 0.0)

        if ready.translation is not None:
            ready.translation.predicted = ready.predicted(placement, engine)
        passage = serving.passage = self._passage(serving, ready, call, hold, engine)
        for_others = serving.call.body if serving.kept else None
        reply.on_start = partial(_forget_bodies, call, hold, for_others)
        headers = _headers(call, placement, hold, reply) | ready.told | _retained(ready, hold)
        refuses_kv = isinstance(kept, Prefilled) and kept.is_checked and not kept.is_fetched
        refusals = ERRORS if refuses_kv else refusals_of(call, serving.n_candidates)
        serving.life.take(monotonic(), Sent())
        answer = Forwarding(engine.adapter, call, hold, reply, headers, refusals, passage, began, spoke).run(
            self.transport
        )
        forwarded = await (answer if kept is None else kept.in_time(answer))
        record.reports(forwarded.prefill, forwarded.decode_s)
        return forwarded

    def blame(self, serving: Serving, attempt: Attempt) -> None:
        """Notes what a failed attempt says about its engine."""
        engine, error, route = serving.engine, attempt.error, serving.call.route
        if engine is None:
            return
        match attempt.cause.blame:
            case Blame.SUSPECT:
                engine.suspect(error)
            case Blame.CHECK:
                engine.check_now.set()
            case Blame.REFUSED:
                log.warning("the engine refused a request", engine=engine.id, error=log_text(error))
                engine.refused(error)
            case Blame.LACKS if route in PASSED_ON:
                engine.lacks.add(route)

    def _passage(
        self, serving: Serving, ready: Ready, call: Call, hold: Hold, engine: Engine
    ) -> Passage | None:
        """The reader of the stream, if another engine could go on with it. Keeps the body for that engine.

        A stream that goes on always has one: it leaves out what the client has.
        """
        if serving.told is None and (ready.home is not None or len(ready.pool.engines) == 1):
            return None
        passage = passage_for(call, hold, engine.adapter.spec.kind, serving.told)
        if passage is not None and not serving.kept and isinstance(call.body, JsonBody):
            size = len(call.body.raw)
            if not self.room.has(size):
                return None
            self.room.take(size)
            serving.kept = size
        return passage

    def _close(
        self,
        serving: Serving,
        ready: Ready,
        engine: Engine,
        lease: Lease,
        hold: Hold,
        forwarded: Forwarded,
        prefilled: OtherLeg | None,
    ) -> Unchecked | None:
        """Notes what the engine reported of a complete answer, and what it holds now. Returns why its
        prediction was not checked."""
        record, pool = serving.record, ready.pool
        record.reports(forwarded.prefill, forwarded.decode_s)
        lease.report = Report(forwarded.cached_tokens, forwarded.output_tokens, forwarded.prefill)
        record.status, record.error = forwarded.status, forwarded.error
        record.called_tool = forwarded.called_tool
        record.reported_tokens, record.output_tokens = forwarded.cached_tokens, forwarded.output_tokens
        if prefilled is not None:
            record.reported_tokens = prefilled.cached_tokens
        else:
            engine.audit.reported(forwarded.cached_tokens or 0)
        self._check_tokens(pool, engine, hold, record)
        lease.failed = forwarded.error is not None
        lease.succeeded = not lease.failed and record.tokens_agree is not False
        if lease.succeeded:
            expect_below(pool, engine, ready.chain)
        if prefilled is not None:  # the prediction was for the engine that computed the prompt
            return None
        return self._audit(engine, ready, lease, record, forwarded.cached_tokens)

    def _audit(
        self, engine: Engine, ready: Ready, lease: Lease, record: RequestRecord, reported: int | None
    ) -> Unchecked | None:
        """Compares a firm prediction with what the engine reported. Returns why it did not."""
        placement = lease.placement
        if self.ingest is None or reported is None:
            unchecked = Unchecked.REUSE_OFF if self.ingest is None else Unchecked.NOT_REPORTED
        elif ready.prompt is None:
            unchecked = Unchecked.PROMPT_UNKNOWN
        elif record.tokens_agree is False:
            unchecked = Unchecked.TOKENS_DIFFER
        elif not placement.firm:
            unchecked = Unchecked.NOT_FIRM
        elif lease.placed.may_be_evicted and placement.predicted_tokens:
            unchecked = Unchecked.MAY_BE_EVICTED
        else:
            predicted = placement.predicted_tokens
            self.ingest.audit(engine, predicted, reported, evicted_since=lease.evicted_since)
            return None
        if record.error is not None:
            return Unchecked.FAILED
        return unchecked if record.runs_prompt else Unchecked.NO_PROMPT

    def _check_tokens(self, pool: Pool, engine: Engine, hold: Hold, record: RequestRecord) -> None:
        """Compares our token ids of the prompt with the engine's, if the engine returned them."""
        theirs = hold.answer.prompt_tokens() if hold.answer is not None else None
        if theirs is None or record.prompt is None or not record.prompt.whole or pool.prompts is None:
            return
        record.tokens_agree = record.prompt.token_ids == theirs
        difference = audit_tokens(pool.prompts, record.prompt, theirs)
        if difference is not None:
            log.warning(
                "the engine's tokens of a prompt differ from kvpin's: its prediction is not used",
                engine=engine.id,
                request=record.request_id,
                difference=difference,
            )

    def _hold(self, engine: Engine, ready: Ready) -> AbstractAsyncContextManager[Hold]:
        """The request's hold on its engine. When reuse is off, the adapter holds no request with a body."""
        call, prompt, body = ready.call, ready.prompt, ready.body_for(engine)
        if self.ingest is None and body is not None:
            return nullcontext(Hold(body))
        if prompt is None or not prompt.whole:
            return engine.adapter.hold(call.route, body, None)
        session = ready.session.digest if ready.session is not None else None
        kv = replace(prompt.kv, retention=ready.retention, session=session)
        return engine.adapter.hold(call.route, body, kv)


def cause_for(error: Exception, serving: Serving) -> Cause:
    """The cause of an attempt that failed with this error."""
    if not isinstance(error, EngineRejected) or isinstance(error, ModelFailed):
        return cause_of(error)
    if is_not_here(error) and error.status in refusals_of(serving.call, serving.n_candidates):
        return Cause.ENGINE_LACKS
    # In the middle of a stream, another engine may still go on, whatever error this one gives.
    is_refusal = serving.reply.started or error.status in refusals_of(serving.call, serving.n_candidates)
    return Cause.ENGINE_REFUSED if is_refusal else Cause.ENGINE_REJECTED


def _begin_together(lease: Lease, hold: Hold, half: PromptHalf | None) -> None:
    """Tells the engine that answers where it meets the other one. The report of that one counts."""
    lease.begins()
    lease.placement = replace(lease.placement, firm=False)
    if half is not None and isinstance(hold.body, JsonBody):
        hold.body = hold.body.replace(**half.meeting)


def _moved(record: RequestRecord, prefilled: OtherLeg, lease: Lease, sent: float) -> None:
    """Notes that an engine has the KV that another one computed, and how long moving that took."""
    now, book = monotonic(), lease.placed.book
    record.transfer, record.transfer_s = TransferResult.MOVED, now - prefilled.moves_since(sent)
    pulled = record.placement.chosen.pulled_tokens if record.placement is not None else 0
    waited = book.ledger.view(now).queue_s > 0  # then the time is not that of the transfer alone
    measured = 0 if waited else pulled
    lease.placer.transfers.measured(now, prefilled.source, book.engine, measured, record.transfer_s)


def _forget_bodies(call: Call, hold: Hold, kept: object) -> None:
    """Frees a request's bodies once no further engine needs them: a stream may run for minutes.

    `kept`: the body that another engine may get.
    """
    for body in {call.body, hold.body}:
        if isinstance(body, JsonBody) and body is not kept:
            body.forget()


def _headers(call: Call, placement: Placement, hold: Hold, reply: Reply) -> dict[str, str]:
    """The headers kvpin adds to the answer."""
    headers = {
        **dict.fromkeys(reply.dialect.id_headers, call.answer_id),
        ENGINE_HEADER: placement.engine,
        PREDICTED_HEADER: str(placement.predicted_tokens),
        # A page that an engine answered must not act as kvpin's own page, which may use the admin API.
        POLICY_HEADER: "sandbox",
    }
    return {**headers, NOTE_HEADER: hold.note} if hold.note else headers


def _retained(ready: Ready, hold: Hold) -> dict[str, str]:
    """The header that says whether the client's wish to keep its KV is honoured, if it has one."""
    wish = ready.retention
    if wish is None or not wish.priority:
        return {}
    return {RETENTION_HEADER: f"{wish.ttl_s:g}" if hold.retains else "0"}
