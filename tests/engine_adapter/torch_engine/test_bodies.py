"""Bodies up to a limit, whatever length they declare."""

from __future__ import annotations

import pytest
from starlette.requests import ClientDisconnect

from engine_adapter.torch_engine.web import ApiError, read_body


def receiving(*parts: bytes | None):
    """A receive callable; None is a client that leaves."""
    messages = [
        {"type": "http.disconnect"}
        if part is None
        else {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
        for index, part in enumerate(parts)
    ]
    queue = iter(messages)

    async def receive():
        return next(queue)

    return receive, queue


def scope(length: str | None = None):
    return {"type": "http", "headers": [] if length is None else [(b"content-length", length.encode())]}


async def test_what_is_somewhat_too_large_is_read_to_its_end():
    receive, left = receiving(b"ab", b"cd", b"e")
    with pytest.raises(ApiError):
        await read_body(scope("5"), receive, 3)
    assert list(left) == []


async def test_what_is_far_too_large_is_not():
    receive, left = receiving(b"ab", b"cd", b"efg", b"h", b"i")
    with pytest.raises(ApiError):
        await read_body(scope("9" * 30), receive, 3)
    assert len(list(left)) == 2


async def test_a_client_that_leaves():
    with pytest.raises(ClientDisconnect):
        await read_body(scope(), receiving(b"ab", None)[0], 3)
