"""The stream of live events for viewers such as the page."""

from __future__ import annotations

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from proxy.api.admin.endpoint import Endpoint, until_left
from proxy.observe.live import Live, Missed, RequestNow, Snapshot, Viewer

_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class LiveEvents(msgspec.Struct, kw_only=True):
    """The events by name, and their data.

    `snapshot` comes first, then about every second; `placed` and `finished` at once, for 20 requests a second
    at most; `missed` after a client has read too slowly.
    """

    snapshot: Snapshot
    placed: RequestNow
    finished: RequestNow
    missed: Missed


def event_routes(live: Live) -> tuple[Endpoint, ...]:
    """Lets clients watch."""

    async def get_events(request: Request) -> Response:
        """The stream; HEAD gets its headers alone."""
        return Response(headers=_HEADERS) if request.method == "HEAD" else _EventStream(live, live.join())

    return (
        Endpoint(
            "GET",
            "/events",
            get_events,
            "What happens, as server-sent events: each is named as a field here, with its data as value. "
            "No prompt text.",
            LiveEvents,
            is_stream=True,
        ),
    )


class _EventStream(Response):
    """A viewer's events, until its client leaves or kvpin stops."""

    def __init__(self, live: Live, viewer: Viewer) -> None:
        super().__init__(headers=_HEADERS)
        self._live, self._viewer = live, viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        del self.headers["content-length"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with anyio.create_task_group() as group:
                group.start_soon(until_left, receive, group)
                while events := await self._viewer.take():
                    await send(_body(events, more=True))
                await send(_body(b"", more=False))
                group.cancel_scope.cancel()
        finally:
            self._live.leave(self._viewer)


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
