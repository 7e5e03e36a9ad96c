"""Lets one kvpin answer for all workers on the routes beside the data plane: it merges all answers.

The worker answers first, so that keys and bodies are checked once. Then it asks the others, who answer for
themselves alone, and merges the answers. Changes are carried out by all.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_adapter import HeaderPairs, WholeEvents
from engine_adapter.off_loop import off_loop
from proxy.api.auth import FROM_PEER
from proxy.api.workers.siblings import Neighbours, Siblings, WorkerAnswer
from proxy.control.merged_answers import (
    Json,
    merge_engines,
    merge_operation,
    merge_operations,
    merge_requests,
    merge_snapshots,
    merge_stats,
    merge_use,
)
from proxy.observe.gauges import of_workers
from proxy.observe.metric_families import merge_pages

_SNAPSHOT = b"event: snapshot\ndata: "
_END = b"\n\n"
_OK = 200
# Bytes of answers that are merged in about 1 ms.
_MERGED_BYTES_PER_MS = 16 * 1024
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


_ADMIN = "/admin/v1"
# Where a worker tells another one what operators have ordered about engines.
ORDERS_PATH = f"{_ADMIN}/engine_orders"
_EVENTS = ("GET", f"{_ADMIN}/events")
_DEFAULT_LIMIT = 50
# Headers that the others need to understand the request.
_PASSED_ON = (b"accept", b"content-type", b"x-request-id")

Merge = Callable[[Scope, list[WorkerAnswer]], bytes]


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule by which the answers to one route become one.

    Attributes:
        path: matches the paths.
        merge: makes the body of all good answers; None takes the first good one.
        once: one worker is enough. The others are asked only if this one does not know the named thing.
        named: the others use the id that this worker gave to what it made.
        nearby: all kvpins of this machine take part, not the workers alone.
    """

    method: str
    path: str
    merge: Merge | None = None
    once: bool = False
    named: bool = False
    nearby: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    """A request as the others get it."""

    method: str
    target: str
    body: bytes


