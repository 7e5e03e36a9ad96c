"""Errors as clients see them: one table, one shape (OpenAI's)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import (
    ChatError,
    EngineError,
    EngineRejected,
    EngineSpecError,
    EngineUnavailable,
    NotSupported,
    PromptTableError,
)
from proxy import errors
from proxy.request.forward import error_body


@dataclass(frozen=True, slots=True)
class Row:
    """How a class of errors is answered."""

    status: int
    type: str
    code: str | None = None


# Looked up along an error's class tree, so that a subclass answers like its base unless it has a row.
TABLE: dict[type[Exception], Row] = {
    errors.BadRequest: Row(400, "invalid_request_error"),
    errors.Unauthorized: Row(401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: Row(403, "permission_error", "forbidden"),
    errors.NotFound: Row(404, "invalid_request_error", "not_found"),
    errors.Conflict: Row(409, "invalid_request_error", "conflict"),
    errors.BodyTooLarge: Row(413, "invalid_request_error", "body_too_large"),
    errors.NoEngine: Row(503, "server_error", "no_engine"),
    errors.EngineFailed: Row(502, "server_error", "engine_failed"),
    errors.ProxyError: Row(500, "server_error", "internal_error"),
    msgspec.ValidationError: Row(400, "invalid_request_error"),
    msgspec.DecodeError: Row(400, "invalid_request_error", "invalid_json"),
    PromptTableError: Row(400, "invalid_request_error", "invalid_embeddings"),
    ChatError: Row(400, "invalid_request_error", "invalid_messages"),
    EngineSpecError: Row(400, "invalid_request_error", "invalid_engine"),
    NotSupported: Row(501, "not_supported_error", "not_supported"),
    EngineUnavailable: Row(502, "server_error", "engine_unavailable"),
    EngineRejected: Row(502, "server_error", "engine_rejected"),  # its own status, where it has one
    EngineError: Row(502, "server_error", "engine_error"),
}


def row_of(error: Exception) -> Row:
    """The row of an error's class, or of its nearest base."""
    return next((TABLE[base] for base in type(error).__mro__ if base in TABLE), TABLE[errors.ProxyError])


def error_response(error: Exception, request_id: str | None = None) -> Response:
    """The answer to a failed request. Errors without a row keep their text to the log."""
    row = row_of(error)
    known = any(base in TABLE for base in type(error).__mro__)
    message = str(error) if known else "kvpin failed on this request; the log has the details"
    if isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        message = f"the body is not valid JSON: {error}"
    body = error_body(
        message,
        kind=row.type,
        param=getattr(error, "param", None),
        code=getattr(error, "code", None) or row.code,
    )
    status = error.status if isinstance(error, EngineRejected) else row.status
    headers = {"x-request-id": request_id} if request_id else {}
    if isinstance(error, errors.NoEngine):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, errors.EngineFailed | EngineRejected):
        # Every engine that may help was asked already: a client's own retries would only add load.
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(body, status, headers, media_type="application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every class of the table."""
    return error_response(error, request.headers.get("x-request-id"))


async def handle_http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method), in the same shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', 'failed').lower()}"
    if status == 404 and not request.url.path.startswith("/admin"):  # noqa: PLR2004 - HTTP
        message += f". OpenAI's API is under /v1: set base_url to {request.base_url}v1"
    body = error_body(message, kind="invalid_request_error", code="not_found" if status == 404 else None)  # noqa: PLR2004 - HTTP
    return Response(body, status, getattr(error, "headers", None), media_type="application/json")
