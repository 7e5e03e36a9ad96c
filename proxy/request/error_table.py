"""The answer to each class of errors: one table, one shape (OpenAI's)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from engine_adapter import (
    ChatError,
    EngineError,
    EngineRejected,
    EngineSpecError,
    EngineTaken,
    EngineUnavailable,
    EngineUnhealthy,
    NotSupported,
    PromptTableError,
)
from proxy import errors


@dataclass(frozen=True, slots=True)
class Row:
    """The answer to a class of errors."""

    status: int
    type: str
    code: str | None = None


NO_MORE: Mapping[str, object] = MappingProxyType({})
# Errors with an answer of their own. Any other is a bug.
ANSWERED = (errors.ProxyError, EngineError, msgspec.DecodeError)
# A subclass without a row of its own answers like its nearest base.
TABLE: dict[type[Exception], Row] = {
    errors.BadRequest: Row(400, "invalid_request_error", "invalid_value"),
    errors.Unauthorized: Row(401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: Row(403, "permission_error", "forbidden"),
    errors.NotFound: Row(404, "invalid_request_error", "not_found"),
    errors.MethodNotAllowed: Row(405, "invalid_request_error", "method_not_allowed"),
    errors.Conflict: Row(409, "invalid_request_error", "conflict"),
    errors.SlowBody: Row(408, "invalid_request_error", "slow_body"),
    errors.BodyTooLarge: Row(413, "invalid_request_error", "body_too_large"),
    errors.EncodedBody: Row(415, "invalid_request_error", "encoded_body"),
    errors.RateLimited: Row(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Overloaded: Row(503, "server_error", "overloaded"),
    errors.NoEngine: Row(503, "server_error", "no_engine"),
    errors.EngineFailed: Row(502, "server_error", "engine_failed"),
    errors.ProxyError: Row(500, "server_error", "internal_error"),
    msgspec.ValidationError: Row(400, "invalid_request_error", "invalid_value"),
    msgspec.DecodeError: Row(400, "invalid_request_error", "invalid_json"),
    PromptTableError: Row(400, "invalid_request_error", "invalid_embeddings"),
    ChatError: Row(400, "invalid_request_error", "invalid_messages"),
    EngineSpecError: Row(400, "invalid_request_error", "invalid_engine"),
    NotSupported: Row(501, "not_supported_error", "not_supported"),
    EngineTaken: Row(503, "server_error", "engine_taken"),
    EngineUnhealthy: Row(502, "server_error", "engine_unavailable"),
    EngineUnavailable: Row(502, "server_error", "engine_unavailable"),
    EngineRejected: Row(502, "server_error", "engine_rejected"),  # the engine's own status rules
    EngineError: Row(502, "server_error", "engine_error"),
}


def row_of(error: Exception) -> Row | None:
    """The row of an error's class, or of its nearest base; None for a bug."""
    return next((TABLE[base] for base in type(error).__mro__ if base in TABLE), None)


def status_of(error: Exception) -> int:
    """The HTTP status an error is answered with."""
    if isinstance(error, EngineRejected):
        return error.status
    row = row_of(error)
    return row.status if row is not None else 500


def error_body(
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    more: Mapping[str, object] = NO_MORE,
) -> bytes:
    """An error in OpenAI's shape. `more` fields may replace these."""
    error = {"message": message, "type": kind, "param": param, "code": code, **more}
    return msgspec.json.encode({"error": error})
