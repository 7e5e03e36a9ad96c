"""The admin API as one ASGI application, and its OpenAPI document."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import groupby
from time import monotonic
from typing import Any

import msgspec
import structlog
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_adapter import EngineError
from proxy.api.admin.endpoint import Endpoint, answer
from proxy.api.auth import AdminGuard
from proxy.api.own_answers import error_response, handle_http
from proxy.control.keys import KEY_PREFIX
from proxy.errors import ProxyError
from proxy.headers import REQUEST_ID_HEADER

# --- the OpenAPI 3.1 document, made from the endpoints and the structs they take and answer -------------

_REF = "#/components/schemas/{name}"
_Schema = dict[str, Any]


class OpenApi(msgspec.Struct):
    """An OpenAPI 3.1 document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


class ErrorFields(msgspec.Struct):
    """An error: its message, type and code, and the request field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error, in OpenAI's shape."""

    error: ErrorFields


def with_document(prefix: str, endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints, and one more that serves the document of them all."""

    async def get_document(_request: Request) -> Response:
        return answer(described)

    last = Endpoint("GET", "/openapi.json", get_document, "This document.", OpenApi)
    every = (*endpoints, last)
    described = document(prefix, every)
    return every


def document(prefix: str, endpoints: Iterable[Endpoint]) -> OpenApi:
    """The whole document; `prefix` is where the endpoints are mounted."""
    endpoints = list(endpoints)
    schemas, refs = _components(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(prefix + endpoint.path, {})[endpoint.method.lower()] = _route(endpoint, refs)
    return OpenApi(
        openapi="3.1.0",
        info={
            "title": "kvpin admin API",
            "version": version("kvpin"),
            "description": "It needs the admin key; without one, it answers only the machine it runs on.",
        },
        paths=paths,
        components={
            "schemas": schemas,
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
        },
        security=[{"adminKey": []}],
    )


def _components(endpoints: list[Endpoint]) -> tuple[_Schema, dict[object, _Schema]]:
    """The schemas by name, and a reference to that of each body and answer."""
    answers = dict.fromkeys(endpoint.answer for endpoint in endpoints if endpoint.answer is not None)
    told, schemas = _structs([*answers, ErrorAnswer])
    for schema in schemas.values():
        if "properties" in schema:
            schema["required"] = list(schema["properties"])  # defaults or not, an answer has all its fields
    bodies = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    taken, body_schemas = _structs([body for body in bodies if issubclass(body, msgspec.Struct)])
    refs, schemas = told | taken, schemas | body_schemas
    for body in bodies:
        if issubclass(body, BaseModel):
            schema = body.model_json_schema(ref_template=_REF.format(name="{model}"))
            schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
            refs[body] = {"$ref": _REF.format(name=body.__name__)}
    for endpoint in endpoints:
        if endpoint.open_body and endpoint.body is not None:
            schemas[endpoint.body.__name__]["additionalProperties"] = True
    return schemas, refs


def _structs(kinds: list[type]) -> tuple[dict[object, _Schema], _Schema]:
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    return dict(zip(kinds, refs, strict=True)), schemas


def _route(endpoint: Endpoint, refs: dict[object, _Schema]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "As asked." if endpoint.answer is not None else "Done."}
    if endpoint.answer is not None:
        kind = "text/event-stream" if endpoint.is_stream else "application/json"
        good["content"] = {kind: {"schema": refs[endpoint.answer]}}
    error = {"description": "An error.", "content": {"application/json": {"schema": refs[ErrorAnswer]}}}
    words = re.sub(r"[{}]", "", endpoint.path).replace(".", "_").strip("/").split("/")
    route: dict[str, Any] = {
        "operationId": "_".join([endpoint.method.lower(), *words]),
        "summary": endpoint.summary,
        "responses": {**{str(status): good for status in endpoint.statuses}, "default": error},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.text, "schema": {"type": query.kind}}
        for query in endpoint.query
    ]
    if parameters:
        route["parameters"] = parameters
    content: dict[str, Any] = {}
    if endpoint.body is not None:
        content["application/json"] = {"schema": refs[endpoint.body]}
    if endpoint.raw_body:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if content:
        route["requestBody"] = {"content": content}
    return route


# --- the admin API as one ASGI application: first the guard, then the routes; errors have one shape -----

log = structlog.get_logger(__name__)

PREFIX = "/admin/v1"
# Methods that change nothing.
_READS = ("GET", "HEAD")
_REFUSED = (401, 403)
_LINES_A_MINUTE, _MINUTE_S = 10, 60.0
# Characters of a path that a line of the log repeats.
_MOST = 200
_KEY = re.compile(KEY_PREFIX.encode() + rb"[\w-]*")


Serve = Callable[[Endpoint, Request], Awaitable[Response]]
"""Answers a request to an endpoint."""


async def _alone(endpoint: Endpoint, request: Request) -> Response:
    return await endpoint.handler(request)


def admin_mount(endpoints: Iterable[Endpoint], guard: AdminGuard, serve: Serve = _alone) -> Mount:
    """The admin API, to mount at the root. `serve` answers together with other kvpins."""
    document = with_document(PREFIX, endpoints)
    # A redirect would lead to the host that the client named.
    router = Router(routes(document, serve), redirect_slashes=False, default=_not_found)
    return Mount(PREFIX, app=_Guarded(router, guard))


def routes(endpoints: Iterable[Endpoint], serve: Serve = _alone) -> list[Route]:
    """One route for each path, with all its methods."""
    by_path = sorted(endpoints, key=lambda endpoint: endpoint.path)
    made = []
    for path, group in groupby(by_path, key=lambda endpoint: endpoint.path):
        by_method = {endpoint.method: endpoint for endpoint in group}
        made.append(Route(path, partial(_serve, by_method, serve), methods=list(by_method)))
    return made


async def _serve(by_method: Mapping[str, Endpoint], serve: Serve, request: Request) -> Response:
    """One request to one path; HEAD is answered like GET."""
    endpoint = by_method.get(request.method) or by_method["GET"]
    try:
        endpoint.check_query(request)
        return await serve(endpoint, request)
    except (ProxyError, EngineError) as error:
        return error_response(error, request.headers.get(REQUEST_ID_HEADER))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await (await handle_http(Request(scope), HTTPException(404)))(scope, receive, send)


@dataclass(slots=True)
class RefusalLines:
    """How many refused requests the log tells of: each line costs disk, and whoever reaches kvpin makes some.
    `left_out`: those that have no line, since the last one that has one."""

    left_out: int = 0
    _since: float = -math.inf  # when this minute began
    _lines: int = 0

    def may_tell(self, now: float) -> bool:
        """True if one more line is allowed at `now`, in monotonic seconds."""
        if now - self._since >= _MINUTE_S:
            self._since, self._lines = now, 0
        self._lines += 1
        is_told = self._lines <= _LINES_A_MINUTE
        self.left_out += not is_told
        return is_told


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Answers nothing without the key, unknown paths included."""

    app: ASGIApp
    guard: AdminGuard
    refusals: RefusalLines = field(default_factory=RefusalLines)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        if scope["method"] not in _READS:
            send = audited(connection, send, self.guard.right(connection), self.refusals)
        try:
            await self.guard.admit(connection)
        except ProxyError as error:
            return await error_response(error)(scope, receive, send)
        try:
            return await self.app(scope, receive, send)
        except HTTPException as error:
            return await (await handle_http(Request(scope), error))(scope, receive, send)


def audited(connection: HTTPConnection, send: Send, right: str, refusals: RefusalLines) -> Send:
    """Wraps `send` so that it logs client, path, right and status. Bodies are never logged. Of refused
    requests, only `refusals` are told."""

    async def send_and_log(message: Message) -> None:
        is_refused = message["type"] == "http.response.start" and message["status"] in _REFUSED
        if message["type"] == "http.response.start" and (not is_refused or refusals.may_tell(monotonic())):
            more = {"left_out": refusals.left_out} if is_refused and refusals.left_out else {}
            refusals.left_out = 0 if is_refused else refusals.left_out
            log.info(
                "admin action",
                method=connection.scope["method"],
                path=_path(connection),
                status=int(message["status"]),
                peer=connection.client.host if connection.client is not None else None,
                by=None if is_refused else right,
                **more,
            )
        await send(message)

    return send_and_log


def _path(connection: HTTPConnection) -> str:
    """The path as it was sent, in ASCII: a decoded one could hold control characters. Someone may send a key
    in place of its id: it is left out."""
    raw: bytes = _KEY.sub(b"(a key)", connection.scope["raw_path"])
    return raw[:_MOST].decode("ascii", "backslashreplace")
