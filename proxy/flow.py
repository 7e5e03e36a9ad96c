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
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import structlog
from msgspec import Struct
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
    Retention,
)
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.core.index.blocks import Chain
from proxy.core.placement.answers import Report
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.retention import retention_of
from proxy.errors import EngineFailed, NotFound
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.lower_tiers import expect_below, look_below
from proxy.fleet.pool import Pool, no_engine_for
from proxy.prompt import MediaUuids, Prompt, audit_tokens
from proxy.request.calls import Call, Reply
from proxy.request.error_table import ANSWERED, status_of
from proxy.request.forward import REFUSALS, RETRY_HEADERS, Forwarder, Outcome
from proxy.request.records import RequestLog, RequestRecord
from proxy.request.session import Session
from proxy.request.tenants import Tenants
from proxy.translate import (
    CHAT_PATH,
    RESPONSES_PATH,
    Home,
    Homes,
    Noting,
    Predicted,
    Translate,
    Translated,
    Translation,
    response_named,
)

log = structlog.get_logger(__name__)

# Status of a request whose client left, as in nginx.
CLIENT_LEFT = 499
# How long a request waits when no engine takes requests. Short: clients retry by themselves.
ENGINE_WAIT_S = 2.0
# A request that broke the connections of this many engines is probably the cause: it is not retried.
MAX_DROPPED = 2


