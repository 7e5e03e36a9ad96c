"""Reads request bodies up to a limit."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from engine_adapter.torch_engine.api_errors import ApiError


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
