"""Reads request bodies up to a limit."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from engine_adapter.torch_engine.api_errors import ApiError


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 for more than `limit` bytes, before they are read where the length is declared.
        ClientDisconnect: the client left before its request was complete.
    """
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(f"the body is larger than {limit} bytes", status=413, code="content_too_large")
