"""The engine's ASGI app: its routes, and their errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_adapter.errors import EngineError
from engine_adapter.events.wire import encode_snapshot
from engine_adapter.http.prepare import Headers as RawHeaders
from engine_adapter.http.web_pages import page_asking
from engine_adapter.off_loop import TABLE_BYTES_PER_MS, off_loop
from engine_adapter.torch_engine.completions import CompletionRoute, EmbeddingRoute
from engine_adapter.torch_engine.kv_cache import KvCache, SliceResult
from engine_adapter.torch_engine.metrics import EngineMetrics
from engine_adapter.torch_engine.prompt_tables import StoredTable, parse_extra_id
from engine_adapter.torch_engine.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    SliceRequest,
    UnpinRequest,
    parse,
    parse_tokenize,
    target_of,
)
from engine_adapter.torch_engine.scheduler import check_token_id
from engine_adapter.torch_engine.serve import DEFAULT_MAX_BODY_BYTES
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.torch_engine.web import ApiError, as_api_error, error_response, json_response, read_body
from engine_adapter.types import KvEvent, KvTarget

# --- the routes `/kv/…` and `/kv_event_sources`: the state of the cache, and operations on it -----------

Slice = Callable[[KvCache, KvTarget, int], SliceResult]


def kv_routes() -> list[BaseRoute]:
    """The routes, for the root of the app."""
    return [
        Route("/kv_event_sources", event_sources),
        Route("/kv/info", info),
        Route("/kv/load", load),
        Route("/kv/stats", stats),
        Route("/kv/snapshot", snapshot),
        Route("/kv/flush", _slice_route(KvCache.flush), methods=["POST"]),
        Route("/kv/offload", _slice_route(KvCache.offload), methods=["POST"]),
        Route("/kv/restore", _slice_route(KvCache.restore), methods=["POST"]),
        Route("/kv/pin", pin, methods=["POST"]),
        Route("/kv/unpin", unpin, methods=["POST"]),
        Route("/kv/prompt_tables", list_tables),
        Route("/kv/prompt_tables/{table_id:path}", put_table, methods=["PUT"]),
        Route("/kv/prompt_tables/{table_id:path}", delete_table, methods=["DELETE"]),
    ]


async def kv_stats(service: EngineService) -> dict[str, Any]:
    """The answer of `GET /kv/stats`."""
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


async def event_sources(request: Request) -> Response:
    """The event sockets by data-parallel rank. There is one rank."""
    return json_response({"0": asdict(service_of(request).publisher.source)})


async def info(request: Request) -> Response:
    """Model, sizes and identity of this engine."""
    service = service_of(request)
    model, engine = service.model, service.engine
    return json_response(
        {
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
    )


async def load(request: Request) -> Response:
    """Identity and load. Does not wait for the engine thread: a long step is no failure."""
    service = service_of(request)
    counters = service.engine.counters
    return json_response(
        {"instance": service.instance, "running": counters.running, "waiting": counters.waiting}
    )


async def stats(request: Request) -> Response:
    """Blocks, pins, requests and tokens."""
    return json_response(await kv_stats(service_of(request)))


async def snapshot(request: Request) -> Response:
    """All cached blocks, and the number of the last event batch they include."""
    service = service_of(request)
    publisher = service.publisher

    def take(cache: KvCache) -> tuple[int, list[KvEvent]]:
        return publisher.last_sequence, cache.snapshot()

    sequence, stored = await service.call(take)
    body = await asyncio.to_thread(encode_snapshot, sequence, stored)
    return Response(body, media_type="application/msgpack")


def _slice_route(slice_of: Slice) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        service = service_of(request)
        asked = parse(await body_of(request) or b"{}", SliceRequest)
        target = target_of(asked)
        done = await service.call(lambda cache: slice_of(cache, target, asked.max_blocks))
        return json_response(asdict(done))

    return route


async def pin(request: Request) -> Response:
    """Protects a prefix from eviction for a while."""
    service = service_of(request)
    asked = parse(await body_of(request), PinRequest)
    target = target_of(asked)
    pinned = await service.call(lambda cache: cache.pin(target, asked.ttl_s, time.monotonic()))
    return json_response(asdict(pinned))


async def unpin(request: Request) -> Response:
    """Ends a pin."""
    service = service_of(request)
    asked = parse(await body_of(request), UnpinRequest)
    return json_response({"unpinned": await service.call(partial(KvCache.unpin, pin_id=asked.pin_id))})


async def list_tables(request: Request) -> Response:
    """Every prompt table."""
    return json_response({"prompt_tables": [_shown(table) for table in service_of(request).tables.all()]})


async def put_table(request: Request) -> Response:
    """Stores a prompt table: 201 for a new one, 200 for a known one."""
    service = service_of(request)
    extra_id = parse_extra_id(request.query_params.get("extra_id"))
    table_id, data = request.path_params["table_id"], await body_of(request)
    read = partial(service.tables.read, table_id, data, extra_id)
    table, is_new = service.tables.keep(await off_loop(read, ms=len(data) / TABLE_BYTES_PER_MS))
    return json_response(_shown(table), status=201 if is_new else 200)


async def delete_table(request: Request) -> Response:
    """Deletes a prompt table; an unknown id is no error."""
    return json_response({"deleted": service_of(request).tables.delete(request.path_params["table_id"])})


def _shown(table: StoredTable) -> dict[str, Any]:
    return {
        "id": table.table_id,
        "extra_id": table.extra_id,
        "rows": table.rows,
        "hidden": table.tensor.shape[1],
    }


def service_of(request: Request) -> EngineService:
    """The service behind a request; raises ApiError (503) while there is none."""
    service: EngineService = request.app.state.host.ready()
    return service


async def body_of(request: Request) -> bytes:
    """The whole body; raises ApiError (413) beyond the limit."""
    return await read_body(request.scope, request.receive, request.app.state.max_body_bytes)


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
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/chat/completions", CompletionRoute(ChatRequest), methods=["POST"]),
            Route("/v1/completions", CompletionRoute(CompletionRequest), methods=["POST"]),
            Route("/v1/embeddings", EmbeddingRoute(), methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            *kv_routes(),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ClientDisconnect: _nobody_to_answer,
            Exception: _fault,
            ApiError: _answer_error,
            EngineError: _answer_error,
        },
    )
    app.state.host = host
    app.state.metrics = EngineMetrics()
    app.state.max_body_bytes = max_body_bytes
    return app


async def health(request: Request) -> Response:
    """200 while the engine serves."""
    service_of(request)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Prometheus text; without cache statistics after the engine has ended."""
    shown: EngineMetrics = request.app.state.metrics
    service: EngineService | None = request.app.state.host.service
    if service is None:
        raise ApiError("the model is loading", status=503, code="loading")
    stats: Mapping[str, Any] = await kv_stats(service) if service.engine.alive else {}
    return PlainTextResponse(
        shown.render(service.engine.counters, stats), media_type="text/plain; version=0.0.4"
    )


