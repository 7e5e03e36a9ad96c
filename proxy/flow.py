"""The read path.

    request → parse → render + tokenise → block chain → index.match → place → lease
            → gather → hold → forward → release

`Flow.serve` is all of it, one call a step. Restoring from a lower tier is the engine's own doing, or that of
its adapter, which does it in `hold`; its time is a term of the placement's cost either way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

import structlog

from engine_adapter import (
    Capability,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    Hold,
    JsonBody,
    RequestBody,
)
from proxy.calls import Call, Reply
from proxy.core.blocks import Chain
from proxy.core.placement import Placement
from proxy.core.retention import retention_of
from proxy.engine import Engine, Lease
from proxy.errors import EngineFailed, ProxyError
from proxy.fleet import Fleet, Pool, no_engine_for
from proxy.forward import REFUSALS, Forwarder, Outcome
from proxy.ingest import Ingest
from proxy.lower_tiers import expect_below, look_below
from proxy.prompt import MediaUuids, Prompt, audit_tokens
from proxy.records import RequestLog, RequestRecord
from proxy.session import session_of
from proxy.tenants import Tenants

log = structlog.get_logger(__name__)

# The status of an answer nobody waited for, as nginx has it.
CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves data-plane requests.

    Attributes:
        fleet: the engines.
        forwarder: sends to them.
        ingest: gets every prediction's outcome; None without reuse, which then is least-loaded balancing.
        tenants: tenant → cache salt.
        media: what clients' names of images stand for.
        requests: gets a record of each request.
        retries: engines tried after the first.
        observe: called with each finished record, for metrics.
    """

    fleet: Fleet
    forwarder: Forwarder
    ingest: Ingest | None
    tenants: Tenants
    media: MediaUuids
    requests: RequestLog
    retries: int
    observe: Callable[[RequestRecord], None]

    async def serve(self, call: Call, reply: Reply) -> None:
        """Answers a request, or raises a ProxyError or EngineError before the answer has begun."""
        record = _record_of(call)
        started = time.monotonic()
        try:
            call = await self._admit(call)
            pool = self.fleet.pool(call.model)
            record.served_as = pool.model
            adapter = pool.adapter_of(call.model)
            prompt = record.prompt = await self._tokenise(pool, call, adapter)
            chain = pool.chain(prompt)
            session = record.session if self.ingest is not None else None
            failed: dict[str, EngineError] = {}
            while True:
                candidates = pool.candidates(chain, prompt, adapter=adapter, session=session, without=failed)
                if not candidates:
                    raise _final(failed) if failed else no_engine_for(adapter)
                placement = record.placement = pool.place(candidates, chain)
                record.attempts.append(placement.engine)
                known = prompt is not None and prompt.whole
                with pool.lease(
                    placement, chain, streams=call.streams, known=known, session=session
                ) as lease:
                    try:
                        return await self._forward(pool, call, reply, lease, record, chain)
                    except (EngineUnavailable, EngineRejected) as error:
                        if isinstance(error, EngineRejected) and error.status not in REFUSALS:
                            raise  # the client's fault: no engine would take it
                        self._note_failure(lease.engine, call, error)
                        failed[placement.engine] = error
                        if len(failed) > self.retries or not _repeatable(call):
                            raise _final(failed) from None
        except (ProxyError, EngineError) as error:
            record.error = str(error)
            raise
        except asyncio.CancelledError:
            record.status, record.error = CLIENT_LEFT, "the client left"
            raise
        finally:
            record.duration_s, record.events = time.monotonic() - started, reply.events
            self.requests.add(record)
            self.observe(record)

    async def _admit(self, call: Call) -> Call:
        """The request with clients' names of images checked, and kept within the tenant."""
        if not isinstance(call.body, JsonBody):
            return call
        salt = self.tenants.salt(call.tenant, call.body.get("cache_salt"))
        body = await self.media.admit(call.body, salt)
        return call if body is call.body else replace(call, body=body)

    async def _tokenise(self, pool: Pool, call: Call, adapter: str | None) -> Prompt | None:
        """The prompt as the engine will see it; None when reuse is off or nothing is known of it."""
        if self.ingest is None or pool.prompts is None or not isinstance(call.body, JsonBody):
            return None
        salt = self.tenants.salt(call.tenant, call.body.get("cache_salt"))
        return await pool.prompts.build(call.route, call.body, salt=salt, adapter=adapter)

    async def _forward(
        self, pool: Pool, call: Call, reply: Reply, lease: Lease, record: RequestRecord, chain: Chain | None
    ) -> None:
        """Sends to the leased engine and holds the prediction against its report."""
        engine = lease.engine
        async with lease.patience():
            await lease.gather()
            async with self._hold(engine, pool, call, record.prompt) as hold:
                await look_below(pool, lease, record.prompt, chain)
                placement = record.placement = lease.refine(hold)
                record.note = hold.note
                outcome = await self.forwarder.forward(
                    engine.adapter,
                    call,
                    hold,
                    reply,
                    _headers(call, placement, hold),
                    lambda: lease.first_byte(streamed=call.streams),
                )
        record.first_byte_s = lease.first_byte_s
        _note_outcome(record, outcome)
        self._check_tokens(pool, engine, hold, record)
        lease.succeeded = outcome.error is None and record.tokens_agree is not False
        if lease.succeeded:
            expect_below(pool, engine, chain)
        if outcome.error is not None and outcome.status < 400:  # noqa: PLR2004 - HTTP
            self._note_failure(engine, call, EngineUnavailable(outcome.error))
        is_known = record.prompt is not None and placement.firm and record.tokens_agree is not False
        if self.ingest is not None and is_known and outcome.cached_tokens is not None:
            predicted, reported = placement.predicted_tokens, outcome.cached_tokens
            self.ingest.audit(engine, predicted, reported, evicted_since=lease.evicted_since)

    def _check_tokens(self, pool: Pool, engine: Engine, hold: Hold, record: RequestRecord) -> None:
        """Holds the prompt's token ids against the engine's own, where the engine was asked to tell them."""
        theirs = hold.answer.prompt_tokens() if hold.answer is not None else None
        if theirs is None or record.prompt is None or not record.prompt.whole or pool.prompts is None:
            return
        record.tokens_agree = record.prompt.token_ids == theirs
        difference = audit_tokens(pool.prompts, record.prompt, theirs)
        if difference is not None:
            log.warning(
                "an engine made other tokens of a prompt",
                engine=engine.id,
                request=record.request_id,
                difference=difference,
            )

    def _hold(
        self, engine: Engine, pool: Pool, call: Call, prompt: Prompt | None
    ) -> AbstractAsyncContextManager[Hold]:
        """The request's hold on its engine. Without reuse the engine is left to itself."""
        body = self._body_for(engine, pool, call)
        if self.ingest is None:
            return nullcontext(Hold(body))
        if prompt is None or not prompt.whole or not isinstance(call.body, JsonBody):
            return engine.adapter.hold(call.route, body, None)
        retention = retention_of(call.body, call.tenant)
        return engine.adapter.hold(call.route, body, replace(prompt.kv, retention=retention))

    def _body_for(self, engine: Engine, pool: Pool, call: Call) -> RequestBody:
        """The client's body; changed only where the tenant's salt or the engine's model name must stand. A
        LoRA adapter has one name everywhere."""
        if not isinstance(call.body, JsonBody):
            return call.body
        changes = {}
        salt = self.tenants.salt(call.tenant, call.body.get("cache_salt"))
        if salt != call.body.get("cache_salt") and engine.can(Capability.CACHE_SALT):
            changes["cache_salt"] = salt
        if engine.info is not None and call.model == pool.model != engine.info.model:
            changes["model"] = engine.info.model
        return call.body.replace(**changes) if changes else call.body

    def _note_failure(self, engine: Engine, call: Call, error: EngineError) -> None:
        log.warning("engine failed a request", engine=engine.id, request=call.request_id, error=str(error))
        if isinstance(error, EngineUnavailable):
            engine.suspect(error)


