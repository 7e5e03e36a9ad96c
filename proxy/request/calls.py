"""One client request on its way through the proxy, and the reply channel to its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from starlette.types import Send

from engine_adapter import JsonBody, route_of

# OpenAI's SDKs disconnect when they read this, before the engine has closed the stream.
_STREAM_END = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")
# The blank line after an event of a stream: engines send either.
_EVENT_END, _EVENT_END_CR = b"\n\n", b"\n\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request, authenticated and read.

    Attributes:
        request_id: kvpin's own, unique.
        method, path: as sent; the path keeps its query string and starts with `/v1/`.
        headers: lower-case names.
        body: a parsed JSON object, an unread stream for other content types, None if empty.
        tenant: who sends it; None when no keys are set.
        client_id: the client's `x-request-id`, if it sent one.
    """

    request_id: str
    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: JsonBody | AsyncIterator[bytes] | None = field(repr=False)
    tenant: str | None = None
    client_id: str | None = None

    @property
    def answer_id(self) -> str:
        """The `x-request-id` of the answer."""
        return self.client_id or self.request_id

    @property
    def route(self) -> str:
        """The route, as engines will understand the path."""
        return route_of(self.path)

    @property
    def model(self) -> str | None:
        """The model that the body names, if any."""
        model = self.body.get("model") if isinstance(self.body, JsonBody) else None
        return model if isinstance(model, str) else None

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return isinstance(self.body, JsonBody) and self.body.get("stream") is True


class Reply:
    """The way back to the client: a thin layer over ASGI's `send`.

    `write` returns when the client's socket has room again: a slow client slows its engine down.

    Attributes:
        started: status and headers were sent.
        complete: the client has the whole answer. A disconnect from now on is no cancellation.
        events: number of stream events sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.complete = False
        self.events = 0

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends status and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Sends body bytes."""
        self.complete = chunk.endswith(_STREAM_END)
        self.events += chunk.count(_EVENT_END) or chunk.count(_EVENT_END_CR)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Sends the last body bytes."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": chunk})
