"""The engine's ASGI app: its routes, and their errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from engine_adapter.errors import EngineError, EngineUnavailable
from engine_adapter.events.wire import encode_snapshot
from engine_adapter.http.prepare import Headers as RawHeaders
from engine_adapter.http.web_pages import page_asking
from engine_adapter.off_loop import TABLE_BYTES_PER_MS, off_loop
from engine_adapter.torch_engine.completions import completion_of, embed
from engine_adapter.torch_engine.kv_cache import KvCache, SliceResult
from engine_adapter.torch_engine.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    SliceRequest,
    UnpinRequest,
    as_api_error,
    body_of,
    error_response,
    json_response,
    parse,
    parse_tokenize,
    target_of,
)
from engine_adapter.torch_engine.scheduler import check_token_ids
from engine_adapter.torch_engine.serve import DEFAULT_MAX_BODY_BYTES, KEY_VARIABLE, EmbeddedOptions
from engine_adapter.torch_engine.service import EngineService, StoredTable, parse_extra_id
from engine_adapter.types import KvEvent, KvTarget

Slice = Callable[[KvCache, KvTarget, int], SliceResult]
Answer = Callable[[EngineService, Request], Awaitable[object]]
"""The answer to a request, as JSON or as an ASGI app; the engine serves."""


def _route(path: str, answer: Answer, method: str = "GET") -> Route:
    async def route(request: Request) -> object:
        found = await answer(request.app.state.host.ready(), request)
        return found if callable(found) else json_response(found)

    return Route(path, route, methods=[method])


# --- the routes `/kv/…` and `/kv_event_sources`: the state of the cache, and operations on it -----------


async def kv_stats(service: EngineService, _request: Request) -> dict[str, Any]:
    """Blocks, pins, requests and tokens."""
    cache: dict[str, Any] = await service.call(lambda kv: kv.stats(time.monotonic()))
    counters = service.engine.counters
    return {
        **cache,
        "requests": {"running": counters.running, "waiting": counters.waiting},
        "tokens": {
            "prompt": counters.prompt_tokens,
            "cached": counters.cached_tokens,
            "generated": counters.generated_tokens,
        },
    }


async def event_sources(service: EngineService, _request: Request) -> object:
    """The event sockets by data-parallel rank. There is one rank."""
    return {"0": service.publisher.source}


async def info(service: EngineService, _request: Request) -> object:
    """Model, sizes and identity of this engine."""
    model, engine = service.model, service.engine
    return {
        "engine": "kvpin-embedded",
        "version": version("kvpin"),
        "instance": service.instance,
        "model": model.name,
        "tokenizer": model.tokenizer,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "max_model_len": engine.max_model_len,
        "tokens_per_block": service.options.tokens_per_block,
        "gpu_blocks": engine.gpu_blocks,
        "host_blocks": engine.host_blocks,
        "block_bytes": engine.block_bytes,
        "dtype": model.dtype,
        "device": model.device,
    }


async def load(service: EngineService, _request: Request) -> object:
    """Identity and load. Does not wait for the engine thread: a long step is no failure."""
    counters = service.engine.counters
    return {"instance": service.instance, "running": counters.running, "waiting": counters.waiting}


async def snapshot(service: EngineService, _request: Request) -> object:
    """All cached blocks, and the number of the last event batch they include."""

    def take(cache: KvCache) -> tuple[int, list[KvEvent]]:
        return service.publisher.last_sequence, cache.snapshot()

    body = await asyncio.to_thread(encode_snapshot, *await service.call(take))
    return Response(body, media_type="application/msgpack")


def _slices(slice_of: Slice) -> Answer:
    async def answer(service: EngineService, request: Request) -> object:
        asked = parse(await body_of(request) or b"{}", SliceRequest)
        target = target_of(asked)
        return await service.call(lambda cache: slice_of(cache, target, asked.max_blocks))

    return answer


async def pin(service: EngineService, request: Request) -> object:
    """Protects a prefix from eviction for a while."""
    asked = parse(await body_of(request), PinRequest)
    target = target_of(asked)
    return await service.call(lambda cache: cache.pin(target, asked.ttl_s, time.monotonic()))


async def unpin(service: EngineService, request: Request) -> object:
    """Ends a pin."""
    asked = parse(await body_of(request), UnpinRequest)
    return {"unpinned": await service.call(lambda cache: cache.unpin(asked.pin_id))}


async def list_tables(service: EngineService, _request: Request) -> object:
    """Every prompt table."""
    return {"prompt_tables": [_shown(table) for table in service.tables.by_id.values()]}


async def put_table(service: EngineService, request: Request) -> object:
    """Stores a prompt table: 201 for a new one, 200 for a known one."""
    extra_id = parse_extra_id(request.query_params.get("extra_id"))
    table_id, data = request.path_params["table_id"], await body_of(request)
    read = partial(service.tables.read, table_id, data, extra_id)
    table, is_new = service.tables.keep(await off_loop(read, ms=len(data) / TABLE_BYTES_PER_MS))
    return json_response(_shown(table), status=201 if is_new else 200)


async def delete_table(service: EngineService, request: Request) -> object:
    """Deletes a prompt table; an unknown id is no error."""
    return {"deleted": service.tables.delete(request.path_params["table_id"])}


def _shown(table: StoredTable) -> dict[str, Any]:
    hidden = table.tensor.shape[1]
    return {"id": table.table_id, "extra_id": table.extra_id, "rows": table.rows, "hidden": hidden}


# --- server ---------------------------------------------------------------------------------------------


class EngineHost:
    """Holds the service as soon as it is loaded."""

    def __init__(self, service: EngineService | None = None) -> None:
        self.service = service

    def ready(self) -> EngineService:
        """The service; raises ApiError (503) while it loads and after its engine has ended."""
        if self.service is None:
            raise ApiError("the model is loading", status=503, code="loading")
        if not self.service.engine.alive:
            raise ApiError("the engine is not running", status=503, code="engine_unavailable")
        return self.service


def create_app(
    host: EngineHost, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, key: str | None = None
) -> Starlette:
    """The app around `host`. Its service may be set later. Bodies beyond `max_body_bytes` are a 413. `key`:
    what requests must give; without it, only web pages are refused."""
    app = Starlette(
        middleware=[Middleware(Guard, key=key)],
        routes=[
            Route("/metrics", metrics),
            _route("/v1/chat/completions", completion_of(ChatRequest), "POST"),
            _route("/v1/completions", completion_of(CompletionRequest), "POST"),
            _route("/v1/embeddings", embed, "POST"),
            _route("/health", health),
            _route("/v1/models", models),
            _route("/v1/models/{model:path}", model),
            _route("/tokenize", tokenize, "POST"),
            _route("/detokenize", detokenize, "POST"),
            _route("/kv_event_sources", event_sources),
            _route("/kv/info", info),
            _route("/kv/load", load),
            _route("/kv/stats", kv_stats),
            _route("/kv/snapshot", snapshot),
            _route("/kv/flush", _slices(KvCache.flush), "POST"),
            _route("/kv/offload", _slices(KvCache.offload), "POST"),
            _route("/kv/restore", _slices(KvCache.restore), "POST"),
            _route("/kv/pin", pin, "POST"),
            _route("/kv/unpin", unpin, "POST"),
            _route("/kv/prompt_tables", list_tables),
            _route("/kv/prompt_tables/{table_id:path}", put_table, "PUT"),
            _route("/kv/prompt_tables/{table_id:path}", delete_table, "DELETE"),
        ],
        exception_handlers={
            HTTPException: _http_error,
            Exception: _fault,
            **dict.fromkeys((ApiError, EngineError, ClientDisconnect), _answer_error),
        },
    )
    app.state.host = host
    app.state.max_body_bytes = max_body_bytes
    return app


async def health(_service: EngineService, _request: Request) -> object:
    """200 while the engine serves."""
    return {"status": "ok"}


async def metrics(request: Request) -> Response:
    """Prometheus text; without cache statistics after the engine has ended."""
    service: EngineService | None = request.app.state.host.service
    if service is None:
        raise ApiError("the model is loading", status=503, code="loading")
    stats: Mapping[str, Any] = await kv_stats(service, request) if service.engine.alive else {}
    text = service.metrics.render(service.engine.counters, stats)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def models(service: EngineService, _request: Request) -> object:
    """A list of the one served model."""
    return {"object": "list", "data": [_model_card(service)]}


async def model(service: EngineService, request: Request) -> object:
    """One model by name."""
    service.check_model(request.path_params["model"])
    return _model_card(service)


async def tokenize(service: EngineService, request: Request) -> object:
    """The tokens of a chat or a prompt, exactly as the engine would run them."""
    prompt = await service.prompt(parse_tokenize(await body_of(request)))
    return {
        "count": len(prompt.token_ids),
        "max_model_len": service.engine.max_model_len,
        "tokens": prompt.token_ids.tolist(),
        "extra_ids": None if prompt.extra_ids is None else prompt.extra_ids.tolist(),
    }


# Token ids that are checked and decoded in about 1 ms.
_IDS_PER_MS = 2048


async def detokenize(service: EngineService, request: Request) -> object:
    """The text of token ids."""
    asked = parse(await body_of(request), DetokenizeRequest)

    def decode() -> str:
        check_token_ids("tokens", enumerate(asked.tokens), service.model.vocab_size)
        return service.tokenizer.decode(asked.tokens)

    return {"prompt": await off_loop(decode, ms=len(asked.tokens) / _IDS_PER_MS)}


def _model_card(service: EngineService) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvpin",
        "max_model_len": service.engine.max_model_len,
    }


async def _answer_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # never sent: the client is gone
    if (known := as_api_error(error)) is None:
        raise error
    return error_response(known)


async def _fault(_request: Request, _error: Exception) -> Response:
    message = "internal error; the engine's log has the details"
    return error_response(ApiError(message, status=500, code="internal_error"))


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    is_ours = error.status_code in (404, 405)
    message = f"{request.method} {request.url.path} is not served here" if is_ours else error.detail
    answer = error_response(ApiError(message, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


_OPEN = "/health"


class Guard:
    """Answers a refused request by itself, and passes all others on. `/health` needs no key."""

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        """`key`: what requests must give as `Authorization: Bearer <key>`; None for no key."""
        self._app = app
        self._digest = None if key is None else _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._digest is not None:
            given = Headers(scope=scope).get("authorization", "")
            if scope["path"] == _OPEN or hmac.compare_digest(self._digest, _digest(given.encode("latin-1"))):
                return None
            return ApiError(
                "the engine needs its key: Authorization: Bearer <key>", status=401, code="invalid_api_key"
            )
        page = page_asking(RawHeaders(scope["headers"]), lambda: scope["scheme"], lambda: scope["server"])
        if page is None:
            return None
        return ApiError(f"the engine answers no web page ({page})", status=403, code="forbidden")


def _digest(text: bytes) -> bytes:
    """Of equal length for all texts: the time of a comparison tells nothing of the key."""
    return hashlib.sha256(text).digest()


# --- the process of one engine: it answers at once, loads meanwhile, ends both together -----------------

_GRACE_S = 20
_TO_TELL_S = 3  # then clients are told, before uvicorn cancels what is left without a word
_BACKLOG = 2048
_log = logging.getLogger("kvpin.engine")


def serve_engine(options: EmbeddedOptions) -> None:
    """Serves until SIGTERM or SIGINT; running requests then have 20 s to finish. The address answers at once.
    `/health` is 503 until the model is loaded. Raises EngineSpecError if model and options cannot be served,
    and EngineUnavailable if the address cannot be bound or the engine died."""
    listener = _listen(options.host, options.port)
    process = _EngineProcess(options)
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%s, loading the model", f"[{host}]" if ":" in host else host, port)
    numbers = signal.SIGTERM, signal.SIGINT
    # uvicorn raises the signal again at its end: a wanted end is no crash.
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        process.server.run(sockets=[listener])
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if process.failure is not None:
        raise process.failure


class _Server(uvicorn.Server):
    """Ends the engine when the grace is over, so that its requests end as those of any engine that stops."""

    end_engine: Callable[[], None]

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_GRACE_S, loop.run_in_executor, None, self.end_engine)
        await super().shutdown(sockets)
        timer.cancel()


class _EngineProcess(EngineHost):
    """Loads the service while the server runs already; ends both together."""

    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self._options = options
        # What the engine starts does not inherit the key.
        key = os.environ.pop(KEY_VARIABLE, None) or None
        web = create_app(self, max_body_bytes=options.max_body_bytes, key=key)
        web.router.lifespan_context = self.lifespan
        grace_s = _GRACE_S + _TO_TELL_S
        config = uvicorn.Config(
            web, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=grace_s
        )
        self.server = _Server(config)
        self.server.end_engine = self._end_engine

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Starts loading; stops the engine at the end."""
        # A daemon thread: a load may take minutes and must not delay the end.
        threading.Thread(target=self._load, name="load-model", daemon=True).start()
        if self._options.exit_with_parent:
            threading.Thread(target=self._follow_parent, name="follow-parent", daemon=True).start()
        yield
        if self.service is not None:
            await asyncio.to_thread(self.service.close)

    def _load(self) -> None:
        try:
            service = EngineService(self._options)
        except Exception as error:  # noqa: BLE001 - raised again by serve_engine, in the main thread
            self.failure = error
            self.server.should_exit = True
            return
        self.service = service
        if service.model.is_default:
            _log.warning(
                "no --model given: serving %s, a small model with random weights; its answers mean nothing",
                service.model.name,
            )
        _log.info("serving %s", service.model.name)
        reason = service.engine.wait()
        if reason is not None:
            self.failure = EngineUnavailable(f"the engine died and must be started again: {reason}")
            self._end_surely()

    def _end_engine(self) -> None:
        if self.service is not None:
            self.service.engine.stop()

    def _follow_parent(self) -> None:
        """Ends the process when its standard input closes: the parent is gone."""
        while os.read(0, 4096):
            pass
        self._end_surely()

    def _end_surely(self) -> None:
        """Ends the process; kills it if a clean end hangs, as nobody else may notice that."""
        self.server.should_exit = True
        threading.Event().wait(_GRACE_S + _TO_TELL_S + 2)
        os._exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Its connections send small chunks without delay."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by connections
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise EngineUnavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
