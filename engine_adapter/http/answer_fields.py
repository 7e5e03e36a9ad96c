"""What answers of engines tell beside their content: errors, in one shape, and token counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE, RawFields, decode_object
from engine_adapter.errors import NO_HEADERS, EngineRejected
from engine_adapter.types import Usage

# --- reads the many shapes of engines' errors into one --------------------------------------------------

# An error that is not JSON may be a whole web page: only its beginning is kept.
_MAX_REASON_BYTES = 500
# Characters of a message that are kept, half of them from its end: engines may repeat the prompt in one, and
# every pattern that reads it costs time.
_MAX_REASON = 32_768
_OPENAIS = ("message", "type", "param", "code")
# llama-server has this type, but not OpenAI's code, which clients look for.
_CODES = {"exceed_context_size_error": "context_length_exceeded"}
_REFUSED = "the model's chat template refuses the request: "
# llama-server answers these with 500: another engine with the same model would do so, too. The JSON error is
# about a field of another type than it expects.
_CLIENTS_FAULT = re.compile(
    r"(image|audio|video) input is not supported|Failed to parse (messages|tools): "
    rf"|\[json\.exception\.type_error\.30\d\] |{_REFUSED}"
)
# llama-servers answer these with 500 after they have generated the whole answer, which their parser does not
# take. Another engine would generate it once more.
_UNPARSED = re.compile(
    r"Failed to parse input at pos|The model produced output that does not match the expected"
)
# An error of a chat template, of llama-servers: lines of the template stand before what is wrong. In releases
# of 2025, they stand behind it.
_SOURCE, _AFTER_SOURCE, _RAISED = " in source:\n", "\nError: ", "Jinja Exception: "
_BEFORE_ROW = re.compile(r"([^\n]+?) at row \d+, column \d+:\n")
# The statuses that errors without one mean by their types: Anthropic's, OpenAI's, vLLM's.
_STATUSES = {
    "invalid_request_error": 400, "BadRequestError": 400, "authentication_error": 401,
    "permission_error": 403, "not_found_error": 404, "NotFoundError": 404, "request_too_large": 413,
    "rate_limit_error": 429, "rate_limit_exceeded": 429, "timeout_error": 504,
    "overloaded_error": 529,
}  # fmt: skip
_ERRORS = range(400, 600)
# An event of a stream that tells an error: it begins so, or its type says so. The text of an answer cannot
# look so: in JSON, its quotes and line feeds are escaped.
_FAILED = re.compile(
    rb"\n(?:error: ?|event: ?(?:error|response\.failed)\r?\ndata: ?|"
    rb'data: ?(?=\{\s*"(?:error"\s*:\s*["{]|type"\s*:\s*"(?:error|response\.failed)")))(\{.*)'
)
# It is the last event, but for `[DONE]`.
_LAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EngineErrorBody:
    """An engine's error.

    Attributes:
        more: further fields of an error in OpenAI's shape.
        is_clients: the request is at fault, whatever status the engine gave.
        is_unparsed: the engine has generated the answer, and cannot put it in the API's form.
        named_status: the status that it names itself; None without one.
    """

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    is_clients: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    is_unparsed: bool = False
    named_status: int | None = None

    def rejection(
        self, status: int | None = None, headers: Mapping[str, str] = NO_HEADERS, *, hint: str = ""
    ) -> EngineRejected:
        """The error as kvpin raises it, with a `hint` at the end of its message. `status`: of the answer;
        None for one that came with status 200."""
        if self.is_clients:
            status = HTTPStatus.BAD_REQUEST
        if self.is_unparsed:  # OpenAI's SDKs would generate the answer twice more
            headers = {**headers, "x-should-retry": "false"}
        return EngineRejected(
            self.message + hint,
            status=status or self.named_status or HTTPStatus.INTERNAL_SERVER_ERROR,
            param=self.param,
            type=self.type,
            code=self.code,
            more=self.more,
            headers=headers,
        )


def read_error(content: bytes) -> EngineErrorBody:
    """Reads OpenAI's nested shape, flat ones (`message`), bare strings and FastAPI's `detail`."""
    try:
        body = msgspec.json.decode(content)
    except UNREADABLE:
        body = content[:_MAX_REASON_BYTES].decode(errors="replace").strip()
    if not isinstance(body, dict):
        return EngineErrorBody(_reason(body))
    response = body.get("response")  # of an event of the Responses API
    inner = body.get("error") or (isinstance(response, dict) and response.get("error")) or body
    fields = inner if isinstance(inner, dict) else {"message": inner}
    text = {name: fields.get(name) for name in ("type", "param", "code")}
    strings = {name: value if isinstance(value, str) else None for name, value in text.items()}
    reason = _reason(fields.get("message") or fields.get("detail"))
    if _CLIENTS_FAULT.match(reason):
        return EngineErrorBody(reason, "invalid_request_error", strings["param"], is_clients=True)
    named = (_status(value) for value in (text["code"], fields.get("status"), text["type"]))
    status = next((each for each in named if each is not None), None)
    code = strings["code"] or _CODES.get(strings["type"] or "")
    more = (
        {name: value for name, value in fields.items() if name not in _OPENAIS} if inner is not body else {}
    )
    return EngineErrorBody(
        reason,
        strings["type"],
        strings["param"],
        code,
        more=more,
        is_unparsed=_UNPARSED.match(reason) is not None,
        named_status=status,
    )


def read_streamed_error(events: bytes) -> EngineErrorBody | None:
    """The error that a stream ended with; None without one. `events`: its end."""
    last = events[-_LAST_BYTES:]
    # A word that the pattern needs is found ten times as fast.
    if b"error" not in last:
        return None
    found = _FAILED.search(b"\n" + last)
    return None if found is None else read_error(found[1])


def _status(named: object) -> int | None:
    """The status that a field of an error means."""
    if isinstance(named, str):
        named = int(named) if named.isdecimal() else _STATUSES.get(named)
    return named if isinstance(named, int) and named in _ERRORS else None


def _reason(value: object) -> str:
    """The engine's message as text. FastAPI sends a list of fields and faults."""
    if not value:
        return "the engine gave no reason"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) > _MAX_REASON:
        text = f"{text[: _MAX_REASON // 2]} … {text[-_MAX_REASON // 2 :]}"
    wrong = None
    if _SOURCE in text and _AFTER_SOURCE in text:
        wrong = text.rpartition(_AFTER_SOURCE)[2].removeprefix(_RAISED)
    elif (found := _BEFORE_ROW.match(text)) is not None:
        wrong = found[1]
    return text if wrong is None else _REFUSED + " ".join(wrong.split())


