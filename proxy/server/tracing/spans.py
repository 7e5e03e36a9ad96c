"""Names and attributes of spans, as OpenTelemetry's conventions for HTTP and generative AI have them.

No prompt text, no text of errors, no query strings: these may hold what clients wrote.

Conventions: https://opentelemetry.io/docs/specs/semconv/http/ and
https://github.com/open-telemetry/semantic-conventions-genai (in development)
"""

from __future__ import annotations

from urllib.parse import urlsplit

from engine_adapter import NATIVE_ROUTES, EngineSpec, base_url
from proxy.core.first_byte import Part
from proxy.core.placement.decision import Placement
from proxy.observe.reasons import reason_of
from proxy.observe.reuse import available_tokens
from proxy.request.calls import PROMPT_ROUTES
from proxy.request.records import RequestRecord
from proxy.steps.forward import Forwarded

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
        attributes[f"kvpin.first_byte.{_word(part)}_s"] = seconds
    return attributes


def _word(part: Part) -> str:
    return part.value.replace(" ", "_")
