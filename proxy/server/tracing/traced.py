"""The data plane and the flow with a span around each step of a request.

    POST /v1/chat/completions     from the request's head to the end of its answer
        parse                     receive and parse the body
        tokenise                  render, tokenise, hash
        place                     look up, compute costs, decide
            queue                 wait for busy engines
        hold                      wait for another request's prefix and for the adapter
        first leg                 another engine computes the prompt
        chat qwen3                the engine's part
            first leg             the half that another engine serves at the same time

The trace goes on from the client's `traceparent`, and the engine gets one that leads to the last span. Each
attempt has spans of its own, and so has each part of a request for several answers.

While tracing is off, none of this is in the way of a request: `Flow` and `DataPlane` serve it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from msgspec.structs import replace
from opentelemetry.trace import (
    INVALID_SPAN,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.contextvars import STRUCTLOG_KEY_PREFIX

from engine_adapter import NATIVE_ROUTES, EngineSpec, Headers, JsonBody, RequestBody, base_url
from proxy.api.openai import DataPlane
from proxy.core.placement.decision import Pair, Placement
from proxy.core.reasons import reason_of
from proxy.fleet.lease import Lease
from proxy.flow import CLIENT_LEFT, Flow
from proxy.http.exchange import Exchange
from proxy.observe.metrics import available_tokens
from proxy.request.calls import PROMPT_ROUTES, Call
from proxy.request.gate import Admission
from proxy.request.records import RequestRecord
from proxy.request.tenants import ApiKey
from proxy.steps.attempt import Attempts
from proxy.steps.forward import Attempt, Forwarded
from proxy.steps.other_leg import FirstLeg, PromptHalf
from proxy.steps.preparation import Ready
from proxy.steps.request import Request

_W3C = TraceContextTextMapPropagator()
_W3C_HEADERS = frozenset(name.encode() for name in _W3C.fields)
_SERVER_ERROR = 500
# The ids on the log lines of a request; see `_OWN_ID` in proxy/api/openai.py.
_TRACE_ID = ContextVar[str](f"{STRUCTLOG_KEY_PREFIX}trace_id")
_SPAN_ID = ContextVar[str](f"{STRUCTLOG_KEY_PREFIX}span_id")


def trace_id() -> str | None:
    """The id of the running request's trace, if the trace is kept."""
    context = get_current_span().get_span_context()
    return format_trace_id(context.trace_id) if context.trace_flags.sampled else None


