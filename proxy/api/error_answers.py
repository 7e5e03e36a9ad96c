"""Failed requests as Starlette responses, by their codes."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter.causes import Code
from proxy.errors import ANSWERED, code_of, message_of, status_of
from proxy.headers import REQUEST_ID_HEADER
from proxy.request.translate.wording import NO_MORE, OPENAI, Dialect, error_body

NOT_FOUND = 404
_CODES = {code.status: code for code in (Code.INVALID_VALUE, Code.NOT_FOUND, Code.METHOD_NOT_ALLOWED)}


def error_response(error: Exception, request_id: str | None = None, dialect: Dialect = OPENAI) -> Response:
    """The answer to a failed request. The text of a bug, which may hold anything, stays in the log."""
    code, message = code_of(error), message_of(error)
    if not isinstance(error, ANSWERED):
        message = "kvpin failed on this request; the log has the details"
    status = status_of(error)
    body = dialect.error(
        status,
        message,
        kind=getattr(error, "type", None) or code.type,
        param=getattr(error, "param", None),
        code=getattr(error, "engine_code", None) or code,
        request_id=request_id,
        more=getattr(error, "more", NO_MORE),
    )
    headers = dict(getattr(error, "headers", {}))
    if request_id:
        headers |= dict.fromkeys(dialect.id_headers, request_id)
    return Response(body, status, headers, media_type="application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every class of `ANSWERED`."""
    return error_response(error, request.headers.get(REQUEST_ID_HEADER))


async def handle_http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method), in the same shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', 'failed').lower()}"
    if status == NOT_FOUND:
        message = f"there is no route {request.method} {request.url.path}"
        is_admin = request.url.path.startswith("/admin")
        own = f"{request.base_url}v1"
        message += (
            "; /admin/v1/openapi.json lists the routes of the admin API"
            if is_admin
            else f"; OpenAI's API is under /v1: set base_url to {own}"
        )
    code = _CODES.get(status)
    body = error_body(message, kind="invalid_request_error", code=code)
    return Response(body, status, getattr(error, "headers", None), media_type="application/json")
