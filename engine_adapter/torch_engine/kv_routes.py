"""The routes `/kv/…` and `/kv_event_sources`: the state of the cache, and operations on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from engine_adapter.events.wire import encode_snapshot
from engine_adapter.off_loop import TABLE_BYTES_PER_MS, off_loop
from engine_adapter.torch_engine.kv_admin import SliceResult
from engine_adapter.torch_engine.kv_cache import KvCache
from engine_adapter.torch_engine.prompt_tables import StoredTable, parse_extra_id
from engine_adapter.torch_engine.protocol import (
    PinRequest,
    SliceRequest,
    UnpinRequest,
    parse,
    target_of,
)
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.torch_engine.web import json_response, read_body
from engine_adapter.types import KvEvent, KvTarget

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
