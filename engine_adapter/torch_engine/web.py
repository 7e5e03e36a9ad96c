"""The parts that all routes share: errors in OpenAI's shape, request bodies up to a limit, JSON responses."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from engine_adapter.errors import ChatError, EngineUnavailable, FieldError, PromptTableError
from engine_adapter.torch_engine.requests import PinLimitReached, RequestFailed

_TYPES = {
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}

# Codes of errors that have no code of their own.
_CODES = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed", 501: "not_supported"}

_HEADERS = {
    413: {"connection": "close"},  # the body was not read to its end
    500: {"x-should-retry": "false"},  # this request failed, and would fail on another engine too
    503: {"retry-after": "1"},
}


_INVALID: dict[type[Exception], str] = {
    ChatError: "invalid_messages",
    PromptTableError: "invalid_embeddings",
}


class ApiError(Exception):
    """An error to answer the client with.

    Attributes:
        param: the request field at fault, None where none is.
        code: short name for programs, e.g. `context_length_exceeded`; None takes that of the status.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def as_api_error(error: Exception) -> ApiError | None:
    """The client's view of `error`; None when it is a bug of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):
        return ApiError(str(error), param=error.param, code=_INVALID.get(type(error)))
    if isinstance(error, PinLimitReached):
        return ApiError(str(error), status=409, code="pin_limit_reached")
    if isinstance(error, RequestFailed):
        return ApiError(str(error), status=500, code="request_failed")
    if isinstance(error, EngineUnavailable):
        return ApiError(str(error), status=503, code="engine_unavailable")
    return None


def error_body(error: ApiError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code or _CODES.get(error.status),
        }
    }


def error_response(error: ApiError) -> Response:
    """`error` as a response."""
    return json_response(error_body(error), status=error.status, headers=_HEADERS.get(error.status))


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json", headers=headers
    )


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 for more than `limit` bytes. At most `limit` bytes are held.
        ClientDisconnect: the client left before its request was complete.
    """
    declared = Headers(scope=scope).get("content-length", "")
    is_larger = declared.isascii() and declared.isdigit() and int(declared[:20]) > limit
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit or is_larger:
            is_larger = True
            parts.clear()
        else:
            parts.append(part)
        is_last = not message.get("more_body", False)
        # Closing while the client still sends would reset the connection and lose the answer. So a body up
        # to twice the limit is read to its end.
        if is_larger and (is_last or size > 2 * limit):
            raise ApiError(f"the body is larger than {limit} bytes", status=413, code="content_too_large")
        if is_last:
            return b"".join(parts)
