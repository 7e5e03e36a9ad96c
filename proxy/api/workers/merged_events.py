"""The stream of events of all workers as one: requests of each as they come, and snapshots of all."""

from __future__ import annotations

import asyncio

import anyio
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_adapter import WholeEvents
from proxy.api.workers.siblings import Siblings
from proxy.control.merged_answers import Json, merge_snapshots

_SNAPSHOT = b"event: snapshot\ndata: "
_END = b"\n\n"
_OK = 200
# How long the first snapshot waits for those of the other workers.
_FIRST_S = 1.0


class MergedEvents:
    """One viewer's stream: that of this worker, and those of the others woven in."""

    def __init__(self, app: ASGIApp, siblings: Siblings, *, shared: bool) -> None:
        """`app` streams the events of this worker; `shared` as in `merging`."""
        self._app, self._siblings, self._shared = app, siblings, shared
        self._snapshots: dict[int, Json] = {}  # the last of each other worker
        self._unheard = set(range(len(siblings)))  # of whom neither a snapshot nor their absence is known
        self._is_whole, self._has_begun = asyncio.Event(), asyncio.Event()
        self._lock = anyio.Lock()  # one writes to the client at a time

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the viewer until it leaves, or this worker stops."""
        own, streams = WholeEvents(), False
        async with anyio.create_task_group() as group:

            async def send_own(message: Message) -> None:
                nonlocal streams
                if message["type"] == "http.response.start" and message["status"] == _OK:
                    streams = True
                    for number in range(len(self._siblings)):
                        group.start_soon(self._weave_in, scope, number, send)
                elif streams:
                    events = own.feed(message.get("body", b""))
                    await self._others_first()
                    message = {**message, "body": b"".join(map(self._with_others, events))}
                async with self._lock:
                    await send(message)
                if streams and message.get("body"):
                    self._has_begun.set()

            await self._app(scope, receive, send_own)
            group.cancel_scope.cancel()

    async def _weave_in(self, scope: Scope, number: int, send: Send) -> None:
        """Passes on another worker's requests, and keeps its snapshots."""
        events = WholeEvents()
        async for data in self._siblings.stream(number, scope["path"]):
            if data is None:  # it stopped, or does not run yet
                events = WholeEvents()
                self._snapshots.pop(number, None)
                self._heard(number)
                continue
            for event in events.feed(data):
                if event.startswith(_SNAPSHOT):
                    self._snapshots[number] = msgspec.json.decode(event[len(_SNAPSHOT) :])
                    self._heard(number)
                else:
                    await self._has_begun.wait()  # a snapshot comes first
                    async with self._lock:
                        await send({"type": "http.response.body", "body": event, "more_body": True})

    def _heard(self, number: int) -> None:
        self._unheard.discard(number)
        if not self._unheard:
            self._is_whole.set()

    async def _others_first(self) -> None:
        """Waits before the first event for the other workers' snapshots."""
        if self._unheard and not self._has_begun.is_set():
            with anyio.move_on_after(_FIRST_S):
                await self._is_whole.wait()

    def _with_others(self, event: bytes) -> bytes:
        """An event of this worker; a snapshot becomes that of all."""
        if not event.startswith(_SNAPSHOT) or not self._snapshots:
            return event
        own = msgspec.json.decode(event[len(_SNAPSHOT) :])
        merged = merge_snapshots([own, *self._snapshots.values()], shared=self._shared)
        return _SNAPSHOT + msgspec.json.encode(merged) + _END
