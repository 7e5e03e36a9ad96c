"""The admin API as one ASGI application: guard first, then routes, errors in one shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_adapter import EngineError
from proxy.api.admin import engines, kv, requests, tables
from proxy.api.admin.answers import OpenApi
from proxy.api.admin.endpoint import Endpoint, answer
from proxy.api.admin.openapi import document
from proxy.api.auth import AdminGuard
from proxy.api.errors import error_response, handle_http
from proxy.control import Control
from proxy.errors import ProxyError

PREFIX = "/admin/v1"


async def get_document(_control: Control, _request: Request) -> Response:
    """The OpenAPI document."""
    return answer(OpenApi, document(PREFIX, ENDPOINTS))


ENDPOINTS: tuple[Endpoint, ...] = (
    *engines.ENDPOINTS,
    *kv.ENDPOINTS,
    *requests.ENDPOINTS,
    *tables.ENDPOINTS,
    Endpoint("GET", "/openapi.json", get_document, "This document.", OpenApi),
)


def admin_routes(control: Control, guard: AdminGuard) -> list[Mount]:
    """The routes to mount at the root."""
    router = Router(routes(control), default=_not_found)
    return [Mount(PREFIX, app=_Guarded(router, guard))]


def routes(control: Control) -> list[Route]:
    """One route a path, with all its methods."""
    by_path = sorted(ENDPOINTS, key=lambda endpoint: endpoint.path)
    made = []
    for path, group in groupby(by_path, key=lambda endpoint: endpoint.path):
        handlers = {endpoint.method: endpoint.handler for endpoint in group}
        made.append(Route(path, partial(_serve, control, handlers), methods=list(handlers)))
    return made


async def _serve(
    control: Control,
    handlers: dict[str, Callable[[Control, Request], Awaitable[Response]]],
    request: Request,
) -> Response:
    """One request to one endpoint; HEAD is answered as GET is."""
    handler = handlers.get(request.method) or handlers["GET"]
    try:
        return await handler(control, request)
    except (ProxyError, EngineError) as error:
        return error_response(error, request.headers.get("x-request-id"))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    response = await handle_http(Request(scope), HTTPException(404))
    await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Lets nothing through without the key, unknown paths included."""

    app: ASGIApp
    guard: AdminGuard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.guard.check(HTTPConnection(scope))
        except ProxyError as error:
            response = error_response(error)
            return await response(scope, receive, send)
        try:
            return await self.app(scope, receive, send)
        except HTTPException as error:
            response = await handle_http(Request(scope), error)
            return await response(scope, receive, send)