# --- reads token counts from the usage of an answer. Each API has its own field names -------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """The fields of chats and completions, of responses, and of messages."""

    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _AnswerFields(msgspec.Struct):
    usage: _UsageFields | None = None
    timings: object = None


NOTHING = Usage()
UNREAD = Usage()
"""The usage of an answer that could not be read."""
# Figures beyond these are no measurement: no answer has so many tokens, and no prefill takes weeks.
_MAX_TOKENS, _LEAST_MS, _MAX_MS = 1 << 31, 1e-3, 1e9
_decode_answer = msgspec.json.Decoder(_AnswerFields).decode
_decode_usage = msgspec.json.Decoder(_UsageFields).decode
_decode_any = msgspec.json.Decoder().decode
decode_choices = msgspec.json.Decoder(list[RawFields]).decode
NULL = msgspec.Raw(b"null")
SAYS_NOTHING = (NULL, msgspec.Raw(b'""'), msgspec.Raw(b"[]"), msgspec.Raw(b"{}"))
"""Values of a field that add nothing to an answer."""
# Finds a usage object, also in a JSON text that was cut off. Generated text cannot contain it: quotes in JSON
# strings have a backslash.
USAGE_KEY = b'"usage"'
_USAGE = re.compile(USAGE_KEY + rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_TOOL_CALLS = b'"tool_calls"'
_CALLED_TOOL = re.compile(rb'"finish_reason"\s*:\s*' + _TOOL_CALLS)
_TIMINGS_KEY = b'"timings"'
# The reason of the end and timings stand in the event of the last usage, or in one before it: events of other
# choices may come in between.
_BESIDE_BYTES = 8192
_TIMINGS = re.compile(_TIMINGS_KEY + rb"\s*:\s*(\{[^{}]*\})")


def read_answer_usage(content: bytes) -> Usage:
    """The usage of a JSON answer; `UNREAD` itself if it has an odd form, or is no JSON."""
    try:
        answer = _decode_answer(content)
    except UNREADABLE:
        return UNREAD
    return _told(_read(answer.usage), answer.timings, content)


def read_usage(usage: bytes) -> Usage:
    """The usage from a usage object alone."""
    try:
        return _read(_decode_usage(usage))
    except UNREADABLE:
        return NOTHING


def read_streamed_usage(part: bytes) -> Usage:
    """The usage in a part of an event stream: for each count, the last one reported."""
    cached = output = None
    last = 0  # where the last one stands
    at = len(part)
    while (at := part.rfind(USAGE_KEY, 0, at)) >= 0:
        if (found := _USAGE.match(part, at)) is None:
            continue
        usage, last = read_usage(found[1]), max(at, last)
        cached = usage.cached_tokens if cached is None else cached
        output = usage.output_tokens if output is None else output
        if cached is not None and output is not None:
            break
    begin = max(last - _BESIDE_BYTES, 0)
    return _told(Usage(cached, output), _last_timings(part, begin), part, begin)


def choices_of(chunk: RawFields) -> list[RawFields]:
    """The choices of a chunk; none where the engine left the field out, or has null there. Raises one of
    `UNREADABLE`."""
    choices = chunk.get("choices", NULL)
    return [] if choices == NULL else decode_choices(choices)


def is_usage_alone(chunk: RawFields, choices: list[RawFields]) -> bool:
    """True if a chunk with usage says nothing else: some engines send it with a choice that adds nothing."""
    return "error" not in chunk and all(map(_adds_nothing, choices))


def _adds_nothing(choice: RawFields) -> bool:
    if "message" in choice:  # of a whole answer
        return False
    delta = choice.get("delta", NULL)
    added = {} if delta == NULL else decode_object(delta)
    beside = (value for name, value in choice.items() if name not in ("index", "delta"))
    return all(value in SAYS_NOTHING for value in (*beside, *added.values()))


def _last_timings(part: bytes, begin: int) -> object:
    """The last `timings` in a part of an event stream, from a place on; None without one."""
    found = _TIMINGS.match(part, at) if (at := part.rfind(_TIMINGS_KEY, begin)) >= 0 else None
    try:
        return _decode_any(found[1]) if found is not None else None
    except UNREADABLE:
        return None


def _read(usage: _UsageFields | None) -> Usage:
    if usage is None:
        return NOTHING
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
    output = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    return Usage(_count(cached), _count(output))


def _count(tokens: int | None) -> int | None:
    """A number of tokens, None for one that no engine can mean."""
    return tokens if tokens is not None and 0 <= tokens <= _MAX_TOKENS else None


def _told(usage: Usage, timings: object, answer: bytes, begin: int = 0) -> Usage:
    """The usage with the times of an answer's `timings`, as llama.cpp writes them, and what the answer, or
    its last part, ended with, from a place on."""
    if (
        answer.rfind(_TOOL_CALLS, begin) >= 0 and _CALLED_TOOL.search(answer) is not None
    ):  # found ten times as fast
        usage = msgspec.structs.replace(usage, called_tool=True)
    if not isinstance(timings, dict):
        return usage
    tokens, prefill_s = timings.get("prompt_n"), _seconds(timings.get("prompt_ms"))
    is_counted = isinstance(tokens, int) and 0 < tokens <= _MAX_TOKENS
    return msgspec.structs.replace(
        usage,
        prefill=(tokens, prefill_s) if is_counted and prefill_s is not None else None,
        decode_s=_seconds(timings.get("predicted_ms")),
    )


def _seconds(milliseconds: object) -> float | None:
    """A time that an engine reports; None for one that it cannot mean."""
    if isinstance(milliseconds, float | int) and _LEAST_MS <= milliseconds <= _MAX_MS:
        return milliseconds / 1000
    return None
