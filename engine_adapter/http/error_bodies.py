"""Reads the many shapes of engines' errors into one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE

# An error that is not JSON may be a whole web page: only its beginning is kept.
_MAX_REASON_BYTES = 500
_OPENAIS = ("message", "type", "param", "code")
# llama-server has this type, but not OpenAI's code, which clients look for.
_CODES = {"exceed_context_size_error": "context_length_exceeded"}
# llama-server answers these with 500: another engine with the same model would do so, too.
_CLIENTS_FAULT = re.compile(r"(image|audio|video) input is not supported")


@dataclass(frozen=True, slots=True)
class EngineErrorBody:
    """An engine's error.

    Attributes:
        more: further fields of an error in OpenAI's shape.
        is_clients: the request is at fault, whatever status the engine gave.
    """

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    is_clients: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


def read_error(content: bytes) -> EngineErrorBody:
    """Reads OpenAI's nested shape, flat ones (`message`), bare strings and FastAPI's `detail`."""
    try:
        body = msgspec.json.decode(content)
    except UNREADABLE:
        body = content[:_MAX_REASON_BYTES].decode(errors="replace").strip()
    if not isinstance(body, dict):
        return EngineErrorBody(_reason(body))
    inner = body.get("error") or body
    fields = inner if isinstance(inner, dict) else {"message": inner}
    text = {name: fields.get(name) for name in ("type", "param", "code")}
    strings = {name: value if isinstance(value, str) else None for name, value in text.items()}
    reason = _reason(fields.get("message") or fields.get("detail"))
    if _CLIENTS_FAULT.match(reason):
        return EngineErrorBody(reason, "invalid_request_error", strings["param"], is_clients=True)
    code = strings["code"] or _CODES.get(strings["type"] or "")
    more = (
        {name: value for name, value in fields.items() if name not in _OPENAIS} if inner is not body else {}
    )
    return EngineErrorBody(reason, strings["type"], strings["param"], code, more=more)


def _reason(value: object) -> str:
    """The engine's message as text. FastAPI sends a list of fields and faults."""
    if not value:
        return "the engine gave no reason"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
