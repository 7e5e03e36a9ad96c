"""The admin API as one ASGI application: first the guard, then the routes; errors have one shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_adapter import EngineError
from proxy.api.admin.endpoint import Endpoint
from proxy.api.admin.openapi import with_document
from proxy.api.auth import AdminGuard
from proxy.api.error_answers import error_response, handle_http
from proxy.control.keys import KEY_PREFIX
from proxy.errors import ProxyError
from proxy.headers import REQUEST_ID_HEADER

log = structlog.get_logger(__name__)

PREFIX = "/admin/v1"
# Methods that change nothing.
_READS = ("GET", "HEAD")
_REFUSED = (401, 403)
# Characters of a path that a line of the log repeats.
_MOST = 200
_KEY = re.compile(KEY_PREFIX.encode() + rb"[\w-]*")


def admin_mount(endpoints: Iterable[Endpoint], guard: AdminGuard) -> Mount:
    """The admin API, to mount at the root."""
    document = with_document(PREFIX, endpoints)
    # A redirect would lead to the host that the client named.
    router = Router(routes(document), redirect_slashes=False, default=_not_found)
    return Mount(PREFIX, app=_Guarded(router, guard))


def routes(endpoints: Iterable[Endpoint]) -> list[Route]:
    """One route for each path, with all its methods."""
    by_path = sorted(endpoints, key=lambda endpoint: endpoint.path)
    made = []
    for path, group in groupby(by_path, key=lambda endpoint: endpoint.path):
        by_method = {endpoint.method: endpoint for endpoint in group}
        made.append(Route(path, partial(_serve, by_method), methods=list(by_method)))
    return made


async def _serve(by_method: Mapping[str, Endpoint], request: Request) -> Response:
    """One request to one path; HEAD is answered like GET."""
    endpoint = by_method.get(request.method) or by_method["GET"]
    try:
        endpoint.check_query(request)
        return await endpoint.handler(request)
    except (ProxyError, EngineError) as error:
        return error_response(error, request.headers.get(REQUEST_ID_HEADER))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    response = await handle_http(Request(scope), HTTPException(404))
    await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Answers nothing without the key, unknown paths included."""

    app: ASGIApp
    guard: AdminGuard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        if scope["method"] not in _READS:
            send = audited(connection, send, self.guard.right(connection))
        try:
            self.guard.check(connection)
        except ProxyError as error:
            response = error_response(error)
            return await response(scope, receive, send)
        try:
            return await self.app(scope, receive, send)
        except HTTPException as error:
            response = await handle_http(Request(scope), error)
            return await response(scope, receive, send)


def audited(connection: HTTPConnection, send: Send, right: str) -> Send:
    """Wraps `send` so that it logs client, path, right and status. Bodies are never logged."""

    async def send_and_log(message: Message) -> None:
        if message["type"] == "http.response.start":
            log.info(
                "admin action",
                method=connection.scope["method"],
                path=_path(connection),
                status=int(message["status"]),
                peer=connection.client.host if connection.client is not None else None,
                by=right if message["status"] not in _REFUSED else None,
            )
        await send(message)

    return send_and_log


def _path(connection: HTTPConnection) -> str:
    """The path as it was sent, in ASCII: a decoded one could hold control characters. Someone may send a key
    in place of its id: it is left out."""
    raw: bytes = _KEY.sub(b"(a key)", connection.scope["raw_path"])
    return raw[:_MOST].decode("ascii", "backslashreplace")
