"""Requests to engines, and what went wrong on the way."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import msgspec

from engine_adapter.http.headers import HeaderPairs


class OutgoingRequest(msgspec.Struct, frozen=True):
    """A request to one engine.

    Attributes:
        url: sent as it is, already percent-encoded.
        headers: names in lower case. The transport adds `host` and the length or the coding of the body.
        body: whole, or streamed. A streamed body is chunked unless `headers` has its `content-length`.
        tls: the engine's own context, None where it has none.
        socket: what the client sends on the WebSocket that the request asks for; None for a plain request. It
            is sent once the engine has agreed (status 101).
        unix: path of the Unix socket to connect to, in place of the host of the URL; None for TCP.
    """

    method: str
    url: str
    headers: HeaderPairs = []  # each request gets its own
    body: bytes | AsyncIterator[bytes] | None = None
    tls: ssl.SSLContext | None = None
    socket: AsyncIterator[bytes] | None = None
    unix: str | None = None

    def __repr__(self) -> str:
        """Without headers and body, which may be secret."""
        return f"OutgoingRequest({self.method!r}, {self.url!r})"


def describe(error: BaseException) -> str:
    """An I/O error in one line, also if its text is empty."""
    return str(error) or type(error).__name__
