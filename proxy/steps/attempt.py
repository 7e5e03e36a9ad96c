"""One attempt of a request on one engine.

    lease → gather → hold → (first leg on another engine) → forward → audit → release

Where two engines serve a request together, the other one's half runs beside `forward`.

It must be the request's turn: `Life.entered` checks it. A failure is raised, and `Life.failed` decides
whether to try another engine.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any

import structlog
from msgspec.structs import replace

from engine_adapter import EngineError, Hold, HttpTransport, JsonBody, KvTarget, Role
from proxy.core.audit import Unchecked
from proxy.core.placement.decision import Pair, Placement
from proxy.core.placement.pairs import TransferResult
from proxy.core.quotas import ByteBudget
from proxy.fleet.engine import Engine
from proxy.fleet.ingest import Ingest
from proxy.fleet.lease import Lease
from proxy.fleet.lower_tiers import expect_below, look_below
from proxy.request.calls import Call
from proxy.request.migration import MAX_BODIES, Passage, passage_for
from proxy.request.tenants import Tenants
from proxy.steps.checks import ask_tokens, check_prediction, check_tokens, is_audited
from proxy.steps.forward import Attempt, Forwarded, note_moved
from proxy.steps.other_leg import FirstLeg, OtherLeg, PromptHalf
from proxy.steps.preparation import Ready
from proxy.steps.request import Request

log = structlog.get_logger(__name__)

_ALONE = nullcontext[None]()


@dataclass(frozen=True, slots=True)
class Attempts:
    """Runs attempts."""

    transport: HttpTransport  # sends requests to engines
    ingest: Ingest | None  # audits predictions; None when reuse is off
    tenants: Tenants  # whose KV lies under which salt
    # Memory for what running streams need to go on when their engine dies.
    room: ByteBudget = field(default_factory=lambda: ByteBudget(MAX_BODIES))

    async def run(self, request: Request) -> None:
        """Leases the engine whose turn it is, sends the request there, and audits the prediction. Raises
        EngineUnavailable or EngineRejected if the engine failed."""
        ready, placement, record = request.ready, request.placement, request.record
        assert ready is not None and placement is not None  # noqa: S101, PT018 - it was placed
        pool, pair, engine = ready.pool, placement.pair, ready.pool.engines[request.engine]
        request.passage, request.cached, request.half = None, None, None
        record.placement = placement
        if record.prefilled_by is not None:
            record.leaves_leg()
        unchecked: Unchecked | None = Unchecked.ENDED_EARLY
        try:
            with (
                self._lease(request, ready, placement, engine) as lease,
                self.prompt_half(request, ready, pair) if pair is not None else _ALONE as half,
            ):
                request.half = half
                request.entered(monotonic())
                if lease.has_company():
                    await lease.gather()
                lease.gathered = monotonic()
                audited = ready.prompt is not None and is_audited(engine, ready.prompt)
                body = ready.body_for(engine) if audited else None
                raw = body.raw if isinstance(body, JsonBody) else None  # an answer frees the body
                async with self._hold(engine, ready, audited=audited) as hold:
                    attempt = Attempt(request, ready, ready.call, engine, lease, hold)
                    if pair is None:
                        if engine.has_lower_tiers:
                            await look_below(pool, engine, lease, ready.prompt, ready.chain)
                    elif pair.together:
                        attempt.leg = half
                        _begin_together(lease, hold, half)
                    else:
                        attempt.leg = await self.first_leg(attempt, pair)
                    refined = lease.refine(hold)
                    record.placement = refined if attempt.leg is None else _of_leg(placement, attempt.leg)
                    record.note, record.slot = hold.note, hold.slot
                    forwarded = await self.forward(attempt)
                if raw is not None and forwarded.error is None:
                    await ask_tokens(engine, hold, ready.call.route, raw)
                unchecked = self._close(attempt, forwarded)
        except EngineError:
            unchecked = Unchecked.FAILED
            raise
        finally:
            if request.half is not None:
                record.first_leg_s = request.half.took_s
            if unchecked is not None:
                engine.audit.skip(unchecked)
        request.answered(is_error=forwarded.error is not None)

    def _lease(self, request: Request, ready: Ready, placement: Placement, engine: Engine) -> Lease:
        pair = placement.pair
        if ready.salt is not None:
            engine.salts.note(self.tenants.owner(ready.salt), ready.salt)
        return ready.pool.lease(
            placement if pair is None else pair.decode,
            ready.chain,
            streams=ready.call.streams,
            known=ready.prompt is not None and ready.prompt.whole,
            session=ready.session,
            part=Role.BOTH if pair is None else Role.DECODE,
            on_lost=request.engine_lost,
            is_late=request.is_late,
        )

    async def first_leg(self, attempt: Attempt, pair: Pair) -> FirstLeg | None:
        """Lets another engine compute the prompt. None without success: then the leased engine does so."""
        request, ready, hold, lease = attempt.request, attempt.ready, attempt.hold, attempt.lease
        record, name, began = request.record, pair.prefill.engine, monotonic()
        source = ready.pool.engines.get(name)
        transfer = source.adapter.transfer if source is not None else None  # its lease is the one that counts
        record.prefilled_by, record.transfer = name, TransferResult.FAILED
        prefilled: FirstLeg | None = None
        if source is not None and transfer is not None and isinstance(hold.body, JsonBody):
            source.salts.note(self.tenants.owner(ready.salt), ready.salt)
            request.sent()
            call, prompt = ready.call, ready.prompt
            apart = transfer.fetch(call.route, hold.body, prompt.token_ids) if prompt is not None else None
            path, body = apart or (call.path, hold.body)
            leg = FirstLeg(
                transport=self.transport,
                ready=ready,
                engine=source,
                lease=ready.pool.lease(pair.prefill, ready.chain, streams=True, part=Role.PREFILL),
                ingest=self.ingest,
                patience_s=pair.patience_s,
                is_checked=transfer.checks_all,
                transfer=transfer,
                path=path,
                body=body,
                is_apart=apart is not None,
            )
            is_computed = await leg.run()
            record.first_leg_s = monotonic() - began
            if is_computed:
                record.transfer = TransferResult.LATE  # until the engine has shown that it has the KV
                if await leg.hand_over(attempt.engine, hold):
                    prefilled = leg
                else:
                    record.transfer = TransferResult.FAILED
        record.legs_s = monotonic() - began
        if prefilled is None:
            await lease.computes(streams=ready.call.streams)
        else:
            if prefilled.is_fetched:
                note_moved(record, prefilled, lease, began + (record.first_leg_s or 0.0))
            lease.begins()
        return prefilled

    def prompt_half(
        self, request: Request, ready: Ready, pair: Pair
    ) -> AbstractContextManager[PromptHalf | None]:
        """The half of the request that another engine serves at the same time, with its lease; None for a
        request that has no halves."""
        if not pair.together:
            return _ALONE
        reply, record, source = request.reply, request.record, ready.pool.engines[pair.prefill.engine]
        rendezvous = source.adapter.rendezvous
        if rendezvous is None or ready.call.route not in rendezvous.routes:
            return _ALONE
        if not isinstance(ready.call.body, JsonBody):
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

    def forward(self, attempt: Attempt) -> Coroutine[Any, Any, Forwarded]:
        """Sends the request to the engine that it holds, and the answer to the client. Raises EngineError."""
        request, call = attempt.request, attempt.ready.call_for(attempt.engine)
        attempt.call = call
        request.passage = self._passage(attempt, call)
        for_others = request.call.body if request.kept else None
        request.reply.on_start = partial(_forget_bodies, call, attempt.hold, for_others)
        request.sent()
        attempt.is_sent()
        answer = attempt.run(self.transport)
        return answer if attempt.beside is None else attempt.beside.in_time(answer)

    def _passage(self, attempt: Attempt, call: Call) -> Passage | None:
        """The reader of the stream, if another engine could go on with it. Keeps the body for that engine.

        A stream that goes on always has one: it leaves out what the client has.
        """
        request, ready = attempt.request, attempt.ready
        if request.told is None and (ready.home is not None or len(ready.pool.engines) == 1):
            return None
        if request.told is None and not call.streams:
            return None
        passage = passage_for(call, attempt.hold, attempt.engine.adapter.spec.kind, request.told)
        if passage is not None and not request.kept and isinstance(call.body, JsonBody):
            size = len(call.body.raw)
            if not self.room.has(size):
                return None
            self.room.take(size)
            request.kept = size
        return passage

    def _close(self, attempt: Attempt, forwarded: Forwarded) -> Unchecked | None:
        """Notes what the engine reported of a complete answer, and what it holds now. Returns why its
        prediction was not checked."""
        ready, engine, lease, hold = attempt.ready, attempt.engine, attempt.lease, attempt.hold
        record, pool, leg = attempt.request.record, ready.pool, attempt.leg
        usage = lease.report = forwarded.usage
        record.reports(usage)
        record.status, record.error = forwarded.status, forwarded.error
        record.called_tool = usage.called_tool
        record.reported_tokens, record.output_tokens = usage.cached_tokens, usage.output_tokens
        if leg is not None:
            record.reported_tokens = leg.cached_tokens
        if hold.answer is not None or hold.told_tokens is not None:
            check_tokens(ready, engine, hold, record)
        lease.failed = forwarded.error is not None
        if forwarded.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            log.warning("the engine refused the key of kvpin: give it as api_key=KEY", engine=engine.id)
        if forwarded.is_empty:
            pool.note_empty(engine)
        # The time of an empty answer says nothing about the engine's rates.
        lease.succeeded = not (lease.failed or forwarded.is_empty) and record.tokens_agree is not False
        if lease.succeeded and engine.has_lower_tiers:
            expect_below(pool, engine, ready.chain)
        if leg is not None:  # the prediction was for the engine that computed the prompt
            record.placement = record.placement and _of_leg(record.placement, leg)
            return None
        return check_prediction(self.ingest, engine, ready, lease, record, usage.cached_tokens)

    def _hold(
        self, engine: Engine, ready: Ready, *, audited: bool = False
    ) -> AbstractAsyncContextManager[Hold]:
        """The request's hold on its engine. When reuse is off, the adapter holds only what must not share KV
        with others. The engine makes the prompt's token ids itself if it is `audited`."""
        call, prompt, body = ready.call, ready.prompt, ready.body_for(engine)
        if self.ingest is None and body is not None and ready.salt is None:
            return nullcontext(Hold(body))
        if prompt is None or not prompt.whole:
            return engine.adapter.hold(call.route, body, None)
        session = ready.session.digest if ready.session is not None else None
        is_made_there = audited or not (engine.is_proven or prompt.source == "client")
        kv = KvTarget(
            prompt.token_ids,
            prompt.extra_ids,
            prompt.salt,
            prompt.lora,
            exact=prompt.exact and not is_made_there,
            audit=audited,
            retention=ready.retention,
            session=session,
        )
        return engine.adapter.hold(call.route, body, kv)


def _begin_together(lease: Lease, hold: Hold, half: PromptHalf | None) -> None:
    """Tells the engine that answers where it meets the other one. The report of that one counts."""
    lease.begins()
    lease.placement = replace(lease.placement, firm=False)
    if half is not None and isinstance(hold.body, JsonBody):
        hold.body = hold.body.replace(**half.meeting)


def _of_leg(placement: Placement, leg: OtherLeg) -> Placement:
    """The placement of a request whose prompt another engine computes. Its prediction is not firm if requests
    in flight there may evict what it rests on."""
    is_firm = placement.firm and not (leg.lease.placed.may_be_evicted and placement.predicted_tokens)
    return placement if is_firm else replace(placement, firm=False)


def _forget_bodies(call: Call, hold: Hold, kept: object) -> None:
    """Frees a request's bodies once no further engine needs them: a stream may run for minutes.

    `kept`: the body that another engine may get.
    """
    for body in {call.body, hold.body}:
        if isinstance(body, JsonBody) and body is not kept:
            body.forget()
