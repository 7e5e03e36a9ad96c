"""The read path.

    prepare   request → parse → render + tokenise → block chain
    place     index.match → cost of each engine → the cheapest
    run_on    lease → gather → hold → forward → audit → release

`Flow.serve` runs all steps. Warming and dry runs of the admin API call the same steps. KV on a lower tier is
restored by the engine or by its adapter's `hold`; the placement's cost includes that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

import structlog
from msgspec.structs import replace

from engine_adapter import (
    Capability,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    Hold,
    IncomingResponse,
    JsonBody,
    NotSupported,
    RequestBody,
)
from proxy.core.misses import Diagnosis
from proxy.core.placement.answers import Report
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.retry_budget import RetryBudget
from proxy.fleet.engine import TOKENS_PER_BLOCK, Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.lease import Lease
from proxy.fleet.lower_tiers import expect_below, look_below
from proxy.fleet.pool import Pool, no_engine_for
from proxy.headers import ENGINE_HEADER, NOTE_HEADER, POLICY_HEADER, PREDICTED_HEADER
from proxy.prompt import audit_tokens
from proxy.ready import Preparation, Ready
from proxy.request.calls import Call, Reply
from proxy.request.comparison import Comparison
from proxy.request.diagnostics import APIS, Diagnosed
from proxy.request.error_table import ANSWERED, status_of
from proxy.request.forward import Forwarder, Outcome, tell_broken
from proxy.request.migration import NEVER, Migration, Room
from proxy.request.records import RequestLog, RequestRecord
from proxy.request.retries import PASSED_ON, REFUSALS, final_error, is_not_here, may_retry, refusals_of
from proxy.request.tenants import Tenants
from proxy.request.urgency import deadline_of, priority_of, prompt_tokens_of, tokens_of
from proxy.translate import (
    RESPONSES_PATH,
    ResponseNoter,
    Translated,
    Translation,
)

log = structlog.get_logger(__name__)

# Status of a request whose client left, as in nginx.
CLIENT_LEFT = 499
# Seconds that a request waits when no engine takes requests. Short: clients retry by themselves.
ENGINE_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves data-plane requests.

    Attributes:
        fleet: the engines.
        preparation: reads requests as far as placement needs it.
        forwarder: sends requests to engines.
        ingest: audits predictions; None when reuse is off. Placement is then by load alone.
        tenants: tenant → cache salt.
        requests: keeps a record of each request.
        retries: engines tried after the first.
        observe: called with each finished record, for metrics.
        placed: called whenever a request is placed on an engine, before it is sent there.
        wait_s: how long a request waits when no engine takes requests.
        budget: retries of all requests together.
        total_s: from a request to the end of its answer; None without an end. Later, none is retried.
        kept: memory for what running streams need to go on when their engine dies.
    """

    fleet: Fleet
    preparation: Preparation
    forwarder: Forwarder
    ingest: Ingest | None
    tenants: Tenants
    requests: RequestLog
    retries: int
    observe: Callable[[RequestRecord], None]
    placed: Callable[[RequestRecord, Placement], None] = lambda _record, _placement: None
    wait_s: float = ENGINE_WAIT_S
    budget: RetryBudget = field(default_factory=RetryBudget)
    total_s: float | None = None
    kept: Room = field(default_factory=Room)

    async def serve(self, call: Call, reply: Reply) -> None:
        """Answers a request.

        Raises:
            ProxyError, EngineError: the request failed before the answer began.
        """
        record = RequestRecord.of(call)
        reply.recorded = True
        self._keep_for_diagnosis(call.body, record, reply)
        self.budget.requested()
        usage = self.tenants.usage(call.tenant, is_more=call.is_more)
        try:
            usage.begin(record.arrived)
            ready = await self.prepare(call)
            call = ready.call
            record.prompt, record.chain = ready.prompt, ready.chain
            record.served_as, record.lora = ready.pool.model, ready.lora
            usage.spend(prompt_tokens_of(call, record.n_tokens))
            if (translation := ready.translation) is not None:
                if translation.source is not None:  # with the items that the body only names
                    self.requests.keep_source(record, translation.source.raw)
                if translation.counts:
                    return await _answer_count(ready, translation, reply, record)
                reply.through(lambda client: Translated(client, translation))
            elif call.route == RESPONSES_PATH and call.socket is None:
                reply.through(lambda client: ResponseNoter(client, partial(self._note_home, record)))
            await self._run(ready, reply, record)
        except ANSWERED as error:
            record.status, record.error = status_of(error), str(error)
            raise
        except asyncio.CancelledError as cancelled:
            record.status, record.error = CLIENT_LEFT, str(cancelled) or "the client left"
            raise
        finally:
            record.duration_s, record.events = time.monotonic() - record.arrived, reply.events
            if reply.completed is not None:
                record.answered_s = reply.completed - record.arrived
            usage.end(record.output_tokens or reply.events)
            self.requests.add(record)
            self.observe(record)
            record.chain = None  # the log keeps records for long

    async def _run(self, ready: Ready, reply: Reply, record: RequestRecord) -> None:
        """Places and runs a request, on further engines if the first ones fail.

        Raises:
            ProxyError, EngineError: they all failed before the answer began.
        """
        failed: dict[str, EngineError] = {}
        may_migrate = self.retries > 0 and ready.home is None and len(ready.pool.engines) > 1
        migration = Migration(self.kept, is_on=may_migrate)
        try:
            while placed := await self._place(ready, failed, record):
                placement, n_candidates = placed
                engine = ready.pool.engines[placement.engine]
                record.attempts.append(engine.id)
                self.placed(record, placement)
                refusals = refusals_of(ready.call, n_candidates)
                try:
                    outcome = await self.run_on(ready, placement, reply, record, refusals, migration)
                    if not outcome.broken_off:
                        return None
                    failed[engine.id] = EngineUnavailable(outcome.error or "", dropped=True)
                    if (further := migration.go_on(outcome.cached_tokens)) is None:
                        break
                    ready = ready.going_on(further)
                except (EngineUnavailable, EngineRejected) as error:
                    is_final = isinstance(error, EngineRejected) and error.status not in refusals
                    if is_final and not reply.started:
                        raise  # the client's fault: every engine would reject it
                    failed[engine.id] = error
                    _note_failure(engine, error, ready.call.route)
                if not self._may_retry(ready.call, failed, record):
                    break
            if reply.started:
                return await _end_broken(reply, record, failed)
            raise final_error(list(failed.values())) if failed else no_engine_for(ready.lora)
        finally:
            migration.close()
            failed.clear()  # a traceback holds this frame: the body would stay until garbage collection

    @property
    def comparison(self) -> Comparison:
        """Tells why the cache of a request missed."""
        return Comparison(self.requests, self.fleet.engines, TOKENS_PER_BLOCK)

    def _keep_for_diagnosis(self, body: RequestBody, record: RequestRecord, reply: Reply) -> None:
        """Keeps the body. Notes the answer's id, and adds diagnostics to it if the client asks for them."""
        if not isinstance(body, JsonBody):
            return
        self.requests.keep_source(record, body.raw)
        if (api := APIS.get(record.route)) is None:
            return
        asked, comparison = api.asked(body), self.comparison

        def diagnose(answer_id: str, reused: int | None) -> Diagnosis | None:
            return comparison.with_answer(answer_id, record, reused)

        def note_id(answer_id: str) -> None:
            record.answer_id = answer_id

        reply.through(lambda client: Diagnosed(client, api, asked=asked, diagnose=diagnose, note_id=note_id))

    async def prepare(self, call: Call) -> Ready:
        """Reads a request as far as placement needs it: pool, prompt, block chain.

        Raises:
            ProxyError, EngineError: the request is wrong, or no engine serves its model.
        """
        return await self.preparation.prepare(call)

    def _note_home(self, record: RequestRecord, response_id: str) -> None:
        """The engine that answers now has made a response."""
        self.preparation.destinations.note(record.tenant, response_id, record.attempts[-1])

    def candidates(self, ready: Ready, without: Container[str] = ()) -> list[Candidate]:
        """The engines that could serve the request now, with what placement knows of each."""
        found = ready.pool.candidates(
            ready.chain,
            ready.prompt,
            lora=ready.lora,
            session=ready.session,
            without=without,
            native=ready.call.native,
            route=ready.call.route,
        )
        if ready.home is not None:
            return [each for each in found if each.engine == ready.home]
        if ready.kind is None:
            return found
        engines = ready.pool.engines
        return [each for each in found if engines[each.engine].adapter.spec.kind == ready.kind]

    async def _candidates(self, ready: Ready, failed: Collection[str]) -> list[Candidate]:
        """The engines to try next. If no engine takes requests yet, waits for one up to `wait_s`."""
        found = self.candidates(ready, without=failed)
        if not found and not failed and ready.pool.is_coming_back:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.wait_s):
                    while not found:
                        await self.fleet.until_ready()
                        found = self.candidates(ready)
        return found

    def _may_retry(self, call: Call, failed: dict[str, EngineError], record: RequestRecord) -> bool:
        """Whether another engine may be tried after the last failure."""
        last, now = next(reversed(failed.values())), time.monotonic()
        has_refused = isinstance(last, EngineRejected) and not is_not_here(last)
        in_time = self.total_s is None or now - record.arrived < self.total_s
        may = in_time and may_retry(call, failed.values(), self.retries)
        return may and (not has_refused or self.budget.take(now))

    async def _place(
        self, ready: Ready, failed: Collection[str], record: RequestRecord
    ) -> tuple[Placement, int] | None:
        """The engine to try next, of how many; None if there is none. Waits where all engines are too busy.

        Raises:
            Overloaded: that takes too long.
        """
        pool, candidates = ready.pool, await self._candidates(ready, failed)
        if not candidates:
            return None
        placement = pool.place(candidates, ready.chain)
        if failed or not pool.must_queue(placement):
            return placement, len(candidates)
        await self._in_turn(ready, record)
        candidates = await self._candidates(ready, failed)  # engines hold other KV by now
        return (pool.place(candidates, ready.chain), len(candidates)) if candidates else None

    async def _in_turn(self, ready: Ready, record: RequestRecord) -> None:
        """Waits until it is the request's turn and an engine is not too busy, or none is there any more.

        Raises:
            Overloaded: that takes too long.
        """
        call, pool, began = ready.call, ready.pool, time.monotonic()

        def may_go() -> bool:
            candidates = self.candidates(ready)
            return not candidates or not pool.is_busy(pool.place(candidates, ready.chain))

        try:
            await pool.line.wait(
                call.tenant,
                priority=priority_of(call),
                tokens=tokens_of(call, record.n_tokens),
                size=len(call.body.raw) if isinstance(call.body, JsonBody) else 0,
                deadline_s=deadline_of(call),
                may_go=may_go,
            )
        finally:
            record.queued_s = time.monotonic() - began

    async def run_on(
        self,
        ready: Ready,
        placement: Placement,
        reply: Reply,
        record: RequestRecord,
        refusals: Container[int] = REFUSALS,
        migration: Migration = NEVER,
    ) -> Outcome:
        """Leases the placed engine, sends the request there, and audits the prediction.

        Raises:
            EngineUnavailable, EngineRejected: the engine failed before the answer began.
        """
        record.placement, pool = placement, ready.pool
        known, engine = ready.prompt is not None and ready.prompt.whole, pool.engines[placement.engine]
        with pool.lease(
            placement,
            ready.chain,
            streams=ready.call.streams,
            known=known,
            session=ready.session,
            arrived=record.arrived,
        ) as lease:
            engine.salts.note(self.tenants.owner(ready.salt), ready.salt)
            with lease.patience():
                await lease.gather()
                async with self._hold(engine, ready) as hold:
                    await look_below(pool, engine, lease, ready.prompt, ready.chain)
                    record.placement, record.note = lease.refine(hold), hold.note
                    outcome = await self._forward(
                        ready, engine, lease, hold, reply, record, refusals, migration
                    )
            lease.report = Report(outcome.cached_tokens, outcome.output_tokens, outcome.prefill)
            record.status, record.error = outcome.status, outcome.error
            record.reported_tokens, record.output_tokens = outcome.cached_tokens, outcome.output_tokens
            self._check_tokens(pool, engine, hold, record)
            lease.succeeded = outcome.error is None and record.tokens_agree is not False
            if lease.succeeded:
                expect_below(pool, engine, ready.chain)
            if outcome.error is not None and outcome.status < HTTPStatus.BAD_REQUEST:
                record.interrupted += 1
                record.died.append(engine.id)
                engine.suspect(EngineUnavailable(outcome.error))
            self._audit(engine, ready, lease, record)
            return outcome

    async def _forward(
        self,
        ready: Ready,
        engine: Engine,
        lease: Lease,
        hold: Hold,
        reply: Reply,
        record: RequestRecord,
        refusals: Container[int],
        migration: Migration,
    ) -> Outcome:
        """Sends the request to the engine that it holds, and the answer to the client."""
        call, placement = ready.call_for(engine), lease.placement

        def began(answer: IncomingResponse) -> None:
            lease.first_byte(answer, streamed=call.streams)
            if not reply.started:
                # Now, because the client may leave before the end.
                record.first_byte_s, record.placed = lease.first_byte_s, lease.started

        if ready.translation is not None:
            ready.translation.predicted = ready.predicted(placement, engine)
        passage = migration.passage(call, hold, engine.adapter.spec.kind)
        keeps = migration.keeps_body
        reply.on_start = lambda: _forget_bodies(call, hold, keeps=keeps)
        headers = _headers(call, placement, hold, reply)
        return await self.forwarder.forward(
            engine.adapter, call, hold, reply, headers, began, refusals, passage
        )

    def _audit(self, engine: Engine, ready: Ready, lease: Lease, record: RequestRecord) -> None:
        """Compares a firm prediction with the engine's report."""
        placement, reported = lease.placement, record.reported_tokens
        is_known = ready.prompt is not None and placement.firm and record.tokens_agree is not False
        if self.ingest is not None and is_known and reported is not None:
            self.ingest.audit(engine, placement.predicted_tokens, reported, evicted_since=lease.evicted_since)

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
        return engine.adapter.hold(call.route, body, replace(prompt.kv, retention=ready.retention))