class Ready(Struct, frozen=True):
    """A request that can be placed.

    Attributes:
        call: the request, its media checked.
        pool: the engines that serve its model.
        salt: the cache salt its KV lies under.
        lora: the LoRA adapter it runs with.
        prompt: its prompt as the engine will see it; None when reuse is off or the prompt cannot be known.
        chain: the prompt's blocks; None without a prompt.
        session: the conversation it belongs to; None when reuse is off.
        retention: how long its client wants its KV kept; None when reuse is off.
        translation: turns the answer to a chat into that of the API the client asked; None for its own.
        home: the only engine that can serve it, which made the response that it names; None for any.
    """

    call: Call
    pool: Pool
    salt: str | None
    lora: str | None
    prompt: Prompt | None
    chain: Chain | None
    session: Session | None = None
    retention: Retention | None = None
    translation: Translation | None = None
    home: str | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves data-plane requests.

    Attributes:
        fleet: the engines.
        forwarder: sends requests to engines.
        ingest: audits predictions; None when reuse is off. Placement is then by load alone.
        tenants: tenant → cache salt.
        media: the content behind clients' names of images.
        requests: keeps a record of each request.
        retries: engines tried after the first.
        observe: called with each finished record, for metrics.
        wait_s: how long a request waits when no engine takes requests.
        translations: route → what translates a request there into a chat, for engines that want chats.
        homes: which engine made which response.
    """

    fleet: Fleet
    forwarder: Forwarder
    ingest: Ingest | None
    tenants: Tenants
    media: MediaUuids
    requests: RequestLog
    retries: int
    observe: Callable[[RequestRecord], None]
    wait_s: float = ENGINE_WAIT_S
    translations: Mapping[str, Translate] = field(default_factory=dict)
    homes: Homes = field(default_factory=Homes)

    async def serve(self, call: Call, reply: Reply) -> None:
        """Answers a request.

        Raises:
            ProxyError, EngineError: the request failed before the answer began.
        """
        record = RequestRecord.of(call)
        started = time.monotonic()
        failed: dict[str, EngineError] = {}
        try:
            ready = await self.prepare(call)
            call = ready.call
            record.prompt, record.chain, record.served_as = ready.prompt, ready.chain, ready.pool.model
            if (translation := ready.translation) is not None:
                if translation.counts:
                    return await _answer_count(ready, translation, reply, record)
                reply.through(lambda client: Translated(client, translation))
            elif call.route == RESPONSES_PATH:
                reply.through(lambda client: Noting(client, lambda name: self._note_home(name, record)))
            while candidates := await self._candidates(ready, failed):
                placement = ready.pool.place(candidates, ready.chain)
                engine = ready.pool.engines[placement.engine]
                record.attempts.append(engine.id)
                try:
                    return await self.run_on(ready, placement, reply, record)
                except (EngineUnavailable, EngineRejected) as error:
                    if isinstance(error, EngineRejected) and error.status not in REFUSALS:
                        raise  # the client's fault: every engine would reject it
                    failed[engine.id] = error
                    _note_failure(engine, error)
                    if not self._may_retry(call, failed.values()):
                        break
            raise _final(list(failed.values())) if failed else no_engine_for(ready.lora)
        except ANSWERED as error:
            record.status, record.error = status_of(error), str(error)
            raise
        except asyncio.CancelledError:
            record.status, record.error = CLIENT_LEFT, "the client left"
            raise
        finally:
            record.duration_s, record.events = time.monotonic() - started, reply.events
            self.requests.add(record)
            self.observe(record)
            failed.clear()  # a traceback holds this frame: the body would stay until garbage collection
            record.chain = None  # the log keeps records for long

    async def prepare(self, call: Call) -> Ready:
        """Reads a request as far as placement needs it: pool, prompt, block chain.

        Raises:
            ProxyError, EngineError: the request is wrong, or no engine serves its model.
        """
        pool, home = self._pool(call)
        translation = await self._translation(call, pool)
        if translation is None:
            ready = await self._prepare(call, pool, call.body)
            return ready if home is None else replace(ready, home=home)
        chat = replace(call, path=CHAT_PATH, body=translation.chat)
        with _in_the_words_of(translation):
            ready = await self._prepare(chat, pool, call.body, counts=translation.counts)
        return replace(ready, translation=translation)

    async def _prepare(self, call: Call, pool: Pool, asked: RequestBody, *, counts: bool = False) -> Ready:
        """`prepare` for a request that engines understand.

        Args:
            call: the request.
            pool: the engines that serve it.
            asked: the body that the client sent.
            counts: its prompt is only counted.
        """
        salt = None
        if isinstance(call.body, JsonBody):
            salt = self.tenants.salt(call.tenant, call.body.get("cache_salt"))
            body = await self.media.admit(call.body, salt)
            call = call if body is call.body else replace(call, body=body)
        lora = pool.lora_of(call.model)
        prompt = retention = None
        reads = self.ingest is not None or counts
        if reads and pool.prompts is not None and isinstance(call.body, JsonBody):
            prompt = await pool.prompts.build(
                call.route, call.body, salt=salt, lora=lora, tenant=call.tenant, bounded=not counts
            )
            retention = retention_of(asked, call.tenant) if isinstance(asked, JsonBody) else None
        session = call.session if self.ingest is not None else None
        return Ready(call, pool, salt, lora, prompt, pool.chain(prompt), session, retention)

    def _pool(self, call: Call) -> tuple[Pool, str | None]:
        """The pool of a request; and the one engine that can serve it, if it names a response of its own.

        Responses that kvpin did not see may be any engine's, but with several tenants also anyone's.
        """
        name = response_named(call)
        home = self.homes.find(call.tenant, name) if name is not None else None
        if name is None or (home is None and call.route == RESPONSES_PATH):
            pool = self.fleet.pool(call.model)
            if name is not None and self.tenants.isolated and RESPONSES_PATH not in pool.served_as_chats:
                raise _no_response(call, name)
            return pool, None
        if home is None:
            pools = [each for each in self.fleet.pools.values() if RESPONSES_PATH not in each.served_as_chats]
            if self.tenants.isolated or len(pools) != 1:
                raise _no_response(call, name)
            return pools[0], None
        engine = self.fleet.engines.get(home.engine)
        pool_of_home = self.fleet.pool_of(engine) if engine is not None else None
        if pool_of_home is None or _instance_of(engine) != home.instance:
            raise _no_response(call, name, f": engine {home.engine!r}, which made it, was restarted")
        return pool_of_home, home.engine

    def _note_home(self, response_id: str, record: RequestRecord) -> None:
        """The engine that answers now has made a response."""
        engine = record.attempts[-1]
        instance = _instance_of(self.fleet.engines.get(engine))
        self.homes.keep(record.tenant, response_id, Home(engine, instance))

    async def _translation(self, call: Call, pool: Pool) -> Translation | None:
        """How the request becomes a chat; None if the engines of the pool serve it as it is."""
        translate, body = self.translations.get(call.route), call.body
        if translate is None or call.route not in pool.served_as_chats or not isinstance(body, JsonBody):
            return None
        return await off_loop(lambda: translate(body, call.tenant), ms=len(body.raw) / JSON_BYTES_PER_MS)

    def candidates(self, ready: Ready, without: Container[str] = ()) -> list[Candidate]:
        """The engines that could serve the request now, with what placement knows of each."""
        found = ready.pool.candidates(
            ready.chain, ready.prompt, lora=ready.lora, session=ready.session, without=without
        )
        return found if ready.home is None else [each for each in found if each.engine == ready.home]

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

    def _may_retry(self, call: Call, failures: Collection[EngineError]) -> bool:
        """Whether another engine may be tried after these failures."""
        repeatable = call.body is None or isinstance(call.body, JsonBody)  # a streamed body is gone
        dropped = sum(isinstance(error, EngineUnavailable) and error.dropped for error in failures)
        return repeatable and dropped < MAX_DROPPED and len(failures) <= self.retries

    async def run_on(self, ready: Ready, placement: Placement, reply: Reply, record: RequestRecord) -> None:
        """Leases the placed engine, sends the request there, and audits the prediction.

        Raises:
            EngineUnavailable, EngineRejected: the engine failed before the answer began.
        """
        record.placement, pool, call = placement, ready.pool, ready.call
        known, engine = ready.prompt is not None and ready.prompt.whole, pool.engines[placement.engine]

        def began(answer: IncomingResponse) -> None:
            lease.first_byte(answer, streamed=call.streams)
            record.first_byte_s = lease.first_byte_s  # now, because the client may leave before the end

        with pool.lease(
            placement, ready.chain, streams=call.streams, known=known, session=ready.session
        ) as lease:
            engine.salts.note(self.tenants.owner(ready.salt), ready.salt)
            with lease.patience():
                await lease.gather()
                async with self._hold(engine, ready) as hold:
                    await look_below(pool, engine, lease, ready.prompt, ready.chain)
                    placement = record.placement = lease.refine(hold)
                    record.note = hold.note
                    if ready.translation is not None:
                        ready.translation.predicted = _predicted(ready, placement)
                    reply.on_start = lambda: _forget_bodies(call, hold)
                    outcome = await self.forwarder.forward(
                        engine.adapter,
                        call,
                        hold,
                        reply,
                        _headers(call, placement, hold, reply),
                        began,
                    )
            lease.report = Report(outcome.cached_tokens, outcome.output_tokens, outcome.prefill)
            _note_outcome(record, outcome)
            self._check_tokens(pool, engine, hold, record)
            lease.succeeded = outcome.error is None and record.tokens_agree is not False
            if lease.succeeded:
                expect_below(pool, engine, ready.chain)
            if outcome.error is not None and outcome.status < 400:  # noqa: PLR2004 - HTTP
                engine.suspect(EngineUnavailable(outcome.error))
            is_known = ready.prompt is not None and placement.firm and record.tokens_agree is not False
            if self.ingest is not None and is_known and outcome.cached_tokens is not None:
                predicted, reported = placement.predicted_tokens, outcome.cached_tokens
                self.ingest.audit(engine, predicted, reported, evicted_since=lease.evicted_since)

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
        """The request's hold on its engine. When reuse is off, the adapter is not involved."""
        call, prompt, body = ready.call, ready.prompt, _body_for(engine, ready)
        if self.ingest is None:
            return nullcontext(Hold(body))
        if prompt is None or not prompt.whole:
            return engine.adapter.hold(call.route, body, None)
        return engine.adapter.hold(call.route, body, replace(prompt.kv, retention=ready.retention))


