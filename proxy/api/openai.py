"""The data plane, `/v1/*`: reads a request, gives it to the flow, cancels it when its client disconnects."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote

import msgspec
import structlog
from starlette.responses import JSONResponse, Response

from engine_adapter import Headers, JsonBody, route_of
from proxy.api.auth import authenticate, passed_on_headers
from proxy.api.errors import error_response
from proxy.api.exchange import ClientLeft, Exchange
from proxy.api.responses import KeptResponses
from proxy.errors import BadRequest, BodyTooLarge, Forbidden, NoEngine, NotFound
from proxy.flow import Flow
from proxy.request.calls import Call, Reply
from proxy.request.dialects import dialect_of
from proxy.request.error_table import ANSWERED
from proxy.request.session import session_of
from proxy.request.tenants import Tenants
from proxy.translate import ResponseStore

log = structlog.get_logger(__name__)

MAX_REQUEST_ID = 128
# Routes whose bodies may be files. On all others the body must be JSON, whatever its content type says: some
# engines ignore the content type, and kvpin must check which tenant's KV a request may use.
FILE_ROUTES = ("/v1/audio/", "/v1/files", "/v1/images/", "/v1/uploads", "/v1/videos")
# kvpin does not serve these routes, because they change an engine for all clients.
ENGINE_ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
# Seconds an engine may take to end a stream after its client has read all of it.
ENGINE_END_S = 1.0
# The ids on the log lines of a request, which runs in a task of its own. structlog adds every variable with
# its prefix; to bind one through structlog would look at all of them.
_OWN_ID = ContextVar[str](f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}request")
_CLIENT_ID = ContextVar[str](f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}client_request")


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The handler of exchanges under `/v1`."""

    flow: Flow
    tenants: Tenants
    max_body_bytes: int
    responses: KeptResponses = field(default_factory=lambda: KeptResponses(ResponseStore()))

    async def serve(self, exchange: Exchange) -> None:
        """Serves one request."""
        own_id, client_id = f"req-{os.urandom(16).hex()}", _client_id(exchange.headers)
        _OWN_ID.set(own_id)
        if client_id is not None:
            _CLIENT_ID.set(client_id)
        reply = Reply(exchange, dialect_of(exchange.target))
        exchange.on_left = lambda: _cancel(exchange, reply)
        try:
            await self._serve(exchange, reply, own_id, client_id)
        except ClientLeft:
            return
        except asyncio.CancelledError:
            if exchange.left:
                return
            # kvpin stops, and the request outlasted `graceful_shutdown_s`.
            log.info("request ended early: kvpin is stopping")
            stopping = NoEngine("kvpin is stopping; try again shortly")
            _answer_error(stopping, client_id or own_id, exchange, reply)
        except ANSWERED as error:
            _answer_error(error, client_id or own_id, exchange, reply)
        except Exception as error:
            # A bug must fail one request, not the connection or the process.
            log.exception("request crashed")
            _answer_error(error, client_id or own_id, exchange, reply)

    async def _serve(self, exchange: Exchange, reply: Reply, own_id: str, client_id: str | None) -> None:
        headers, method = exchange.headers, exchange.method
        tenant = authenticate(headers, self.tenants)
        path = _checked_path(exchange.target)
        if method in ("GET", "HEAD"):
            if "sec-websocket-key" in headers:
                raise Forbidden("kvpin serves no WebSockets")
            asked = path.partition("?")[0]
            if asked.rstrip("/") == "/v1/models":
                return _send(self._models(), exchange)
            if asked.startswith("/v1/models/"):
                return _send(self._model(unquote(path.removeprefix("/v1/models/"))), exchange)
        if (kept := self.responses.answer(method, path, tenant)) is not None:
            return _send(kept, exchange)
        # No name for the call here: its body is freed before the answer ends.
        return await self.flow.serve(await self._call(exchange, path, tenant, own_id, client_id), reply)

    async def _call(
        self, exchange: Exchange, path: str, tenant: str | None, own_id: str, client_id: str | None
    ) -> Call:
        """The request, read as far as the flow needs it."""
        headers, body = exchange.headers, await self._body(route_of(path), exchange)
        passed_on, session = passed_on_headers(headers, self.tenants), session_of(tenant, headers, body)
        return Call(own_id, exchange.method, path, passed_on, body, tenant, client_id, session)

    async def _body(self, route: str, exchange: Exchange) -> JsonBody | AsyncIterator[bytes] | None:
        """The parsed JSON body, or the unread stream of a file upload."""
        headers, limit = exchange.headers, self.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise BodyTooLarge(f"the body has {length} bytes; the limit is {limit}")
        if route.startswith(FILE_ROUTES):
            kind = headers.get("content-type", "").strip().lower()
            if kind.startswith(("multipart/", "audio/")):
                return exchange.chunks(limit)
        raw = await exchange.read(limit)
        return _parse(raw) if raw else None

    def _models(self) -> Response:
        cards = [_model_card(name, model) for name, model in self.flow.fleet.served().items()]
        return JSONResponse({"object": "list", "data": cards})

    def _model(self, name: str) -> Response:
        return JSONResponse(_model_card(name, self.flow.fleet.pool(name).model))


def _cancel(exchange: Exchange, reply: Reply) -> None:
    """The client disconnected: cancels its request, so that the engine's connection closes and its blocks are
    freed.

    Clients disconnect after [DONE]. The engine may end its stream first: its connection is then reused.
    """
    if exchange.task is not None:
        asyncio.get_running_loop().call_later(ENGINE_END_S if reply.complete else 0, exchange.task.cancel)


def _parse(raw: bytes) -> JsonBody:
    try:
        return JsonBody(raw)
    except msgspec.ValidationError as error:
        raise BadRequest("the body must be a JSON object", code="invalid_json") from error


@lru_cache(maxsize=256)
def _checked_path(target: bytes) -> str:
    """Path and query of a request. Raises NotFound for dot segments: they could leave `/v1` at the engine."""
    whole = target.decode("latin-1")
    path = whole.partition("?")[0]
    decoded = unquote(unquote(path))
    # Some servers ignore what follows a semicolon in a segment.
    segments = [segment.partition(";")[0] for segment in decoded.replace("\\", "/").split("/")]
    climbs = any(segment in (".", "..") for segment in segments)
    is_open = decoded.startswith("/v1/") and route_of(path).rstrip("/") not in ENGINE_ADMIN_ROUTES
    if climbs or not path.isascii() or not is_open:
        raise NotFound(f"there is no route {decoded!r}")
    return whole.removesuffix("?")


def _client_id(headers: Headers) -> str | None:
    """The client's `x-request-id`, if it is short printable ASCII."""
    given = headers.get("x-request-id", "")
    usable = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else None


def _model_card(name: str, model: str) -> dict[str, object]:
    """A model as clients see it. A LoRA adapter has its model as `parent`, as in vLLM."""
    card: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "kvpin"}
    return card if name == model else {**card, "parent": model}


def _send(response: Response, exchange: Exchange) -> None:
    exchange.start(response.status_code, response.raw_headers)
    exchange.finish(bytes(response.body))


def _answer_error(error: Exception, request_id: str, exchange: Exchange, reply: Reply) -> None:
    """Answers with the error. If the answer has begun, the connection breaks instead: clients notice that."""
    if not exchange.started:
        _send(error_response(error, request_id, reply.dialect), exchange)
