"""Where a request would go, and what happened to past ones."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import JsonBody
from proxy.api.admin.bodies import DryRun
from proxy.api.admin.endpoint import Endpoint, Query, answer, decode, int_query, read_bytes
from proxy.control.explain import RequestAnswer, RequestSummary, explain, summarize
from proxy.control.routing import RouteAnswer, route
from proxy.errors import NotFound
from proxy.flow import Flow

MOST = 10_000


class RequestList(msgspec.Struct):
    """Requests, newest first. `passed_on` counts those that other kvpins answered for this one, by their
    names: these kvpins have the records."""

    requests: list[RequestSummary]
    passed_on: dict[str, int]


class RequestRoutes:
    """Asks the read path about requests."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    async def post_route(self, request: Request) -> Response:
        """A dry run of placement."""
        raw = await read_bytes(request) or b"{}"
        decode(raw, DryRun)
        return answer(await route(self._flow, JsonBody(raw)))

    async def list_requests(self, request: Request) -> Response:
        """The last requests, newest first."""
        limit = int_query(request, "limit", 50, MOST)
        records = list(self._flow.requests)[: -limit - 1 : -1]
        summaries = []
        for record in records:
            summaries.append(summarize(self._flow, record))
            await asyncio.sleep(0)  # each is compared with all others: requests get their turn in between
        return answer(RequestList(summaries, dict(self._flow.fleet.passed_on)))

    async def get_request(self, request: Request) -> Response:
        """One request, explained."""
        request_id = request.path_params["request_id"]
        record = self._flow.requests.get(request_id, request.query_params.get("tenant"))
        if record is None:
            others = ", ".join(self._flow.fleet.passed_on)
            passed_on = f"; requests were passed on to another kvpin, which has their records: {others}"
            problem = f"no recent request has the id {request_id!r}{passed_on if others else ''}"
            raise NotFound(problem, param="request_id")
        return answer(explain(self._flow, record))

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The routes as data."""
        return (
            Endpoint(
                "POST",
                "/route",
                self.post_route,
                "Where a request would go now and why, without sending it; the body is the request's own.",
                RouteAnswer,
                body=DryRun,
                open_body=True,
            ),
            Endpoint(
                "GET",
                "/requests",
                self.list_requests,
                "The last requests, newest first.",
                RequestList,
                query=(Query("limit", "integer", f"How many, 1 to {MOST}; 50 by default."),),
            ),
            Endpoint(
                "GET",
                "/requests/{request_id}",
                self.get_request,
                "One request, by kvpin's id or its client's: why its cache missed or hit.",
                RequestAnswer,
                query=(
                    Query("tenant", "string", "Whose request it is, where several clients send the same id."),
                ),
            ),
        )