def _final(failed: dict[str, EngineError]) -> Exception:
    """What the client is told when every engine that was asked failed."""
    last = list(failed.values())[-1]
    if isinstance(last, EngineRejected):
        return last
    return EngineFailed(f"{len(failed)} engine(s) failed this request; the last said: {last}")


def _repeatable(call: Call) -> bool:
    """Whether it can be sent again: a body that was streamed through is gone."""
    return call.body is None or isinstance(call.body, JsonBody)


def _record_of(call: Call) -> RequestRecord:
    key = call.body.hint("prompt_cache_key") if isinstance(call.body, JsonBody) else None
    return RequestRecord(
        request_id=call.request_id,
        started=time.time(),
        route=call.route,
        model=call.model,
        tenant=call.tenant,
        stream=call.streams,
        prompt_cache_key=key if isinstance(key, str) else None,
        session=session_of(call.tenant, call.headers, call.body),
    )


def _headers(call: Call, placement: Placement, hold: Hold) -> dict[str, str]:
    """What kvpin adds to the answer's headers."""
    headers = {
        "x-request-id": call.request_id,
        "x-kvpin-engine": placement.engine,
        "x-kvpin-predicted-tokens": str(placement.predicted_tokens),
    }
    return {**headers, "x-kvpin-note": hold.note} if hold.note else headers


def _note_outcome(record: RequestRecord, outcome: Outcome) -> None:
    record.status = outcome.status
    record.reported_tokens, record.output_tokens = outcome.cached_tokens, outcome.output_tokens
    record.error = outcome.error
