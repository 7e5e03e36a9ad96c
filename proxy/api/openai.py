"""The data plane: reads a request, gives it to the flow, cancels it when its client disconnects.

It serves `/v1/*`, and those routes beside `/v1` that an adapter declares (`NATIVE_ROUTES`).
"""

from __future__ import annotations

import asyncio
import codecs
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from starlette.responses import Response

from engine_adapter import NATIVE_ROUTES, Headers, JsonBody, RequestBody, Upload, route_of
from engine_adapter.causes import Code
from engine_adapter.http.web_pages import page_asking
from engine_adapter.off_loop import JSON_BYTES_PER_MS, PAYER, JsonSize, may_stay, off_loop
from proxy.api.auth import (
    METHODS,
    SERVED,
    Cors,
    WrongKeys,
    authenticate,
    check_origin,
    is_preflight,
    passed_on_headers,
    preflight,
)
from proxy.api.fan_out import serve
from proxy.api.own_answers import (
    ALLOW_READS,
    KeptResponses,
    answer_models,
    error_response,
    is_of_models,
    name_in,
)
from proxy.api.paths import (
    FORM_BYTES_PER_MS,
    Subprotocol,
    check_method,
    check_websocket,
    checked_path,
    read_form,
    with_key,
)
from proxy.api.relay import PassedToKeeper, PassedToOwner, is_asked
from proxy.core.life import Cause
from proxy.errors import (
    ANSWERED,
    BadRequest,
    BodyTooLarge,
    MethodNotAllowed,
    NoEngine,
    RateLimited,
    Unauthorized,
    cause_of,
    message_of,
    status_of,
)
from proxy.flow import Flow, longer_than_total
from proxy.headers import REQUEST_ID_HEADER
from proxy.http.exchange import ClientLeft, Exchange
from proxy.request.bodies import HALF_CHARACTERS, parse, unpacked
from proxy.request.calls import PROMPT_ROUTES, Call, Reply, session_of
from proxy.request.gate import Admission, Gate
from proxy.request.known_routes import (
    ALLOW_POST,
    POST_ONLY,
    check_form,
    check_route,
    response_in,
    response_of,
)
from proxy.request.records import RequestRecord
from proxy.request.stages import with_limits
from proxy.request.tenants import ApiKey, Tenants
from proxy.request.translate import INPUT_TOKENS_PATH, ResponseStore
from proxy.request.translate.responses_store import MAX_ID
from proxy.request.translate.wording import dialect_of

log = structlog.get_logger(__name__)

