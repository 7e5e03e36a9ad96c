"""Errors of the engine's HTTP surface, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from engine_adapter.errors import ChatError, EngineUnavailable, PromptTableError
from engine_adapter.torch_engine.requests import RequestRefused

_TYPES = {
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error that is answered to the client.

    Attributes:
        status: HTTP status.
        param: the request field at fault, None where none is.
        code: short name for programs, e.g. `context_length_exceeded`.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def as_api_error(error: Exception) -> ApiError | None:
    """What a client is told of `error`; None for one that is no answer but a fault of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (RequestRefused, ChatError, PromptTableError)):
        return ApiError(str(error), param=error.param)
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
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    """`error` as a response. A body too large was not read to its end, so the connection closes."""
    headers = {"connection": "close"} if error.status == 413 else {}  # noqa: PLR2004 - content too large
    if error.status == 503:  # noqa: PLR2004 - service unavailable
        headers["retry-after"] = "1"
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json", headers=headers
    )