@contextmanager
def _span(
    tracer: Tracer, name: str, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes | None = None
) -> Iterator[Span]:
    """A span around a step of a request whose trace is kept."""
    if not get_current_span().is_recording():
        yield INVALID_SPAN
        return
    with tracer.start_as_current_span(
        name, kind=kind, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except (Exception, asyncio.CancelledError) as error:
            # Not its text, which may repeat the prompt.
            _fail(span, type(error).__name__)
            raise


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


@dataclass(frozen=True)
class TracedDataPlane(DataPlane):
    """A data plane whose requests have traces."""

    tracer: Tracer = field(kw_only=True)

    async def serve(self, exchange: Exchange) -> None:
        """Serves a request in a span that goes on from the client's."""
        path = exchange.target.partition(b"?")[0].decode("latin-1")
        with self.tracer.start_as_current_span(
            f"{exchange.method} {route_name(path)}",
            context=_W3C.extract(exchange.headers),
            kind=SpanKind.SERVER,
            attributes=of_exchange(exchange.method, path),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            context = span.get_span_context()
            _TRACE_ID.set(format_trace_id(context.trace_id))
            _SPAN_ID.set(format_span_id(context.span_id))
            exchange.headers = _leading_here(exchange.headers)  # another kvpin may answer it
            try:
                await super().serve(exchange)
            finally:
                status = CLIENT_LEFT if exchange.status is None else exchange.status
                span.set_attribute("http.response.status_code", status)
                if status >= _SERVER_ERROR:
                    _fail(span, str(status))

    async def _body(self, exchange: Exchange, admitted: Admission) -> tuple[JsonBody | None, tuple[str, ...]]:
        with _span(self.tracer, PARSE):
            return await super()._body(exchange, admitted)

    def _call(
        self,
        exchange: Exchange,
        path: str,
        key: ApiKey | None,
        own_id: str,
        client_id: str | None,
        body: RequestBody,
        changed: tuple[str, ...] = (),
    ) -> Call:
        span = get_current_span()
        span.set_attribute("kvpin.request.id", own_id)
        if key is not None:
            span.set_attribute("kvpin.tenant", key.tenant)
        return super()._call(exchange, path, key, own_id, client_id, body, changed)


@dataclass(frozen=True)
class TracedFlow(Flow):
    """A flow whose steps have spans."""

    tracer: Tracer = field(kw_only=True)

    async def prepare(self, call: Call) -> Ready:
        """Prepares a request in a span."""
        with _span(self.tracer, TOKENISE) as span:
            ready = await super().prepare(call)
            if ready.prompt is not None:
                span.set_attribute("gen_ai.usage.input_tokens", len(ready.prompt.token_ids))
            return ready

    async def _placement(self, request: Request) -> Placement | None:
        with _span(self.tracer, PLACE) as span:
            placed = await super()._placement(request)
            if placed is not None:
                span.set_attributes(of_placement(placed, request.record))
            return placed

    async def _in_turn(self, ready: Ready, record: RequestRecord) -> None:
        with _span(self.tracer, QUEUE):
            await super()._in_turn(ready, record)


@dataclass(frozen=True)
class TracedAttempts(Attempts):
    """Runs attempts that have spans."""

    tracer: Tracer = field(kw_only=True)

    async def first_leg(self, attempt: Attempt, pair: Pair) -> FirstLeg | None:
        """Lets another engine compute the prompt, within a span."""
        with _span(self.tracer, FIRST_LEG, SpanKind.CLIENT, {"kvpin.engine": pair.prefill.engine}):
            return await super().first_leg(replace(attempt, ready=_leading_on(attempt.ready)), pair)

    async def half_leg(self, half: PromptHalf, ready: Ready) -> None:
        """Lets another engine compute the prompt at the same time, within a span."""
        with _span(self.tracer, FIRST_LEG, SpanKind.CLIENT, {"kvpin.engine": half.source}):
            await super().half_leg(half, _leading_on(ready))

    async def forward(self, attempt: Attempt) -> Forwarded:
        """Sends the request to the engine that it holds, within a span."""
        self._add_hold(attempt.lease)
        record = attempt.request.record
        with _span(self.tracer, engine_span_name(record), SpanKind.CLIENT) as span:
            if span.is_recording():
                span.set_attributes(of_engine_request(record, attempt.engine.adapter.spec))
            answer = await super().forward(replace(attempt, ready=_leading_on(attempt.ready)))
            if span.is_recording():
                span.set_attributes(of_answer(record, answer))
                if answer.error is not None:
                    _fail(span, str(answer.status))
            return answer

    def _add_hold(self, lease: Lease) -> None:
        """Adds the span from a request's placement until now. It is over only once the hold is entered."""
        if get_current_span().is_recording():
            began = time.time_ns() - round((time.monotonic() - lease.started) * 1e9)
            self.tracer.start_span(HOLD, start_time=began).end()


def _leading_on(ready: Ready) -> Ready:
    """The request, whose engine goes on with the running span."""
    return replace(ready, call=replace(ready.call, headers=_leading_here(ready.call.headers)))


def _leading_here(headers: Headers) -> Headers:
    """The headers with the running span in their trace context."""
    here: dict[str, str] = {}
    _W3C.inject(here)
    kept = [pair for pair in headers.raw if pair[0] not in _W3C_HEADERS]
    return Headers(kept + Headers.of(here.items()).raw)


Attributes = dict[str, str | int | float | bool]

# Names of the other spans: kvpin's own steps.
PARSE, TOKENISE, PLACE, QUEUE, HOLD, FIRST_LEG = "parse", "tokenise", "place", "queue", "hold", "first leg"
# Route → the operation that it asks of the model.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_FORWARD = "forward"
_OTHER_ROUTE = "/v1/*"
# Characters of a path in a span: thousands of spans wait while no collector takes them.
_MOST_PATH = 256


def route_name(path: str) -> str:
    """The path, if it names no single thing: else a span's name would be another one for each of them."""
    is_route = path in PROMPT_ROUTES or path in _OPERATIONS or path in NATIVE_ROUTES
    return path if is_route else _OTHER_ROUTE


def of_exchange(method: str, path: str) -> Attributes:
    """The attributes of a client's request."""
    return {"http.request.method": method, "url.path": path[:_MOST_PATH], "http.route": route_name(path)}


def engine_span_name(record: RequestRecord) -> str:
    """`chat qwen3`; for requests that are none of a model's operations, `forward qwen3`."""
    return f"{_OPERATIONS.get(record.route, _FORWARD)} {record.lora or record.served_as}"


def of_placement(placement: Placement, record: RequestRecord) -> Attributes:
    """The attributes of a decision."""
    attributes: Attributes = {"kvpin.engine": placement.engine, "kvpin.reason": reason_of(placement).value}
    if record.prompt is not None:
        attributes["kvpin.available_tokens"] = available_tokens(placement)
        attributes["kvpin.predicted_tokens"] = placement.predicted_tokens
        attributes["kvpin.expected_first_token_s"] = placement.chosen.first_token_s
    return attributes


def of_engine_request(record: RequestRecord, spec: EngineSpec) -> Attributes:
    """The attributes of a request to an engine, before its answer."""
    engine = urlsplit(base_url(spec))
    attributes: Attributes = {
        "gen_ai.provider.name": spec.kind,
        "gen_ai.request.model": record.lora or record.served_as or "",
        "server.address": engine.hostname or "",
        "kvpin.engine": spec.id,
        "kvpin.request.id": record.request_id,
    }
    if record.route in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[record.route]
    if engine.port is not None:
        attributes["server.port"] = engine.port
    return attributes


def of_answer(record: RequestRecord, answer: Forwarded) -> Attributes:
    """The attributes of an engine's answer."""
    known = {
        "http.response.status_code": answer.status,
        "gen_ai.usage.input_tokens": record.n_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.usage.cached_tokens,
        "gen_ai.usage.output_tokens": answer.usage.output_tokens,
        "gen_ai.response.time_to_first_chunk": record.first_byte_s if record.stream else None,
    }
    attributes: Attributes = {name: value for name, value in known.items() if value is not None}
    for part, seconds in (record.first_byte_parts or {}).items():
        attributes[f"kvpin.first_byte.{part.value.replace(' ', '_')}_s"] = seconds
    return attributes