MAX_REQUEST_ID = 128
# Routes whose bodies may be files. On all others the body must be JSON, whatever its content type says: some
# engines ignore the content type, and kvpin must check which tenant's KV a request may use.
FILE_ROUTES = ("/v1/audio/", "/v1/files", "/v1/images/", "/v1/uploads", "/v1/videos")
# Routes whose prompts stand in the body, and those that count such prompts.
_READ_HERE = PROMPT_ROUTES | {"/v1/messages/count_tokens", INPUT_TOKENS_PATH}
# Seconds that an engine has to end a stream after its client has read [DONE].
ENGINE_END_S = 1.0
# Seconds after `timeouts.total_s` in which a request that was interrupted may clean up.
CLEAN_UP_S = 30.0
# The ids on the log lines of a request, which runs in a task of its own. structlog adds every variable with
# its prefix; to bind one through structlog would look at all of them.
OWN_ID = ContextVar[str](f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}request")
_CLIENT_ID = ContextVar[str](f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}client_request")
_NO_LIMIT: AbstractContextManager[None] = nullcontext()
_REQUEST_ID = REQUEST_ID_HEADER.encode()


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The handler of exchanges under `/v1`, and of the engines' own routes.

    Attributes:
        gate: admits each request by its head, before its body is read.
        max_body_bytes: the longest body of a request.
        shape: the most that a JSON body may hold.
        cors: the web pages that may use it from a browser; None for none.
        refused: called with the status of each request that is refused before the flow, and with a reason of
            `kvpin_refused_total` where there is one.
        elsewhere: passes requests on to the kvpin that owns their engine; None for a single kvpin.
        to_keeper: passes requests on to the kvpin that keeps the named response; None for a single kvpin.
    """

    flow: Flow
    tenants: Tenants
    gate: Gate
    max_body_bytes: int
    shape: JsonSize = field(default_factory=JsonSize)
    responses: KeptResponses = field(default_factory=lambda: KeptResponses(ResponseStore()))
    cors: Cors | None = None
    refused: Callable[[int, str | None], None] = lambda _status, _reason: None
    elsewhere: PassedToOwner | None = None
    to_keeper: PassedToKeeper | None = None
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)

    async def serve(self, exchange: Exchange) -> None:
        """Serves one request."""
        own_id, client_id = f"req-{os.urandom(16).hex()}", None
        if _REQUEST_ID in exchange.headers.first:
            client_id = _client_id(exchange.headers)
        OWN_ID.set(own_id)
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
            reply.break_off(stopping, client_id or own_id)
            _answer_error(stopping, client_id or own_id, exchange, reply)
        except ANSWERED as error:
            if not reply.recorded:
                self.refused(status_of(error), getattr(error, "refusal", None))
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
            _send(self._options(exchange), exchange)
            return
        if self.tenants.open and not exchange.is_from_peer:  # no page sends a key that it does not know
            page = page_asking(headers, lambda: exchange.scheme, lambda: exchange.address("sockname"))
            check_origin(self.cors, page)
        if exchange.asks_for_websocket:
            await self._serve_websocket(exchange, reply, own_id, client_id)
            return
        key = self._key(exchange, headers)
        tenant = key.tenant if key is not None else None
        PAYER.set(tenant)
        path = checked_path(exchange.target)
        asks_prompt = method == "POST" and path in PROMPT_ROUTES  # these need no look at the path
        if not asks_prompt and await self._is_answered_here(exchange, reply, path, own_id, key):
            return
        call = partial(self._call, exchange, path, key, own_id, client_id)
        may_be_file = not asks_prompt and route_of(path).startswith(FILE_ROUTES)
        is_upload = may_be_file and _kind(headers).startswith(("multipart/", "audio/"))  # a file or a form
        limit = _NO_LIMIT if (total_s := self.flow.rules.total_s) is None else _within(total_s)
        with self._admit(tenant, exchange, reply, call, is_upload=is_upload) as admitted, limit:
            kept = None if asks_prompt else await self.responses.answer(method, path, tenant)
            if kept is not None:
                _send(kept, exchange)
            elif is_upload:
                await self._serve_upload(exchange, reply, call, admitted)
            else:
                try:
                    # No name for the call and its body here: the body is freed before the answer ends.
                    work = self._work(call(*await self._body(exchange, admitted)), exchange, reply, admitted)
                except ANSWERED as error:  # it cannot be read
                    self._record(call(None), error, reply)
                    raise
                await work

    def _key(self, exchange: Exchange, headers: Headers) -> ApiKey | None:
        """The key of a request: see `authenticate`. The log tells of requests without a right one."""
        try:
            return authenticate(headers, self.tenants)
        except Unauthorized as error:
            peer, event = exchange.address("peername"), "clients without a right key are refused"
            self.wrong_keys.tell(event, peer and peer[0], why=str(error))
            raise

    async def _is_answered_here(
        self, exchange: Exchange, reply: Reply, path: str, own_id: str, key: ApiKey | None
    ) -> bool:
        """Answers what no engine is needed for: which models there are, and whether a response is kept here.
        False for all other requests, which may be passed on. Raises NotFound, MethodNotAllowed: no API has
        the route or the method; Forbidden: several tenants may not use the route."""
        method = exchange.method
        check_method(method, path)
        if is_of_models(path):
            await self._serve_models(exchange, reply, path, own_id, key.models if key is not None else None)
            return True
        asked = response_in(route_of(path)) if is_asked(exchange) else None
        if asked is not None:
            is_kept = self._keeps(key.tenant if key is not None else None, asked)
            _send(Response(status_code=204 if is_kept else 404), exchange)
            return True
        if method not in SERVED:
            raise MethodNotAllowed(f"{method} is not served", allow=METHODS)
        if self.tenants.isolated:
            check_route(method, path)
        return False

    def _admit(
        self,
        tenant: str | None,
        exchange: Exchange,
        reply: Reply,
        call: Callable[[RequestBody], Call],
        *,
        is_upload: bool = False,
    ) -> Admission:
        """Admits a request. A request over its tenant's limits gets a record, made of its `call` without a
        body. Its answer tells what is left of these limits.

        With `is_upload`, its body is passed on as it arrives: its length is not the memory that it takes.
        Raises BodyTooLarge, RateLimited, NoMemory: it is refused."""
        length, now = self._length(exchange.headers), time.monotonic()
        if (quota := self.tenants.quota(tenant)) is not None:
            exchange.reword = lambda headers: with_limits(headers, quota.left(time.monotonic()))
        try:
            admitted = self.gate.admit(
                tenant, None if is_upload else length, now, is_from_peer=exchange.is_from_peer
            )
        except RateLimited as error:
            self._record(call(None), error, reply)
            raise
        reply.on_begin, reply.on_end = admitted.free_body, admitted.close
        return admitted

    def _record(self, call: Call, error: Exception, reply: Reply) -> None:
        """Notes a request that is refused before the flow."""
        record = RequestRecord.of(call)
        record.status, record.error, record.duration_s = status_of(error), message_of(error), 0.0
        record.cause, record.refusal = cause_of(error), getattr(error, "refusal", None)
        reply.recorded = True
        self.flow.requests.add(record)
        self.flow.observe(record)

    def _work(
        self, call: Call, exchange: Exchange, reply: Reply, admitted: Admission
    ) -> Coroutine[Any, Any, object]:
        """Serves a request on an engine, or passes it on to the kvpin that keeps the named response."""
        to_keeper = None if exchange.is_from_peer else self.to_keeper
        named = response_of(call) if to_keeper is not None else None
        if to_keeper is None or named is None or len(named.id) > MAX_ID or self._keeps(call.tenant, named.id):
            return self._at_engine(call, exchange, reply, admitted)
        here = partial(self._at_engine, call, exchange, reply, admitted)
        return to_keeper.serve(named.id, call, exchange, reply, here, self.flow.rules.all_placed_s)

    def _keeps(self, tenant: str | None, response_id: str) -> bool:
        """True if a tenant's response is kept here, or by an engine that is known here."""
        knows = self.flow.preparation.destinations.knows
        return self.responses.keeps(tenant, response_id) or knows(tenant, response_id)

    def _at_engine(
        self, call: Call, exchange: Exchange, reply: Reply, admitted: Admission
    ) -> Coroutine[Any, Any, object]:
        """The work of a request: on an engine, or at the kvpin that may use its engine."""
        if self.elsewhere is not None and self.elsewhere.is_concerned:
            here = partial(serve, self.flow, call, reply, admitted)
            silent_s = self.flow.rules.all_placed_s
            return self.elsewhere.serve(call.model, call, exchange, reply, here, silent_s)
        return serve(self.flow, call, reply, admitted)

    async def _serve_models(
        self, exchange: Exchange, reply: Reply, path: str, own_id: str, models: frozenset[str] | None
    ) -> None:
        """Answers with the models, those of other kvpins included."""
        elsewhere, fleet = self.elsewhere, self.flow.fleet
        if elsewhere is None:
            return _send(answer_models(fleet, exchange.method, path, models=models), exchange)

        async def here() -> None:
            _send(answer_models(fleet, exchange.method, path, elsewhere.models, models), exchange)

        call = Call(own_id, exchange.method, path, exchange.headers, None)
        silent_s = self.flow.rules.all_placed_s
        return await elsewhere.serve(name_in(path), call, exchange, reply, here, silent_s)

    async def _serve_websocket(
        self, exchange: Exchange, reply: Reply, own_id: str, client_id: str | None
    ) -> None:
        """Passes a WebSocket on to an engine that takes it, until one side closes it."""
        check_origin(self.cors, exchange.headers.get("origin"))  # browsers send no preflight for it
        headers = with_key(exchange.headers)
        key, path = self._key(exchange, headers), checked_path(exchange.target)
        tenant, models = (key.tenant, key.models) if key is not None else (None, None)
        check_websocket(path, isolated=self.tenants.isolated)
        passed_on, session = passed_on_headers(headers, self.tenants), session_of(tenant, headers, None)
        reply.stages.append(Subprotocol(headers))
        socket = exchange.socket()
        call = Call(
            own_id, exchange.method, path, passed_on, None, tenant, client_id, session, socket, models
        )
        with self._admit(tenant, exchange, reply, lambda _body: call) as admitted:
            await self._work(call, exchange, reply, admitted)

    async def _serve_upload(
        self, exchange: Exchange, reply: Reply, call: Callable[[RequestBody], Call], admitted: Admission
    ) -> None:
        """Serves a request whose body is a file or a form. It is passed on as it arrives, but for a form of
        which kvpin needs to know the model, or the names of the fields: that is read first."""
        headers, isolated = exchange.headers, self.tenants.isolated
        is_limited = call(None).models is not None
        if (isolated or is_limited) and sum(name == b"content-type" for name, _ in headers.raw) > 1:
            raise BadRequest("the request has several content types")  # the engine may read another one
        has_choice = self.flow.fleet.has_choice or (self.elsewhere is not None and self.elsewhere.models)
        is_form = _kind(headers).startswith("multipart/")
        if is_form and (isolated or is_limited or has_choice):
            form = await self._form(exchange, admitted, one_model=is_limited)
            await self._work(call(form), exchange, reply, admitted)
            return
        chunks = exchange.chunks(self.max_body_bytes)
        await self._work(call(Upload(chunks, self._length(headers))), exchange, reply, admitted)

    async def _form(self, exchange: Exchange, admitted: Admission, *, one_model: bool) -> Upload:
        raw = await exchange.read(self.max_body_bytes, admitted.hold)
        form = await off_loop(
            partial(read_form, raw, exchange.headers["content-type"]), ms=len(raw) / FORM_BYTES_PER_MS
        )
        if self.tenants.isolated:
            check_form(form.names)
        if one_model:
            form.check_one_model()
        return Upload(_once([raw]), len(raw), form.model)

    def _call(
        self,
        exchange: Exchange,
        path: str,
        key: ApiKey | None,
        own_id: str,
        client_id: str | None,
        body: RequestBody,
        changed: tuple[str, ...] = (),
    ) -> Call:
        """The request, read as far as the flow needs it."""
        headers = exchange.headers
        tenant, models = (key.tenant, key.models) if key is not None else (None, None)
        passed_on, session = passed_on_headers(headers, self.tenants), session_of(tenant, headers, body)
        return Call(
            own_id,
            exchange.method,
            path,
            passed_on,
            body,
            tenant,
            client_id,
            session,
            models=models,
            changed=changed,
        )

    async def _body(self, exchange: Exchange, admitted: Admission) -> tuple[JsonBody | None, tuple[str, ...]]:
        """The body, and what was changed in it."""
        raw = await exchange.read(self.max_body_bytes, admitted.hold)
        if not raw:
            if exchange.method == "POST" and route_of(checked_path(exchange.target)) in _READ_HERE:
                raise BadRequest("the body is empty: send a JSON object", code=Code.INVALID_JSON)
            return None, ()
        encoding = (
            exchange.headers.get("content-encoding")
            if b"content-encoding" in exchange.headers.first
            else None
        )
        if encoding is not None and encoding.lower() != "identity":
            raw = await unpacked(raw, encoding, self.max_body_bytes, admitted.hold)
            admitted.hold(len(raw))
            exchange.headers = Headers(
                [pair for pair in exchange.headers.raw if pair[0] != b"content-encoding"]
            )
        raw = raw.removeprefix(codecs.BOM_UTF8)
        if may_stay(ms := len(raw) / JSON_BYTES_PER_MS):
            body = parse(raw, self.shape)
        else:
            body = await off_loop(partial(parse, raw, self.shape), ms=ms)
        return body, () if body.raw is raw else (HALF_CHARACTERS,)

    def _length(self, headers: Headers) -> int | None:
        """The length of the body as its client gave it. Raises BodyTooLarge."""
        given = headers.first.get(b"content-length", b"")
        if not given.isdigit():
            return None
        if (length := int(given)) > self.max_body_bytes:
            limit = f"{self.max_body_bytes} (limits.body_bytes)"
            raise BodyTooLarge(f"the body has {length} bytes; the limit is {limit}")
        return length

    def _options(self, exchange: Exchange) -> Response:
        """Answers an OPTIONS request. Engines decide about the methods of their own routes."""
        if is_preflight(exchange.headers):
            return Response(status_code=204, headers=preflight(self.cors, exchange.headers))
        path = checked_path(exchange.target)
        native = NATIVE_ROUTES.get(path.partition("?")[0])
        if is_of_models(path) or (native is not None and native.method == "GET"):
            allow = ALLOW_READS
        else:
            allow = ALLOW_POST if route_of(path) in POST_ONLY else METHODS
        return Response(status_code=204, headers={"allow": allow})


