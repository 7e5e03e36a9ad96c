"""Where a request would go, and what happened to past ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine_adapter import JsonBody
from engine_adapter.off_loop import off_loop
from proxy.api.admin.endpoint import DryRun, Endpoint, Query, decode, operation, read_bytes, until_left
from proxy.control.explain import RequestAnswer, RequestSummary, RouteAnswer, explain, route, summarize
from proxy.control.live import Live, Missed, RequestNow, Snapshot
from proxy.control.replays import MAX_TRACE_BYTES, OPTIONS, ReplayAnswer, Replays
from proxy.core.quotas import MOST_DAYS, DayUse, UseBook, Used
from proxy.errors import BadRequest, NotFound, ProxyError
from proxy.flow import Flow

_LIMIT = Query.number("limit", "How many", 50, 10_000)
_WHOSE = Query("tenant", "string", "Whose request it is, where several clients send the same id.")


class RequestList(msgspec.Struct):
    """Requests, newest first. `passed_on` counts those that other kvpins answered for this one, by their
    names: these kvpins have the records."""

    requests: list[RequestSummary]
    passed_on: dict[str, int]


def request_routes(flow: Flow) -> tuple[Endpoint, ...]:
    """Asks the read path about requests."""

    @operation("POST", "/route", body=DryRun, open_body=True)
    async def post_route(request: Request) -> RouteAnswer:
        """Where a request would go now and why, without sending it; the body is the request's own."""
        raw = await read_bytes(request) or b"{}"
        asked = decode(raw, DryRun)
        return await route(flow, JsonBody(raw), asked.path, asked.tenant)

    @operation("GET", "/requests", query=(_LIMIT,), others="do", join=_newest)
    async def list_requests(limit: int) -> RequestList:
        """The last requests, newest first."""
        summaries = []
        for record in list(flow.requests)[: -limit - 1 : -1]:
            summaries.append(await summarize(flow, record))
            await asyncio.sleep(0)  # each is compared with all others: requests get their turn in between
        return RequestList(summaries, dict(flow.fleet.passed_on))

    @operation("GET", "/requests/{request_id}", query=(_WHOSE,), others="know")
    async def get_request(request_id: str, tenant: str | None) -> RequestAnswer:
        """One request, by kvpin's id or its client's: why its cache missed or hit."""
        record = flow.requests.get(request_id, tenant)
        if record is None:
            others = ", ".join(flow.fleet.passed_on)
            passed_on = f"; requests were passed on to another kvpin, which has their records: {others}"
            problem = _not_one(flow, request_id, tenant)
            raise NotFound(problem + (passed_on if others else ""), param="request_id")
        return await explain(flow, record)

    return post_route, list_requests, get_request


def _not_one(flow: Flow, request_id: str, tenant: str | None) -> str:
    """Why an id names no request of a tenant, or of all."""
    asked = [record for record in flow.requests if tenant in (None, record.tenant)]
    ids = (each for record in asked for each in (record.request_id, record.client_request_id or ""))
    if count := len({each for each in ids if each.startswith(request_id)}):
        return f"{count} ids of recent requests begin with {request_id!r}: write more of one"
    return f"no recent request has the id {request_id!r}, and none has one that begins so"


def _newest(request: Request, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest requests of all workers. Those that one worker passed on to another are among them."""
    requests = [each for answer in answers for each in answer["requests"]]
    requests.sort(key=lambda request: -request["started"])
    return {"requests": requests[: _LIMIT.of(request)], "passed_on": {}}


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

    @operation("GET", "/events", answer=LiveEvents, is_stream=True)
    async def get_events(request: Request) -> Response:
        """What happens, as server-sent events: each is named as a field here, with its data as value.
        No prompt text."""
        return Response(headers=_HEADERS) if request.method == "HEAD" else _EventStream(live)

    return (get_events,)


class _EventStream(StreamingResponse):
    """A new viewer's events, until its client leaves or kvpin stops."""

    def __init__(self, live: Live) -> None:
        self._live, self._viewer = live, live.join()
        super().__init__(self._events(), headers=_HEADERS)

    async def _events(self) -> AsyncIterator[bytes]:
        while events := await self._viewer.take():
            yield events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.leave(self._viewer)


_DAYS = Query.number("days", "How many days", 30, MOST_DAYS)
# Rows that are sorted and written in about 1 ms.
_ROWS_PER_MS = 256


class UseList(msgspec.Struct):
    """The use of tenants, the newest day first."""

    usage: list[DayUse]


def _written(rows: Iterator[DayUse]) -> bytes:
    """A `UseList`, encoded row by row: 100,000 rows at once would hold up the loop."""
    return b'{"usage":[%b]}' % b",".join(map(msgspec.json.encode, rows))


def use_routes(book: UseBook) -> tuple[Endpoint, ...]:
    """Tells the use by day, tenant and model."""

    @operation("GET", "/usage", query=(_DAYS,), answer=UseList, others="do", join=_summed)
    async def list_use(days: int) -> Response:
        """Requests and tokens by day (UTC), tenant and model, the newest day first."""
        kept, now = UseBook(book.items()), time.time()  # the book changes meanwhile
        content = await off_loop(lambda: _written(kept.since(days, now)), ms=len(kept) / _ROWS_PER_MS)
        return Response(content, media_type="application/json")

    return (list_use,)


def _summed(_request: Request, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The use that all workers counted."""
    rows = dict[tuple[str, str, str], dict[str, Any]]()
    for row in (row for each in answers for row in each["usage"]):
        known = rows.setdefault((row["day"], row["tenant"] or "", row["model"] or ""), row)
        if known is not row:
            known.update({name: known[name] + row[name] for name in Used.__struct_fields__})
    return {"usage": [rows[key] for key in sorted(sorted(rows), key=lambda key: key[0], reverse=True)]}


_OPTIONS = tuple(Query(name, "string", f"As --{name.replace('_', '-')}.") for name in OPTIONS)


def replay_routes(replays: Replays) -> tuple[Endpoint, ...]:
    """Shows what other engines, sizes and policies would do with recorded traffic."""

    @operation("POST", "/replays", raw_body=True, query=_OPTIONS)
    async def post_replay(request: Request) -> ReplayAnswer:
        """Replays the recording in the body (JSON lines, not compressed, 32 MiB at most) on simulated
        engines, as `kvpin replay` does; one at a time, 10 minutes at most each."""
        trace = await read_bytes(request, MAX_TRACE_BYTES)
        outcome: ReplayAnswer | ProxyError = BadRequest("the client left")
        async with anyio.create_task_group() as group:
            group.start_soon(until_left, request.receive, group)
            try:
                outcome = await replays.play(trace, dict(request.query_params))
            except ProxyError as error:
                outcome = error
            group.cancel_scope.cancel()
        if isinstance(outcome, ProxyError):
            raise outcome
        return outcome

    return (post_replay,)
