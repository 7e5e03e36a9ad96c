"""The data plane: reads a request, gives it to the flow, cancels it when its client disconnects.

It serves `/v1/*`, and those routes beside `/v1` that an adapter declares (`NATIVE_ROUTES`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from urllib.parse import unquote

import msgspec
import structlog
from starlette.responses import JSONResponse, Response

from engine_adapter import NATIVE_ROUTES, Headers, JsonBody, RequestBody, Upload, route_of
from proxy.api.auth import authenticate, passed_on_headers
from proxy.api.cors import METHODS, Cors, is_preflight, preflight
from proxy.api.errors import error_response
from proxy.api.exchange import ClientLeft, Exchange
from proxy.api.forms import new_spool, read_form
from proxy.api.responses import KeptResponses
from proxy.errors import (
    BadRequest,
    BodyTooLarge,
    EncodedBody,
    Forbidden,
    MethodNotAllowed,
    NoEngine,
    NotFound,
)
from proxy.fleet.pool import Pool
from proxy.flow import Flow
from proxy.request.calls import Call, Reply
from proxy.request.dialects import dialect_of
from proxy.request.error_table import ANSWERED, status_of
from proxy.request.session import session_of
from proxy.request.tenants import Tenants
from proxy.several import serve
from proxy.translate import ResponseStore

log = structlog.get_logger(__name__)

MAX_REQUEST_ID = 128
# Characters of a client's content-encoding that an error repeats.
MAX_ENCODING = 40
# Routes whose bodies may be files. On all others the body must be JSON, whatever its content type says: some
# engines ignore the content type, and kvpin must check which tenant's KV a request may use.
FILE_ROUTES = ("/v1/audio/", "/v1/files", "/v1/images/", "/v1/uploads", "/v1/videos")
# kvpin does not serve these routes, because they change an engine for all clients.
ENGINE_ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
# Nor these, llama-server's streams by the names of conversations: any client can read, find and end them.
STREAM_ROUTES = ("/v1/stream/", "/v1/streams/")
_MODELS = "/v1/models"
_READS, _ALLOW_READS = ("GET", "HEAD"), "GET, HEAD, OPTIONS"
# Seconds an engine may take to end a stream after its client has read all of it.
ENGINE_END_S = 1.0
# The ids on the log lines of a request, which runs in a task of its own. structlog adds every variable with
# its prefix; to bind one through structlog would look at all of them.
_OWN_ID = ContextVar[str](f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}request")
_CLIENT_ID = ContextVar[str](f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}client_request")


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The handler of exchanges under `/v1`, and of the engines' own routes.

    Attributes:
        max_body_bytes: the longest body of a request.
        cors: the web pages that may use it from a browser; None for none.
        refused: called with the status of each request that is refused before the flow.
    """

    flow: Flow
    tenants: Tenants
    max_body_bytes: int
    responses: KeptResponses = field(default_factory=lambda: KeptResponses(ResponseStore()))
    cors: Cors | None = None
    refused: Callable[[int], None] = lambda _status: None

    async def serve(self, exchange: Exchange) -> None:
        """Serves one request."""
        own_id, client_id = f"req-{os.urandom(16).hex()}", _client_id(exchange.headers)
        _OWN_ID.set(own_id)
        if client_id is not None:
            _CLIENT_ID.set(client_id)
        if self.cors is not None:
            exchange.added = self.cors.headers(exchange.headers)
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
            if not reply.recorded:
                self.refused(status_of(error))
            _answer_error(error, client_id or own_id, exchange, reply)
        except Exception as error:
            # A bug must fail one request, not the connection or the process.
            log.exception("request crashed")
            _answer_error(error, client_id or own_id, exchange, reply)

    async def _serve(self, exchange: Exchange, reply: Reply, own_id: str, client_id: str | None) -> None:
        headers, method = exchange.headers, exchange.method
        if exchange.is_reserved:
            raise NoEngine("kvpin serves as many connections as it can; try again shortly")
        if method == "OPTIONS":  # a preflight carries no key
            return _send(self._options(exchange), exchange)
        tenant = authenticate(headers, self.tenants)
        path = _checked_path(exchange.target)
        _check_method(method, path)
        if method in _READS and "sec-websocket-key" in headers:
            raise Forbidden("kvpin serves no WebSockets")
        if _is_of_models(path):
            return _send(self._models(method, path), exchange)
        if (kept := self.responses.answer(method, path, tenant)) is not None:
            return _send(kept, exchange)
        if _is_upload(path, headers):
            call = partial(self._call, exchange, path, tenant, own_id, client_id)
            return await self._serve_upload(exchange, reply, call)
        # No name for the call and its body here: the body is freed before the answer ends.
        return await serve(
            self.flow,
            self._call(exchange, path, tenant, own_id, client_id, await self._body(exchange)),
            reply,
        )

    async def _serve_upload(
        self, exchange: Exchange, reply: Reply, call: Callable[[RequestBody], Call]
    ) -> None:
        """Serves a request whose body is passed on as it arrives. A form is read as far as its model's name,
        where that matters."""
        length, chunks = self._length(exchange.headers), exchange.chunks(self.max_body_bytes)
        if not (_kind(exchange.headers).startswith("multipart/form-data") and self.flow.fleet.has_choice):
            return await self.flow.serve(call(Upload(chunks, length)), reply)
        with new_spool() as spool:
            form = await read_form(chunks, exchange.headers["content-type"], length, spool)
            return await self.flow.serve(call(form), reply)

    def _call(
        self,
        exchange: Exchange,
        path: str,
        tenant: str | None,
        own_id: str,
        client_id: str | None,
        body: RequestBody,
    ) -> Call:
        """The request, read as far as the flow needs it."""
        headers = exchange.headers
        passed_on, session = passed_on_headers(headers, self.tenants), session_of(tenant, headers, body)
        return Call(own_id, exchange.method, path, passed_on, body, tenant, client_id, session)

    async def _body(self, exchange: Exchange) -> JsonBody | None:
        """The parsed JSON body."""
        self._length(exchange.headers)
        raw = await exchange.read(self.max_body_bytes)
        encoding = exchange.headers.get("content-encoding", "identity")
        if raw and encoding.lower() != "identity":
            raise EncodedBody(f"the body is encoded as {encoding[:MAX_ENCODING]!r}: send it as plain JSON")
        return _parse(raw) if raw else None

    def _length(self, headers: Headers) -> int | None:
        """The length of the body as its client gave it. Raises BodyTooLarge."""
        given = headers.get("content-length", "")
        if not given.isdigit():
            return None
        if int(given) > self.max_body_bytes:
            raise BodyTooLarge(f"the body has {given} bytes; the limit is {self.max_body_bytes}")
        return int(given)

    def _options(self, exchange: Exchange) -> Response:
        """The answer to an OPTIONS. Which methods a route of engines has, only they know."""
        if is_preflight(exchange.headers):
            return Response(status_code=204, headers=preflight(self.cors, exchange.headers))
        path = _checked_path(exchange.target)
        native = NATIVE_ROUTES.get(path.partition("?")[0])
        reads = _is_of_models(path) or (native is not None and native.method == "GET")
        return Response(status_code=204, headers={"allow": _ALLOW_READS if reads else METHODS})

    def _models(self, method: str, path: str) -> Response:
        """The list of models, or one of them. An alias has the name it stands for as `root`, as in vLLM."""
        asked, fleet = path.partition("?")[0], self.flow.fleet
        if method not in _READS:
            raise MethodNotAllowed(f"{asked} takes {_ALLOW_READS}, not {method}", allow=_ALLOW_READS)
        cards = {name: _model_card(name, fleet.pools[model]) for name, model in fleet.served().items()}
        cards |= {
            alias: {**cards[own], "id": alias, "root": own} for alias, own in fleet.served_aliases().items()
        }
        # A llama-server's model may be named by its absolute path: slashes of the name stay.
        name = unquote(asked.removeprefix(_MODELS).removeprefix("/").rstrip("/"))
        if not name:
            return JSONResponse({"object": "list", "data": list(cards.values())})
        if name not in cards:
            raise fleet.not_served(name)
        return JSONResponse(cards[name])