@contextmanager
def _within(total_s: float) -> Iterator[None]:
    """Limits the work of a request. Its life ends in time by itself: this ends what is around it. Raises
    TimeLimit: it took longer than `total_s`, and the time to clean up."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - it runs in one
    timer = asyncio.get_running_loop().call_later(total_s + CLEAN_UP_S, task.cancel, Cause.OUR_LIMIT)
    try:
        yield
    except asyncio.CancelledError as cancelled:
        if cancelled.args != (Cause.OUR_LIMIT,):
            raise
        task.uncancel()
        raise longer_than_total(total_s) from cancelled
    finally:
        timer.cancel()


def _cancel(exchange: Exchange, reply: Reply) -> None:
    """The client disconnected: cancels its request, so that the engine's connection closes and its blocks are
    freed.

    Clients disconnect after [DONE]. The engine gets time to end its stream, so that its connection can be
    reused. Bytes already sent on a WebSocket still reach the engine."""
    ends_itself = reply.complete or (exchange.asks_for_websocket and reply.started)
    why = Cause.CLIENT_SLOW if exchange.is_slow else Cause.CLIENT_LEFT
    if exchange.task is not None:
        asyncio.get_running_loop().call_later(ENGINE_END_S if ends_itself else 0, exchange.task.cancel, why)


async def _once(parts: list[bytes]) -> AsyncIterator[bytes]:
    """Yields the parts, and forgets each."""
    while parts:
        yield parts.pop(0)


def _kind(headers: Headers) -> str:
    return headers.get("content-type", "").strip().lower()


def _client_id(headers: Headers) -> str | None:
    """The client's `x-request-id`, if it is short printable ASCII."""
    given = headers.get(REQUEST_ID_HEADER, "")
    usable = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else None


def _send(response: Response, exchange: Exchange) -> None:
    exchange.start(response.status_code, response.raw_headers)
    exchange.finish(bytes(response.body))


def _answer_error(error: Exception, request_id: str, exchange: Exchange, reply: Reply) -> None:
    """Answers with the error. If the answer has begun, the connection breaks instead: clients notice that."""
    if not exchange.started:
        _send(error_response(error, request_id, reply.dialect), exchange)