async def models(request: Request) -> Response:
    """A list of the one served model."""
    return json_response({"object": "list", "data": [_model_card(service_of(request))]})


async def model(request: Request) -> Response:
    """One model by name."""
    service = service_of(request)
    service.check_model(request.path_params["model"])
    return json_response(_model_card(service))


async def tokenize(request: Request) -> Response:
    """The tokens of a chat or a prompt, exactly as the engine would run them."""
    service = service_of(request)
    prompt = await service.prompt(parse_tokenize(await body_of(request)))
    extra_ids = prompt.extra_ids
    return json_response(
        {
            "count": len(prompt.token_ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": prompt.token_ids.tolist(),
            "extra_ids": None if extra_ids is None else extra_ids.tolist(),
        }
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service = service_of(request)
    asked = parse(await body_of(request), DetokenizeRequest)
    limit = service.model.vocab_size
    for index, token in enumerate(asked.tokens):
        check_token_id(token, f"tokens[{index}]", limit)
    return json_response({"prompt": service.tokenizer.decode(asked.tokens)})


def _model_card(service: EngineService) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvpin",
        "max_model_len": service.engine.max_model_len,
    }


async def _answer_error(_request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    if known is None:
        raise error
    return error_response(known)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    message = (
        f"{request.method} {path} is not served here" if error.status_code in (404, 405) else error.detail
    )
    answer = error_response(ApiError(message, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


async def _nobody_to_answer(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # never sent: the client is gone


async def _fault(_request: Request, _error: Exception) -> Response:
    return error_response(
        ApiError("internal error; the engine's log has the details", status=500, code="internal_error")
    )


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
