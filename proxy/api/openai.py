"""The data plane, `/v1/*`: reads a request, gives it to the flow, cancels it when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from engine_adapter import EngineError, JsonBody, route_of
from proxy.api.auth import authenticate, passed_on_headers
from proxy.api.errors import error_response
from proxy.errors import BadRequest, BodyTooLarge, NoEngine, NotFound, ProxyError
from proxy.flow import Flow
from proxy.request.calls import Call, Reply
from proxy.request.tenants import Tenants

log = structlog.get_logger(__name__)

MAX_REQUEST_ID = 128
# Routes whose bodies may be files. On all others the body must be JSON, whatever its content type says: some
# engines ignore the content type, and kvpin must check which tenant's KV a request may use.
FILE_ROUTES = ("/v1/audio/", "/v1/files", "/v1/images/", "/v1/uploads", "/v1/videos")
# kvpin does not serve these routes, because they change an engine for all clients.
ENGINE_ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
# Seconds an engine may take to end a stream after its client has read all of it.
ENGINE_END_S = 1.0
# Errors with an answer of their own. Any other is a bug.
_ANSWERED = (ProxyError, EngineError, msgspec.DecodeError)


class ClientLeft(Exception):
    """The client disconnected before its body was read."""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The ASGI application under `/v1`."""

    flow: Flow
    tenants: Tenants
    max_body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it is accepted: the server answers 403
            return
        headers = Headers(scope=scope)
        own_id, client_id = f"req-{uuid.uuid4().hex}", _client_id(headers)
        request_id = client_id or own_id
        reply = Reply(send)
        names = {"request": own_id, **({"client_request": client_id} if client_id else {})}
        with structlog.contextvars.bound_contextvars(**names):
            try:
                await self._serve(scope, receive, reply, headers, own_id)
            except ClientLeft:
                return
            except asyncio.CancelledError:
                # Only the server cancels: kvpin stops, and the request outlasted `graceful_shutdown_s`.
                log.info("request ended early: kvpin is stopping")
                stopping = NoEngine("kvpin is stopping; try again shortly")
                await _answer_error(stopping, request_id, reply, scope, receive, send)
            except _ANSWERED as error:
                await _answer_error(error, request_id, reply, scope, receive, send)
            except Exception as error:
                # A bug must fail one request, not the connection or the process.
                log.exception("request crashed")
                await _answer_error(error, request_id, reply, scope, receive, send)

    async def _serve(
        self, scope: Scope, receive: Receive, reply: Reply, headers: Headers, own_id: str
    ) -> None:
        tenant = authenticate(headers, self.tenants)
        path = _checked_path(scope)
        if scope["method"] in ("GET", "HEAD") and path.partition("?")[0].rstrip("/") == "/v1/models":
            return await _send(self._models(), reply)
        if scope["method"] in ("GET", "HEAD") and path.startswith("/v1/models/"):
            return await _send(self._model(unquote(path.removeprefix("/v1/models/"))), reply)
        body_read = asyncio.Event()
        body = await self._body(route_of(path), receive, headers, body_read)
        passed_on = passed_on_headers(headers, self.tenants)
        call = Call(own_id, scope["method"], path, passed_on, body, tenant, _client_id(headers))
        await _until_client_leaves(self.flow, call, reply, receive, body_read)
        return None

    async def _body(
        self, route: str, receive: Receive, headers: Headers, body_read: asyncio.Event
    ) -> JsonBody | AsyncIterator[bytes] | None:
        """The parsed JSON body, or the unread stream of a file upload."""
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise BodyTooLarge(f"the body has {length} bytes; the limit is {self.max_body_bytes}")
        chunks = _chunks(receive, self.max_body_bytes, body_read)
        if kind.startswith(("multipart/", "audio/")) and route.startswith(FILE_ROUTES):
            return chunks
        raw = b"".join([chunk async for chunk in chunks])
        return _parse(raw) if raw else None

    def _models(self) -> Response:
        cards = [_model_card(name, model) for name, model in self.flow.fleet.served().items()]
        return JSONResponse({"object": "list", "data": cards})

    def _model(self, name: str) -> Response:
        return JSONResponse(_model_card(name, self.flow.fleet.pool(name).model))


async def _until_client_leaves(
    flow: Flow, call: Call, reply: Reply, receive: Receive, body_read: asyncio.Event
) -> None:
    """Serves the call. A disconnect cancels it: the engine's connection closes, and its blocks are freed."""
    try:
        # A timeout without a time lets another task cancel this one in a way it can recognise. A task group
        # would cost as much as the rest of this module and would wrap the flow's errors.
        async with asyncio.timeout(None) as serving:
            watch = asyncio.create_task(_end_on_disconnect(receive, reply, serving, body_read))
            try:
                await flow.serve(call, reply)
            finally:
                watch.cancel()
    except TimeoutError:
        if not serving.expired():
            raise


async def _end_on_disconnect(
    receive: Receive, reply: Reply, serving: asyncio.Timeout, body_read: asyncio.Event
) -> None:
    await body_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
    if reply.complete:
        # Clients disconnect after [DONE]. The engine may end its stream first: its connection is then reused.
        await asyncio.sleep(ENGINE_END_S)
    serving.reschedule(0)


async def _chunks(receive: Receive, limit: int, body_read: asyncio.Event) -> AsyncIterator[bytes]:
    """Body bytes as they arrive. Sets `body_read` at the end.

    Raises:
        BodyTooLarge: the body exceeds the limit.
        ClientLeft: the client disconnected.
    """
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            body_read.set()
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the body is longer than the limit of {limit} bytes")
        if not message.get("more_body"):
            body_read.set()
        if chunk:
            yield chunk
        if body_read.is_set():
            return


def _parse(raw: bytes) -> JsonBody:
    try:
        return JsonBody(raw)
    except msgspec.ValidationError as error:
        raise BadRequest("the body must be a JSON object", code="invalid_json") from error


def _checked_path(scope: Scope) -> str:
    """The raw path with its query. Raises NotFound for dot segments: they could leave `/v1` at the engine."""
    raw = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    decoded = unquote(unquote(path))
    # Some servers ignore what follows a semicolon in a segment.
    segments = [segment.partition(";")[0] for segment in decoded.replace("\\", "/").split("/")]
    climbs = any(segment in (".", "..") for segment in segments)
    is_open = decoded.startswith("/v1/") and route_of(path).rstrip("/") not in ENGINE_ADMIN_ROUTES
    if climbs or not path.isascii() or not is_open:
        raise NotFound(f"there is no route {decoded!r}")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{path}?{query}" if query else path


def _client_id(headers: Headers) -> str | None:
    """The client's `x-request-id`, if it is short printable ASCII."""
    given = headers.get("x-request-id", "")
    usable = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else None


def _model_card(name: str, model: str) -> dict[str, object]:
    """A model as clients see it. A LoRA adapter has its model as `parent`, as in vLLM."""
    card: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "kvpin"}
    return card if name == model else {**card, "parent": model}


async def _send(response: Response, reply: Reply) -> None:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
    await reply.start(response.status_code, headers)
    await reply.finish(bytes(response.body))


async def _answer_error(
    error: Exception, request_id: str, reply: Reply, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers with the error. If the answer has begun, the connection breaks instead: clients notice that."""
    if reply.started:
        return
    with contextlib.suppress(OSError):
        await error_response(error, request_id)(scope, receive, send)