def _note_failure(engine: Engine, error: EngineError, route: str) -> None:
    if not isinstance(error, EngineRejected):
        engine.suspect(error)
    elif not is_not_here(error):
        log.warning("the engine refused a request", engine=engine.id, status=error.status, error=str(error))
        engine.refused(error)
    elif route in PASSED_ON:
        engine.lacks.add(route)


async def _answer_count(ready: Ready, translation: Translation, reply: Reply, record: RequestRecord) -> None:
    """Answers how long a prompt is.

    Raises:
        NotSupported: it is not known here.
    """
    if ready.prompt is None or not ready.prompt.whole:
        raise NotSupported(
            Capability.TOKENIZE.value,
            engine=next(iter(ready.pool.engines), ready.pool.model),
            instead="kvpin cannot count the tokens of this prompt; name the tokenizer with tokenizer=",
        )
    record.status, record.prompt = 200, None  # no engine computed it: later prompts are not compared with it
    id_headers = [(name.encode(), ready.call.answer_id.encode()) for name in reply.dialect.id_headers]
    await reply.start(record.status, [(b"content-type", b"application/json"), *id_headers])
    await reply.finish(translation.count(len(ready.prompt.token_ids)))


async def _end_broken(reply: Reply, record: RequestRecord, failed: Mapping[str, EngineError]) -> None:
    """Ends a stream with which no engine goes on. No `finish`: clients take that for a whole answer."""
    error = [*failed.values()][-1]
    record.status, record.error = HTTPStatus.OK, str(error)
    await tell_broken(reply, error)


def _forget_bodies(call: Call, hold: Hold, *, keeps: bool) -> None:
    """Frees a request's body, which no engine gets any more. A stream may run for minutes.

    `keeps`: another engine may get the client's body.
    """
    for body in {call.body, hold.body} - ({call.body} if keeps else set()):
        if isinstance(body, JsonBody):
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
