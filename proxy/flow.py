"""The read path: `Flow._live` takes a request from step to step, to the end of its life.

    prepare   request → parse → render + tokenise → block chain
    place     index.match → cost of each engine → the cheapest; wait for a turn if all are busy
    run       lease → gather → hold → forward → audit → release      (proxy/steps/attempt.py)
    end       the client knows how it ended

From the socket to here: `Http1Protocol` → `DataPlane.serve` (api/openai.py) → `serve` (api/fan_out/, which
splits some requests) → `Flow.serve`. From here to the engine: `Attempts.run` → `Attempt.run` →
`HttpTransport.send`.

`core/life.py` decides which failed attempt is repeated on another engine (`Life.failed`), and how long each
phase may last. kvpin's own requests take the same path: warming, and prompts that several choices share. KV
on a lower tier is restored by the engine or by its adapter's `hold`; the placement's cost includes that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine_adapter import Capability, EngineLate, EngineLost, JsonBody, NotSupported
from proxy.core.life import Cause, RetryBudget, Rules
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.placement.scores import TIE_S
from proxy.errors import (
    ANSWERED,
    ModelRefused,
    Overloaded,
    TimeLimit,
    TooLong,
    cause_of,
    message_of,
    status_of,
)
from proxy.fleet.engine import TOKENS_PER_BLOCK
from proxy.fleet.fleet import Fleet
from proxy.request.calls import Call, Reply
from proxy.request.comparison import Comparison, Diagnose
from proxy.request.diagnostics import APIS, Api, IdNoted, diagnosed, writes_counted
from proxy.request.engine_errors import NOT_HERE, final_error
from proxy.request.gate import Admission, deadline_of, priority_of, prompt_tokens_of, tokens_of
from proxy.request.known_routes import is_known
from proxy.request.normalising import ReasoningSeen
from proxy.request.records import RequestRecord, RequestRecords
from proxy.request.stages import pairs
from proxy.request.tenants import Tenants
from proxy.request.translate import CHAT_PATH, Translation
from proxy.request.values_back import ValuesBack, answers_json
from proxy.steps.attempt import Attempts
from proxy.steps.preparation import Preparation, Ready
from proxy.steps.request import Request

# Status of a request whose client left, as in nginx.
CLIENT_LEFT = 499
_LEFT = {
    Cause.CLIENT_LEFT: "the client left",
    Cause.CLIENT_SLOW: "the client took its answer too slowly",
    Cause.OUR_LIMIT: "the request took longer than kvpin's limit, timeouts.total_s",
    Cause.PART_FAILED: "another part of the request failed",
    Cause.STOPPING: "kvpin stopped",
}
# Of an unknown path, they say nothing of the engines.
_REJECTIONS = (Cause.ENGINE_REJECTED, Cause.ENGINE_LACKS)
# Of OpenAI's `prompt_cache_options`, `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_breakpoint`.
_CACHE_FIELDS = b'"prompt_cache_'


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves data-plane requests."""

    fleet: Fleet  # the engines
    preparation: Preparation  # reads requests as far as placement needs it
    attempts: Attempts  # runs requests on engines
    tenants: Tenants  # tenant → cache salt
    requests: RequestRecords  # keeps a record of each request
    rules: Rules  # the limits of a request's life
    observe: Callable[[RequestRecord], None]  # called with each finished record, for metrics
    # Called whenever a recorded request is placed on an engine, before it is sent there.
    placed: Callable[[RequestRecord, Placement], None] = lambda _record, _placement: None
    wait_s: float = 2.0  # how long a request waits when no engine takes requests: clients retry by themselves
    budget: RetryBudget = field(default_factory=RetryBudget)  # retries of all requests together

    @property
    def comparison(self) -> Comparison:
        """Tells why the cache of a request missed."""
        return Comparison(self.requests, self.fleet.engines, TOKENS_PER_BLOCK)

    async def serve(self, call: Call, reply: Reply, admitted: Admission) -> RequestRecord:
        """Answers a request. The caller closes `admitted`. Raises ProxyError or EngineError if it failed
        before the answer began."""
        record = RequestRecord.of(call)
        record.came = admitted.came
        reply.recorded, reply.on_begin, reply.on_end = True, admitted.free_body, admitted.close
        self.budget.requested()
        try:
            self._keep_for_diagnosis(call, record, reply)
            await self._live(Request(call, reply, record, admitted, self.rules, self.budget))
        except ANSWERED as error:
            record.status, record.error = status_of(error), message_of(error)
            record.cause = record.cause or cause_of(error)  # it has one if its life had begun
            if isinstance(error, ModelRefused):
                record.refusal = error.refusal
            raise
        except asyncio.CancelledError as cancelled:
            if reply.complete:  # its client has left with the whole answer
                record.status = reply.status
            else:
                record.status, record.error = CLIENT_LEFT, _LEFT[_why(cancelled)]
            raise
        else:
            return record
        finally:
            record.duration_s, record.events = time.monotonic() - record.arrived, reply.events
            if reply.completed is not None:
                record.answered_s = reply.completed - record.arrived
            if admitted.quota is not None:
                admitted.spend(record.answer_tokens)
            if record.cause in _REJECTIONS and record.status in NOT_HERE and not is_known(call.route):
                record.cause = Cause.INVALID
            self.requests.add(record)
            record.headers = call.headers
            self.observe(record)
            record.chain = record.headers = None  # the log keeps records for long

    async def run(self, ready: Ready, reply: Reply, record: RequestRecord, admitted: Admission) -> None:
        """Runs a request of kvpin's own, which was prepared. It waits for its turn like any other. Raises
        what `serve` raises."""
        request = Request(ready.call, reply, record, admitted, self.rules, self.budget)
        request.is_ready(ready)
        request.prepared()
        await self._live(request)

    # --- The life -------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> None:
        """Takes a request from step to step, to the end of its life."""
        request.watch()
        try:
            while request.cause is None:
                try:
                    if request.ready is None:
                        await self._prepare(request)
                    elif await self._place(request):
                        await self.attempts.run(request)
                    else:
                        request.blame(request.none_left())
                except asyncio.CancelledError:
                    if (interrupt := request.interrupted()) is None:  # somebody else than its timer did it
                        raise
                    self._late(request, interrupt)
                except ANSWERED as failure:
                    self._failed(request, failure)
            self._tell(request)
        except asyncio.CancelledError as cancelled:
            request.ended(Cause.ANSWERED if request.reply.complete else _why(cancelled))
            raise
        finally:
            self._close(request)

    def _tell(self, request: Request) -> None:
        """Tells the client why it has no whole answer, if it has none: raises the error while the client has
        nothing, and breaks its stream off if it has."""
        if (error := self._error_of(request)) is None:
            return
        reply, ready = request.reply, request.ready
        try:
            if not (reply.is_events or reply.has_written):
                if ready is not None and ready.translation is not None:
                    ready.translation.wording.reword(error)
                raise error
            request.record.status, request.record.error = reply.status, str(error)
            reply.break_off(error, request.call.answer_id)
        finally:
            # A traceback holds this frame: the body would stay until garbage collection.
            del error, ready

    def _failed(self, request: Request, error: Exception) -> None:
        """A step raised an error: another engine is tried, or it is the end."""
        # The error of a step that was interrupted may take the interruption's place, or the client's.
        cause = request.interrupted()
        if cause is None and request.is_cancelled:
            raise asyncio.CancelledError from error
        request.fails(cause or request.cause_for(error), error)

    def _late(self, request: Request, cause: Cause) -> None:
        """A step took too long: another engine is tried, or it is the end."""
        reply = request.reply
        if reply.complete:  # the engine does not end it, or its client does not read the rest
            reply.end()
            request.record.status = reply.status
            request.answered()
        else:
            request.fails(cause, self._too_late(request, cause))

    def _too_late(self, request: Request, cause: Cause) -> Exception:
        """The error of a step that took too long."""
        rules, reply = self.rules, request.reply
        first_byte = f"{rules.first_byte_s:g} s (timeouts.first_byte_s)"
        match cause:
            case Cause.ENGINE_LATE:
                return EngineLate(f"the engine did not answer within {first_byte}")
            case Cause.ENGINE_SILENT:
                return EngineLate(f"nothing of the answer came for {rules.idle_s:g} s (timeouts.idle_s)")
            case Cause.ENGINE_LOST:
                when = "in mid-answer" if reply.started else "before it answered"
                return EngineLost(f"the engine was lost {when}")
            case Cause.ENGINE_BUSY:
                text = f"the engine had no room for the request within {first_byte}"
                return Overloaded(text, retry_after_s=1)
            case _:
                if rules.total_s is not None and time.monotonic() - request.arrived >= rules.total_s:
                    return longer_than_total(rules.total_s)
                return TimeLimit(
                    f"the request reached no engine within {rules.placed_s:g} s "
                    "(timeouts.first_byte_s + limits.queue_s)"
                )

    def _error_of(self, request: Request) -> Exception | None:
        """The error that the client gets; None if it has its answer."""
        cause, error = request.cause, request.error
        if cause is None or cause is Cause.ANSWERED or (cause is Cause.ENGINE_REJECTED and error is None):
            return None
        if request.attempts and cause.elsewhere and not request.reply.started:
            return final_error([each.error for each in request.attempts])
        if error is None:
            ready = request.ready
            return self.fleet.none_ready(*((None, None) if ready is None else (ready.pool, ready.lora)))
        return error

    def _close(self, request: Request) -> None:
        """Frees what the request holds, however it ended."""
        request.stop()
        if request.kept:
            self.attempts.room.give_back(request.kept)
        request.record.cause = request.ended()
        request.first = request.ready = request.error = None
        request.attempts = ()  # their errors hold frames, which hold the request

    # --- Prepare --------------------------------------------------------------------------------------

    async def _prepare(self, request: Request) -> None:
        record, reply = request.record, request.reply
        try:
            ready = await self.preparation.prepare(request.call)
        except TooLong as error:
            request.admitted.spend_prompt(error.tokens)
            raise
        if isinstance(ready.asked, JsonBody):
            record.normalised = list(ready.rules)
            self.requests.keep_source(record, ready.asked.raw)  # later requests are compared with this prompt
            ready = replace(ready, asked=None)
        request.is_ready(ready)
        record.prepared = time.monotonic()
        call = ready.call
        record.prompt, record.chain = ready.prompt, ready.chain
        record.changed = list(call.changed)
        record.served_as, record.lora = ready.pool.model, ready.lora
        if request.admitted.quota is not None:
            request.admitted.spend_prompt(prompt_tokens_of(call, record.n_tokens))
        if (translation := ready.translation) is not None:
            if translation.source is not None:  # with the items that the body only names
                self.requests.keep_source(record, translation.source.raw)
            if translation.counts:
                await _answer_count(ready, translation, reply, record)
                request.answered()
                return
        self._lead(reply, ready, record)
        request.prepared(can_repeat=call.body is None or isinstance(call.body, JsonBody))

    def _lead(self, reply: Reply, ready: Ready, record: RequestRecord) -> None:
        """Leads the answer through what changes or reads it on its way to the client."""
        call, translation, keep, stages = ready.call, ready.translation, ready.keep, reply.stages
        if translation is not None:
            if ready.values:
                stages.insert(0, _values_back(ready))  # a response repeats its instructions and tools
            stages.insert(0, translation)
        elif call.socket is None:
            noter = self.preparation.destinations.noter(call, lambda: record.attempts[-1])
            if noter is not None:
                stages.insert(0, noter)
        if keep is not None:
            stages.insert(0, ReasoningSeen(keep))
        if ready.values:
            stages.insert(0, _values_back(ready))

    def _keep_for_diagnosis(self, call: Call, record: RequestRecord, reply: Reply) -> None:
        """Keeps the body. Notes the answer's id, and adds to it what the client asks for: diagnostics, and
        what the cache got. Raises BadRequest if the client names the earlier answer by another type."""
        body = call.body
        if not isinstance(body, JsonBody):
            return
        self.requests.keep_source(record, body.raw)
        if (api := APIS.get(record.route)) is None:
            return
        asked = api.asked(body, call.headers)
        reply.stages.insert(0, IdNoted(record))
        if asked is not None:
            self._diagnose(api, asked, record, reply)
        if not body.is_plain and record.route == CHAT_PATH and _CACHE_FIELDS in body.raw:
            counted = writes_counted(lambda: self.comparison.tokens_per_block(record))
            reply.stages.insert(0, counted)

    def _diagnose(self, api: Api, asked: str, record: RequestRecord, reply: Reply) -> None:
        diagnose: Diagnose | None = None

        async def compare() -> None:
            nonlocal diagnose
            diagnose = await self.comparison.with_answer(asked, record)

        reply.before = compare
        reply.stages.insert(0, diagnosed(api, lambda: diagnose))

    # --- Place ----------------------------------------------------------------------------------------

    async def _place(self, request: Request) -> bool:
        """Chooses the engine to try next. Waits where all engines are too busy. Returns False if no engine is
        left. Raises Overloaded if the wait takes too long."""
        placement = await self._placement(request)
        if placement is None:
            return False
        record, engine = request.record, placement.chosen.engine
        record.placement = request.placement = placement
        record.attempts.append(engine)
        if request.reply.recorded:  # else nothing will tell of its end
            self.placed(record, placement)
        request.placed(engine)
        return True

    async def _placement(self, request: Request) -> Placement | None:
        """The engine to try next; None if there is none. The request gets the prompt that it makes."""
        has_waited = bool(request.attempts)  # a retry does not wait again
        while True:
            ready = request.first if request.told is None else request.ready
            assert ready is not None  # noqa: S101 - it was prepared
            if ready.renderings is not ready.pool.renderings and request.told is None:
                ready = await self._renewed(request, ready)
            asked = [each.engine for each in request.attempts] if request.attempts else ()
            candidates = self.candidates(ready, asked)
            if asked and not candidates:  # one that did not get the request may, if no other engine is left
                candidates = self.candidates(ready, request.tried)
            if not candidates and not request.tried and ready.pool.is_coming_back:
                ready, candidates = await self._awaited(request, ready)
            if not candidates:
                return None
            placement, pool = self.choose(ready, candidates), ready.pool
            if has_waited:
                soonest = pool.at_once(placement, candidates)
                placement = placement if soonest is candidates else self.choose(ready, soonest)
                break
            if not (pool.is_busy(placement, candidates) or (pool.line and pool.line.competes(ready.needs))):
                break
            await self._in_turn(ready, request.record)
            has_waited = True  # engines hold other KV by now
        if ready.others:
            ready = ready.for_engine(ready.pool.engines[placement.engine])
            request.record.prompt, request.record.chain = ready.prompt, ready.chain
        request.ready, request.n_candidates = ready, len(candidates)
        return placement

    def choose(self, ready: Ready, candidates: Sequence[Candidate]) -> Placement:
        """The candidate that the request goes to, or the pair of engines. An answer of a pair may come too
        late to be used: then another engine has to be tried."""
        if ready.others:
            return self._choose_prompt(ready, candidates)
        pool, chain = ready.pool, ready.chain
        if not pool.passes_kv or chain is None or not self.rules.retries:
            return pool.place(candidates, chain)
        prefillers = pool.prefillers(candidates, chain, ready.lora, ready.moves_by, ready.rendering)
        return pool.place(candidates, chain, prefillers)

    def _choose_prompt(self, ready: Ready, candidates: Sequence[Candidate]) -> Placement:
        """The cheapest choice, where engines make different tokens of the prompt; of equal ones, that of the
        engine that was chosen longest ago."""
        engines = ready.pool.engines
        found: list[Placement] = []
        for each in (ready, *ready.others):
            own = [one for one in candidates if engines[one.engine].prompts is each.rendering]
            if own:  # without a prompt, its costs are those of the others
                way = each if each.chain is not None else ready
                found.append(self.choose(replace(way, others=(), rendering=each.rendering), own))
        costs = [(placement.chosen.total_s // TIE_S, placement.chosen.turn) for placement in found]
        placement = found[costs.index(min(costs))]
        chosen = engines[placement.engine].prompts
        unlike = [one.engine for one in candidates if engines[one.engine].prompts is not chosen]
        return replace(placement, unlike=tuple(unlike))

    def candidates(self, ready: Ready, without: Container[str] = ()) -> list[Candidate]:
        """The engines that could serve the request now, with what placement knows of each."""
        found = ready.pool.candidates(
            ready.chain, ready.prompt, ready.own_needs, session=ready.session, without=without
        )
        for each in ready.others:
            found += self.candidates(each, without)
        return found

    async def _awaited(self, request: Request, ready: Ready) -> tuple[Ready, list[Candidate]]:
        """The request and its candidates, once an engine takes requests: waits for one up to `wait_s`."""
        found: list[Candidate] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(self.wait_s):
                while not found:
                    await self.fleet.until_ready()
                    ready = await self._renewed(request, ready)
                    found = self.candidates(ready)
        return ready, found

    async def _renewed(self, request: Request, ready: Ready) -> Ready:
        """The request, with a prompt for each builder that its pool has now. A stream goes on only on engines
        that make the same tokens as the one that began it."""
        while request.told is None and ready.renderings is not None and ready.is_stale:
            ready = await self.preparation.prepare_again(ready)
            request.is_ready(ready)
            request.record.prompt, request.record.chain = ready.prompt, ready.chain
        return ready

    async def _in_turn(self, ready: Ready, record: RequestRecord) -> None:
        """Waits for the request's turn on an engine that is not too busy. Also returns when no engine is
        left. Raises Overloaded if that takes too long."""
        call, pool, began = ready.call, ready.pool, time.monotonic()

        def may_go() -> bool:
            candidates = self.candidates(ready)
            if ready.is_stale or not candidates:
                return True
            placement, waited_s = self.choose(ready, candidates), time.monotonic() - began
            return not pool.is_busy(placement, candidates, waited_s, deadline_of(call))

        try:
            await pool.line.wait(
                call.tenant,
                ready.needs,
                priority=priority_of(call) if ready.priority is None else ready.priority,
                tokens=tokens_of(call, record.n_tokens),
                size=len(call.body.raw) if isinstance(call.body, JsonBody) else 0,
                deadline_s=deadline_of(call),
                may_go=may_go,
            )
        finally:
            record.queued_s = time.monotonic() - began


def longer_than_total(total_s: float) -> TimeLimit:
    """The error of a request that took longer than `timeouts.total_s`."""
    return TimeLimit(f"the request took longer than {total_s:g} s, kvpin's limit (timeouts.total_s)")


def _why(cancelled: asyncio.CancelledError) -> Cause:
    """The cause given by the caller that cancelled the request's task."""
    why = cancelled.args[0] if cancelled.args else None
    return why if isinstance(why, Cause) else Cause.CLIENT_LEFT


def _values_back(ready: Ready) -> ValuesBack:
    body = ready.call.body
    return ValuesBack(ready.values, answers_json=isinstance(body, JsonBody) and answers_json(body))


async def _answer_count(ready: Ready, translation: Translation, reply: Reply, record: RequestRecord) -> None:
    """Answers how long a prompt is. Raises NotSupported if that is not known here."""
    if ready.prompt is None or not ready.prompt.whole:
        raise NotSupported(
            Capability.TOKENIZE.value,
            engine=next(iter(ready.pool.engines), ready.pool.model),
            instead="kvpin cannot count the tokens of this prompt; name the tokenizer with tokenizer=",
        )
    record.status, record.prompt = 200, None  # no engine computed it: later prompts are not compared with it
    id_headers = [(name.encode(), ready.call.answer_id.encode()) for name in reply.dialect.id_headers]
    headers = [(b"content-type", b"application/json"), *id_headers, *pairs(ready.told)]
    await reply.start(record.status, headers)
    await reply.finish(translation.count(len(ready.prompt.token_ids)))
