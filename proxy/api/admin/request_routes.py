"""Where a request would go, and what happened to past ones."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import JsonBody
from proxy.api.admin.endpoint import Endpoint, Query, answer, decode, int_query, read_bytes
from proxy.api.admin.request_bodies import DryRun
from proxy.control.dry_run import RouteAnswer, route
from proxy.control.explain import RequestAnswer, RequestSummary, explain, summarize
from proxy.errors import NotFound
from proxy.flow import Flow

MOST = 10_000


class RequestList(msgspec.Struct):
    """Requests, newest first. `passed_on` counts those that other kvpins answered for this one, by their
    names: these kvpins have the records."""

    requests: list[RequestSummary]
    passed_on: dict[str, int]


def request_routes(flow: Flow) -> tuple[Endpoint, ...]:
    """Asks the read path about requests."""

    async def post_route(request: Request) -> Response:
        raw = await read_bytes(request) or b"{}"
        decode(raw, DryRun)
        return answer(await route(flow, JsonBody(raw)))

    async def list_requests(request: Request) -> Response:
        limit = int_query(request, "limit", 50, MOST)
        summaries = []
        for record in list(flow.requests)[: -limit - 1 : -1]:
            summaries.append(await summarize(flow, record))
            await asyncio.sleep(0)  # each is compared with all others: requests get their turn in between
        return answer(RequestList(summaries, dict(flow.fleet.passed_on)))

    async def get_request(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        record = flow.requests.get(request_id, request.query_params.get("tenant"))
        if record is None:
            others = ", ".join(flow.fleet.passed_on)
            passed_on = f"; requests were passed on to another kvpin, which has their records: {others}"
            problem = f"no recent request has the id {request_id!r}, or several begin so"
            raise NotFound(problem + (passed_on if others else ""), param="request_id")
        return answer(await explain(flow, record))

    whose = Query("tenant", "string", "Whose request it is, where several clients send the same id.")
    return (
        Endpoint(
            "POST",
            "/route",
            post_route,
            "Where a request would go now and why, without sending it; the body is the request's own.",
            RouteAnswer,
            body=DryRun,
            open_body=True,
        ),
        Endpoint(
            "GET",
            "/requests",
            list_requests,
            "The last requests, newest first.",
            RequestList,
            query=(Query("limit", "integer", f"How many, 1 to {MOST}; 50 by default."),),
        ),
        Endpoint(
            "GET",
            "/requests/{request_id}",
            get_request,
            "One request, by kvpin's id or its client's: why its cache missed or hit.",
            RequestAnswer,
            query=(whose,),
        ),
    )