def _note_failure(engine: Engine, error: EngineError) -> None:
    if isinstance(error, EngineRejected):
        log.warning("the engine refused a request", engine=engine.id, status=error.status, error=str(error))
    else:
        engine.suspect(error)


def _instance_of(engine: Engine | None) -> str | None:
    """The process that it is now; None if it is gone, or has not connected."""
    return engine.info.instance if engine is not None and engine.info is not None else None


def _no_response(call: Call, name: str, why: str = "") -> NotFound:
    """The error for a response that cannot be reached, whether it never was or is another tenant's."""
    if call.route == RESPONSES_PATH:
        return NotFound(
            f"Previous response with id {name!r} not found{why}.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return NotFound(f"Response with id {name!r} not found{why}.")


@contextmanager
def _in_the_words_of(translation: Translation) -> Iterator[None]:
    """Lets errors of the block name the client's fields instead of those of the chat."""
    try:
        yield
    except ANSWERED as error:
        param = getattr(error, "param", None)
        error.param = param and translation.param(param)  # type: ignore[union-attr]  # most have one
        raise


async def _answer_count(ready: Ready, translation: Translation, reply: Reply, record: RequestRecord) -> None:
    """Answers how long a prompt is.

    Raises:
        NotSupported: it is not known here.
    """
    if ready.prompt is None or not ready.prompt.whole:
        raise NotSupported(
            Capability.TOKENIZE,
            engine=next(iter(ready.pool.engines), ready.pool.model),
            instead="kvpin cannot count the tokens of this prompt; name the tokenizer with tokenizer=",
        )
    record.status, record.prompt = 200, None  # no engine computed it: later prompts are not compared with it
    id_headers = [(name.encode(), ready.call.answer_id.encode()) for name in reply.dialect.id_headers]
    await reply.start(record.status, [(b"content-type", b"application/json"), *id_headers])
    await reply.finish(translation.count(len(ready.prompt.token_ids)))


def _predicted(ready: Ready, placement: Placement) -> Predicted:
    """What is known of the prompt; nothing of one that is only known in part."""
    prompt = ready.prompt
    if prompt is None or not prompt.whole:
        return Predicted()
    return Predicted(len(prompt.token_ids), placement.predicted_tokens)


def _body_for(engine: Engine, ready: Ready) -> RequestBody:
    """The client's body, with the tenant's salt and the engine's own model name where these differ. A LoRA
    adapter has the same name on every engine."""
    call, pool = ready.call, ready.pool
    if not isinstance(call.body, JsonBody):
        return call.body
    changes = {}
    if ready.salt != call.body.get("cache_salt") and engine.can(Capability.CACHE_SALT):
        changes["cache_salt"] = ready.salt
    if engine.info is not None and call.model == pool.model != engine.info.model:
        changes["model"] = engine.info.model
    return call.body.replace(**changes) if changes else call.body


def _forget_bodies(call: Call, hold: Hold) -> None:
    """Frees a request's body, which no engine gets any more. A stream may run for minutes."""
    for body in {call.body, hold.body}:
        if isinstance(body, JsonBody):
            body.forget()


def _final(failures: Sequence[EngineError]) -> EngineRejected | EngineFailed:
    """The client's error when every engine that was asked failed."""
    last = failures[-1]
    failed = EngineFailed(f"{len(failures)} engine(s) failed this request; the last said: {last}")
    error = last if isinstance(last, EngineRejected) else failed
    if len(failures) > 1 and not RETRY_HEADERS.intersection(error.headers):
        # kvpin has retried already: more retries would only add load.
        error.headers = {**error.headers, "x-should-retry": "false"}
    return error


def _headers(call: Call, placement: Placement, hold: Hold, reply: Reply) -> dict[str, str]:
    """The headers kvpin adds to the answer."""
    headers = {
        **dict.fromkeys(reply.dialect.id_headers, call.answer_id),
        "x-kvpin-engine": placement.engine,
        "x-kvpin-predicted-tokens": str(placement.predicted_tokens),
    }
    return {**headers, "x-kvpin-note": hold.note} if hold.note else headers


def _note_outcome(record: RequestRecord, outcome: Outcome) -> None:
    record.status = outcome.status
    record.reported_tokens, record.output_tokens = outcome.cached_tokens, outcome.output_tokens
    record.error = outcome.error