def _cancel(exchange: Exchange, reply: Reply) -> None:
    """The client disconnected: cancels its request, so that the engine's connection closes and its blocks are
    freed.

    Clients disconnect after [DONE]. The engine may end its stream first: its connection is then reused.
    """
    if exchange.task is not None:
        asyncio.get_running_loop().call_later(ENGINE_END_S if reply.complete else 0, exchange.task.cancel)


def _is_of_models(path: str) -> bool:
    """Whether kvpin itself answers requests for this path."""
    return path.startswith(_MODELS) and path[len(_MODELS) :][:1] in ("", "/", "?")


def _is_upload(path: str, headers: Headers) -> bool:
    """Whether the body is passed on as it arrives."""
    return route_of(path).startswith(FILE_ROUTES) and _kind(headers).startswith(("multipart/", "audio/"))


def _kind(headers: Headers) -> str:
    return headers.get("content-type", "").strip().lower()


def _parse(raw: bytes) -> JsonBody:
    try:
        return JsonBody(raw)
    except msgspec.ValidationError as error:
        raise BadRequest("the body must be a JSON object", code="invalid_json") from error


@lru_cache(maxsize=256)
def _checked_path(target: bytes) -> str:
    """Path and query of a request for the engine. A native route that equals one of `/v1` becomes that one.

    Raises:
        NotFound: the route is not open, or has dot segments: they could leave `/v1` at the engine.
    """
    whole = target.decode("latin-1")
    path, _, query = whole.partition("?")
    if (native := NATIVE_ROUTES.get(path)) is not None:
        path = native.same_as or path
        return f"{path}?{query}" if query else path
    decoded = unquote(unquote(path))
    # Some servers ignore what follows a semicolon in a segment.
    segments = [segment.partition(";")[0] for segment in decoded.replace("\\", "/").split("/")]
    climbs = any(segment in (".", "..") for segment in segments)
    route = route_of(path).rstrip("/")
    is_closed = route in ENGINE_ADMIN_ROUTES or f"{route}/".startswith(STREAM_ROUTES)
    is_open = decoded.startswith("/v1/") and not is_closed
    if climbs or not path.isascii() or not is_open:
        raise NotFound(f"there is no route {decoded!r}")
    return whole.removesuffix("?")


def _check_method(method: str, path: str) -> None:
    """Raises NotFound for a method of a native route that is its engine's operator's, or nobody's."""
    native = NATIVE_ROUTES.get(path.partition("?")[0])
    if native is not None and method != native.method and (method, native.method) != ("HEAD", "GET"):
        raise NotFound(f"there is no route {method} {path}")


def _client_id(headers: Headers) -> str | None:
    """The client's `x-request-id`, if it is short printable ASCII."""
    given = headers.get("x-request-id", "")
    usable = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else None


def _model_card(name: str, pool: Pool) -> dict[str, object]:
    """A model as clients see it, with its engines' own fields. A LoRA adapter has its model as `parent`, as
    in vLLM."""
    card: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "kvpin"}
    return {**pool.card, **card} if name == pool.model else {**card, "parent": pool.model}


def _send(response: Response, exchange: Exchange) -> None:
    exchange.start(response.status_code, response.raw_headers)
    exchange.finish(bytes(response.body))


def _answer_error(error: Exception, request_id: str, exchange: Exchange, reply: Reply) -> None:
    """Answers with the error. If the answer has begun, the connection breaks instead: clients notice that."""
    if not exchange.started:
        _send(error_response(error, request_id, reply.dialect), exchange)