class MergedAnswers:
    """An ASGI application around one that answers for this worker alone."""

    def __init__(
        self,
        app: ASGIApp,
        siblings: Siblings,
        told: Mapping[str, Callable[[], Awaitable[bytes]]],
        *,
        shared: bool,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`told`: paths that only workers may ask, and what gives the answers. `shared`: the workers know
        each other's requests. `neighbours`: the other kvpins of this machine; by default the workers."""
        self._app, self._siblings, self._shared = app, siblings, shared
        self._told, self._neighbours = told, neighbours or siblings
        self._rules = [(re.compile(rule.path), rule) for rule in _rules(shared=shared)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, for all workers where a rule says so."""
        from_peer, asked = scope.get(FROM_PEER, False), (scope["method"], scope["path"])
        if asked == _EVENTS and not from_peer and len(self._siblings):
            await MergedEvents(self._app, self._siblings, shared=self._shared).serve(scope, receive, send)
            return
        if from_peer and (tell := self._told.get(scope["path"])) is not None:
            told = await tell()
            await _send(_answer(HTTPStatus.OK, [], told), send)
            return
        rule = self._rule(scope)
        if rule is None or from_peer:
            await self._app(scope, receive, send)
            return
        body = bytearray()

        async def receive_and_keep() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        own = await _answer_of(self._app, scope, receive_and_keep)
        request = _request(rule, scope, own, bytes(body))
        is_unknown = own.status == HTTPStatus.NOT_FOUND
        if is_unknown or (own.is_good and not rule.once):
            own = await self._ask_others(rule, scope, own, request)
        await _send(own, send)

    def _rule(self, scope: Scope) -> _Rule | None:
        for path, rule in self._rules:
            if scope["method"] == rule.method and path.fullmatch(scope["path"]):
                return rule
        return None

    async def _ask_others(
        self, rule: _Rule, scope: Scope, own: WorkerAnswer, request: _Request
    ) -> WorkerAnswer:
        """The answer of all."""
        headers = [pair for pair in scope["headers"] if pair[0] in _PASSED_ON]
        asked = self._neighbours if rule.nearby else self._siblings
        others = await asked.ask(request.method, request.target, headers, request.body)
        good = [answer for answer in (own, *others) if answer.is_good]
        if not good:
            known = (answer for answer in others if answer.status != HTTPStatus.NOT_FOUND)
            return next(known, own)
        if rule.merge is None or len(good) == 1:
            return good[0]
        status = max(answer.status for answer in good)  # 202 while any worker is not done
        merged = partial(rule.merge, scope, good)
        ms = sum(len(answer.body) for answer in good) / _MERGED_BYTES_PER_MS
        return _answer(status, good[0].headers, await off_loop(merged, ms=ms))


def _request(rule: _Rule, scope: Scope, own: WorkerAnswer, body: bytes) -> _Request:
    """The request for the others, after this worker's own answer."""
    if rule.named and own.is_good:
        given: dict[str, Any] = msgspec.json.decode(body)
        body = msgspec.json.encode({**given, "id": msgspec.json.decode(own.body)["id"]})
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += f"?{scope['query_string'].decode('latin-1')}"
    return _Request(scope["method"], target, body)


async def _answer_of(app: ASGIApp, scope: Scope, receive: Receive) -> WorkerAnswer:
    """The answer of an application."""
    status, headers, body = 500, HeaderPairs(), bytearray()

    async def keep(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            body.extend(message.get("body", b""))

    await app(scope, receive, keep)
    return WorkerAnswer(status, headers, bytes(body))


async def _send(answer: WorkerAnswer, send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


def _answer(status: int, headers: HeaderPairs, body: bytes) -> WorkerAnswer:
    kept = [pair for pair in headers if pair[0] != b"content-length"]
    return WorkerAnswer(status, [*kept, (b"content-length", b"%d" % len(body))], body)


def _rules(*, shared: bool) -> tuple[_Rule, ...]:
    gauges = of_workers(shared=shared)

    def pages(_scope: Scope, answers: Sequence[WorkerAnswer]) -> bytes:
        return merge_pages([answer.body.decode() for answer in answers], gauges).encode()

    return (
        _Rule("GET", "/metrics", pages),
        _Rule("GET", f"{_ADMIN}/stats", _json(partial(merge_stats, shared=shared))),
        _Rule("GET", f"{_ADMIN}/engines", _json(partial(merge_engines, shared=shared))),
        _Rule("POST", f"{_ADMIN}/engines", named=True),
        _Rule("DELETE", f"{_ADMIN}/engines/[^/]+"),
        _Rule("POST", f"{_ADMIN}/engines/[^/]+/drain"),
        # They read it in the file of keys, unless that cannot be written.
        _Rule("DELETE", f"{_ADMIN}/keys/[^/]+"),
        _Rule("GET", f"{_ADMIN}/requests", _requests),
        _Rule("GET", f"{_ADMIN}/requests/[^/]+", once=True),
        _Rule("GET", f"{_ADMIN}/usage", _json(merge_use)),
        _Rule("POST", f"{_ADMIN}/(pin|warm|offload|restore)", once=True, nearby=True),
        _Rule("POST", f"{_ADMIN}/flush", _json(merge_operation), nearby=True),
        _Rule("POST", f"{_ADMIN}/unpin", once=True, nearby=True),
        _Rule("GET", f"{_ADMIN}/operations", _json(merge_operations)),
        _Rule("GET", f"{_ADMIN}/operations/[^/]+", once=True, nearby=True),
        _Rule("DELETE", f"{_ADMIN}/operations/[^/]+", once=True, nearby=True),
        _Rule("POST", f"{_ADMIN}/prompt_tables", nearby=True),
        _Rule("DELETE", f"{_ADMIN}/prompt_tables/[^/]+", nearby=True),
    )


def _json(merge: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]) -> Merge:
    def merged(_scope: Scope, answers: Sequence[WorkerAnswer]) -> bytes:
        return msgspec.json.encode(merge([msgspec.json.decode(answer.body) for answer in answers]))

    return merged


def _requests(scope: Scope, answers: Sequence[WorkerAnswer]) -> bytes:
    limit = int(Request(scope).query_params.get("limit", _DEFAULT_LIMIT))  # this worker has checked it
    return msgspec.json.encode(
        merge_requests([msgspec.json.decode(answer.body) for answer in answers], limit)
    )
