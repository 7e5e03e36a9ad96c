"""The spans of a request.

    POST /v1/chat/completions     from the request's head to the end of its answer
        parse                     receive and parse the body
        tokenise                  render, tokenise, hash
        place                     look up, compute costs, decide
            queue                 wait for busy engines
        hold                      wait for another request's prefix and for the adapter
        first leg                 another engine computes the prompt
        chat qwen3                the engine's part
            first leg             the half that another engine serves at the same time

The trace goes on from the client's `traceparent`, and an engine gets one that leads to the span of its part.
So the first span and those of engines' parts are there while they run, one for each attempt. All others are
made from the request's record afterwards. Each part of a request for several answers has all but `parse`.

While tracing is off, none of this is in the way of a request: `Attempts` and `DataPlane` serve it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.contextvars import STRUCTLOG_KEY_PREFIX

from engine_adapter import NATIVE_ROUTES, EngineSpec, Headers, base_url
from engine_adapter.off_loop import PAYER
from proxy.api.openai import OWN_ID, DataPlane
from proxy.core.placement.decision import Pair
from proxy.core.reasons import reason_of
from proxy.flow import CLIENT_LEFT
from proxy.http.exchange import Exchange
from proxy.observe.metrics import available_tokens
from proxy.request.calls import PROMPT_ROUTES
from proxy.request.records import RequestRecord
from proxy.steps.attempt import Attempts
from proxy.steps.forward import Attempt, Forwarded
from proxy.steps.other_leg import FirstLeg, PromptHalf
from proxy.steps.preparation import Ready

_W3C = TraceContextTextMapPropagator()
_W3C_HEADERS = frozenset(name.encode() for name in _W3C.fields)
_SERVER_ERROR = 500
# The ids on the log lines of a request; see `OWN_ID` in proxy/api/openai.py.
_TRACE_ID = ContextVar[str](f"{STRUCTLOG_KEY_PREFIX}trace_id")
_SPAN_ID = ContextVar[str](f"{STRUCTLOG_KEY_PREFIX}span_id")


@contextmanager
def _span(tracer: trace.Tracer, name: str, attributes: Attributes | None) -> Iterator[trace.Span]:
    """A span around what an engine does for a request whose trace is kept."""
    if not trace.get_current_span().is_recording():
        yield trace.INVALID_SPAN
        return
    with tracer.start_as_current_span(
        name,
        kind=trace.SpanKind.CLIENT,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except (Exception, asyncio.CancelledError) as error:
            # Not its text, which may repeat the prompt.
            _fail(span, type(error).__name__)
            raise


def _fail(span: trace.Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR)


@dataclass(frozen=True, slots=True)
class Traces:
    """Makes spans, which its `tracer` takes."""

    tracer: trace.Tracer

    def data_plane(self, data_plane: DataPlane) -> TracedDataPlane:
        """The data plane, with a span around each request."""
        return TracedDataPlane(data_plane, self.tracer)

    def attempts(self, *given: Any) -> Attempts:  # noqa: ANN401 - the arguments of `Attempts`
        """Runs attempts, with spans around what engines do."""
        return TracedAttempts(*given, tracer=self.tracer)

    def observed(self, record: RequestRecord) -> str | None:
        """Adds the spans of kvpin's own steps to the trace of a request that has just ended. Returns the
        trace's id; None if it is not kept."""
        span = trace.get_current_span()
        if not span.is_recording():
            return None
        if record.duration_s:  # it got to the flow
            self._add_steps(record, record.arrived + record.duration_s)
        return trace.format_trace_id(span.get_span_context().trace_id)

    def _add_steps(self, record: RequestRecord, ended: float) -> None:
        zero = time.time() - time.monotonic()  # one for all: their order stays

        def add(
            name: str, began: float, ended: float, told: Attributes, within: Context | None = None
        ) -> trace.Span:
            start = round((zero + began) * 1e9)
            span = self.tracer.start_span(name, within, attributes=told, start_time=start)
            span.end(round((zero + ended) * 1e9))
            return span

        prepared, waited_s = record.prepared, record.queued_s or 0.0
        if record.came is not None:
            add(PARSE, record.came, record.arrived, {})
        n_tokens = record.n_tokens
        known: Attributes = {"gen_ai.usage.input_tokens": n_tokens} if n_tokens is not None else {}
        add(TOKENISE, record.arrived, prepared or ended, known)
        if prepared is None or not (record.attempts or record.error):
            return
        placed = prepared + waited_s if record.attempts else ended  # on its first engine
        if record.placed is not None and len(record.attempts) == 1:
            placed = record.placed
        place = add(PLACE, prepared, placed, of_placement(record))
        if waited_s:
            add(QUEUE, prepared, prepared + waited_s, {}, trace.set_span_in_context(place))
        if record.moments is not None:
            add(HOLD, record.moments.placed, record.moments.sent, {})


@dataclass(frozen=True, slots=True)
class TracedDataPlane:
    """A data plane whose requests have traces."""

    untraced: DataPlane
    tracer: trace.Tracer

    async def serve(self, exchange: Exchange) -> None:
        """Serves a request in a span that goes on from the client's."""
        path = exchange.target.partition(b"?")[0].decode("latin-1")
        with self.tracer.start_as_current_span(
            f"{exchange.method} {route_name(path)}",
            context=_W3C.extract(exchange.headers),
            kind=trace.SpanKind.SERVER,
            attributes=of_exchange(exchange.method, path),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            context = span.get_span_context()
            _TRACE_ID.set(trace.format_trace_id(context.trace_id))
            _SPAN_ID.set(trace.format_span_id(context.span_id))
            exchange.headers = _leading_here(exchange.headers)  # another kvpin may answer it
            try:
                await self.untraced.serve(exchange)
            finally:
                status = CLIENT_LEFT if exchange.status is None else exchange.status
                span.set_attributes({"http.response.status_code": status, "kvpin.request.id": OWN_ID.get()})
                if (tenant := PAYER.get()) is not None:
                    span.set_attribute("kvpin.tenant", tenant)
                if status >= _SERVER_ERROR:
                    _fail(span, str(status))


@dataclass(frozen=True)
class TracedAttempts(Attempts):
    """Runs attempts that have spans."""

    tracer: trace.Tracer = field(kw_only=True)

    async def first_leg(self, attempt: Attempt, pair: Pair) -> FirstLeg | None:
        """Lets another engine compute the prompt, within a span."""
        with _span(self.tracer, FIRST_LEG, {"kvpin.engine": pair.prefill.engine}):
            return await super().first_leg(replace(attempt, ready=_leading_on(attempt.ready)), pair)

    async def half_leg(self, half: PromptHalf, ready: Ready) -> None:
        """Lets another engine compute the prompt at the same time, within a span."""
        with _span(self.tracer, FIRST_LEG, {"kvpin.engine": half.engine.id}):
            await super().half_leg(half, _leading_on(ready))

    async def forward(self, attempt: Attempt) -> Forwarded:
        """Sends the request to the engine that it holds, within a span."""
        record = attempt.request.record
        known = of_engine_request(record, attempt.engine.adapter.spec)
        with _span(self.tracer, engine_span_name(record), known) as span:
            answer = await super().forward(replace(attempt, ready=_leading_on(attempt.ready)))
            span.set_attributes(of_answer(record, answer))
            if answer.error is not None:
                _fail(span, str(answer.status))
            return answer


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
_MOST_PATH = 256  # characters of a path in a span: thousands of spans wait while no collector takes them


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


def of_placement(record: RequestRecord) -> Attributes:
    """The attributes of a decision."""
    if (placement := record.placement) is None:
        return {}
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
