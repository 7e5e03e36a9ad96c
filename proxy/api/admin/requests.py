"""Where a request would go, and what became of past ones."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import JsonBody
from proxy.api.admin.answers import RequestAnswer, RequestList, RouteAnswer
from proxy.api.admin.bodies import DryRun
from proxy.api.admin.endpoint import Endpoint, Query, answer, decode, int_query, read_bytes
from proxy.control import Control
from proxy.control.explain import explain, summarize
from proxy.control.routing import route
from proxy.errors import NotFound

MOST = 10_000


async def post_route(control: Control, request: Request) -> Response:
    """A dry run of placement."""
    raw = await read_bytes(request, control.max_body_bytes) or b"{}"
    decode(raw, DryRun)
    return answer(RouteAnswer, await route(control, JsonBody(raw)))


async def list_requests(control: Control, request: Request) -> Response:
    """The last requests, newest first."""
    limit = int_query(request, "limit", 50, MOST)
    records = list(control.requests)[: -limit - 1 : -1]
    return answer(RequestList, {"requests": [summarize(record) for record in records]})


async def get_request(control: Control, request: Request) -> Response:
    """One of them, explained."""
    request_id = request.path_params["request_id"]
    record = control.requests.get(request_id, request.query_params.get("tenant"))
    if record is None:
        raise NotFound(f"no recent request has the id {request_id!r}", param="request_id")
    return answer(RequestAnswer, explain(control, record))


ENDPOINTS = (
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
        "One request, by kvpin's id or its client's: predicted, reported, and why its cache missed or hit.",
        RequestAnswer,
        query=(Query("tenant", "string", "Whose request it is, where several clients send the same id."),),
    ),
)
