"""Reads the many shapes of engines' errors into one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE
from engine_adapter.errors import NO_HEADERS, EngineRejected

# An error that is not JSON may be a whole web page: only its beginning is kept.
_MAX_REASON_BYTES = 500
# Characters of a message that are kept, half of them from its end: engines may repeat the prompt in one, and
# every pattern that reads it costs time.
_MAX_REASON = 32_768
_OPENAIS = ("message", "type", "param", "code")
# llama-server has this type, but not OpenAI's code, which clients look for.
_CODES = {"exceed_context_size_error": "context_length_exceeded"}
_REFUSED = "the model's chat template refuses the request: "
# llama-server answers these with 500: another engine with the same model would do so, too.
_CLIENTS_FAULT = re.compile(
    rf"(image|audio|video) input is not supported|Failed to parse messages: |{_REFUSED}"
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
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "NotFoundError": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 529,
}
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
