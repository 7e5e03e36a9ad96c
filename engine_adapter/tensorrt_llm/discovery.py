"""What a server is: its routes, and its figures of load and cache. Nothing here changes it or takes its
events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.adapter import read_models
from engine_adapter.http.control import ControlClient, Samples, read_samples
from engine_adapter.options import READ
from engine_adapter.prompt.template_input import TemplateInput
from engine_adapter.tensorrt_llm.poller import CONFIG
from engine_adapter.tensorrt_llm.requests import CHAT, COMPLETIONS, SALT, GivenTools, RequestFields
from engine_adapter.types import TRANSLATED_ROUTES, Capability, EngineInfo, Finding

# --- routes ---------------------------------------------------------------------------------------------
# The routes of trtllm-serve beside `/v1`. Its others drain its buffers or change it for all clients.

ROUTES = {"/version": READ}


# --- reads a server's load and cache figures from one of two pages --------------------------------------
# `/prometheus/metrics` (with `return_perf_metrics: true`) can be read at any time. `/metrics` (with
# `enable_iter_perf_stats: true`) lists what each step did, and reading removes the list, also for other
# readers. So kvpin reads it rarely, and only if the first page is missing.

_RUNNING, _WAITING = "trtllm_num_requests_running", "trtllm_num_requests_waiting"
_MAX_BLOCKS, _USED_BLOCKS = "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_used_blocks"
_BLOCK_SIZE = "trtllm_kv_cache_tokens_per_block"
_MODEL, _CACHE = "trtllm_model_config_info", "trtllm_kv_cache_config_info"
_NAMES = (_RUNNING, _WAITING, _MAX_BLOCKS, _USED_BLOCKS, _BLOCK_SIZE, _MODEL, _CACHE)


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The figures; None where unknown.

    Attributes:
        gpu_usage: share of GPU blocks in use, 0 to 1.
        tokens_per_block, gpu_blocks: block size and capacity.
        block_reuse, partial_reuse: whether blocks, and parts of them, are reused.
        model: directory or hub id.
    """

    running: int | None = None
    waiting: int | None = None
    gpu_usage: float | None = None
    tokens_per_block: int | None = None
    gpu_blocks: int | None = None
    block_reuse: bool | None = None
    partial_reuse: bool | None = None
    model: str | None = None
    max_model_len: int | None = None


class _CacheStats(msgspec.Struct, rename="camel"):
    max_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0


class _Iteration(msgspec.Struct, rename="camel"):
    num_active_requests: int = 0
    num_queued_requests: int = 0
    kv_cache_stats: _CacheStats | None = None


def read_prometheus(page: bytes) -> ServerFigures:
    """Reads `/prometheus/metrics`. Raises EngineUnavailable if it has another format."""
    samples = read_samples(page, _NAMES)
    model, cache = samples.labels(_MODEL), samples.labels(_CACHE)
    blocks, used = _most(samples, _MAX_BLOCKS), _most(samples, _USED_BLOCKS)
    length = model.get("max_model_len", "")
    return ServerFigures(
        running=_most(samples, _RUNNING),
        waiting=_most(samples, _WAITING),
        gpu_usage=used / blocks if blocks and used is not None else None,
        tokens_per_block=_most(samples, _BLOCK_SIZE) or None,
        gpu_blocks=blocks or None,
        block_reuse=_flag(cache, "enable_block_reuse"),
        partial_reuse=_flag(cache, "enable_partial_reuse"),
        model=model.get("model"),
        max_model_len=int(length) if length.isascii() and length.isdigit() else None,
    )


def read_iterations(steps: Any) -> ServerFigures:  # noqa: ANN401 - JSON
    """Reads the last step of a `/metrics` answer. Without a step, nothing runs. Raises EngineUnavailable if
    the answer is not a list of steps."""
    try:
        iterations = msgspec.convert(steps, list[_Iteration])
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"/metrics is not TensorRT-LLM's: {error}") from error
    if not iterations:
        return ServerFigures(running=0, waiting=0)
    last = iterations[-1]
    cache = last.kv_cache_stats or _CacheStats()
    return ServerFigures(
        running=last.num_active_requests,
        waiting=last.num_queued_requests,
        gpu_usage=cache.used_num_blocks / cache.max_num_blocks if cache.max_num_blocks else None,
        tokens_per_block=cache.tokens_per_block or None,
        gpu_blocks=cache.max_num_blocks or None,
    )


def _most(samples: Samples, name: str) -> int | None:
    """The value, which each process of the server repeats."""
    return max((int(sample.value) for sample in samples.all(name)), default=None)


def _flag(labels: Mapping[str, str], name: str) -> bool | None:
    value = labels.get(name)
    return None if value is None else value.lower() == "true"


# --- finds out what a server is from its routes. Nothing here changes it or takes its events ------------
# trtllm-serve lists its routes at `/openapi.json`. Where it does not, the known routes are tried with GET: a
# POST route answers 405, a missing one 404, so nothing is run.

DEFAULT_TOKENS_PER_BLOCK = 32
EVENTS, ITERATIONS, PROMETHEUS = "/kv_cache_events", "/metrics", "/prometheus/metrics"
_RENDER = "/render"
# The name depends on the version.
_RESETS = re.compile(r"/(?:.*/)?reset_(?:prefix|kv)_cache|/(?:.*/)?(?:kv|prefix)_cache/reset")
_KNOWN_RESETS = ("/reset_prefix_cache", "/_control/kv_cache/reset")

NO_EVENTS = Finding(
    "it has no /kv_cache_events: kvpin learns what it holds from its answers", "use trtllm-serve 1.2 or newer"
)
NO_REUSE = Finding("it reuses no KV", CONFIG + "{enable_block_reuse: true}")
BLOCK_SIZE_UNKNOWN = Finding(
    f"its block size is unknown: kvpin assumes {DEFAULT_TOKENS_PER_BLOCK} tokens until its events show it",
    "set return_perf_metrics: true in its --config file",
)
PARTIAL_REUSE = Finding(
    "it also reuses parts of blocks, which its KV events do not show: predictions are lower bounds",
    CONFIG + "{enable_partial_reuse: false}",
)
PARTIAL_REUSE_UNTOLD = Finding(
    "it does not report whether it reuses parts of blocks: predictions count as lower bounds",
    "set return_perf_metrics: true in its --config file, and kv_cache_config: {enable_partial_reuse: false}",
)
NO_SALT = Finding(
    "it takes no cache_salt: tenants would share its KV",
    "use trtllm-serve 1.2 or newer, or one engine per tenant",
    (Capability.CACHE_SALT,),
)
NO_TOKENIZE = Finding(
    "it has no route to tokenise: kvpin cannot check its own tokens",
    "set TRTLLM_ENABLE_RENDER_ENDPOINTS=1 in its environment, if its version knows that",
    (Capability.TOKENIZE,),
)
NO_RESET = Finding(
    "its cache cannot be reset: after lost events, kvpin knows only blocks that are computed again"
)


@dataclass(frozen=True, slots=True)
class Discovered:
    """Facts about a server.

    Attributes:
        info: those that it tells all routers.
        whole_blocks_only: it is known not to reuse parts of blocks.
        reset_path: the route that empties its cache, None where there is none.
    """

    info: EngineInfo
    whole_blocks_only: bool
    reset_path: str | None
    fields: RequestFields
    findings: tuple[Finding, ...]

    @property
    def tokens_per_block(self) -> int:
        """Its block size, the default where it does not say."""
        return self.info.tokens_per_block or DEFAULT_TOKENS_PER_BLOCK


async def discover(control: ControlClient, instance: str) -> Discovered:
    """Asks a server what it is. The process has no identity: `instance` stands for it."""
    await control.fetch("GET", "/health")
    model = read_models(await control.get("/v1/models"))
    version = await _optional(control, "/version")
    server = await _optional(control, "/server_info")
    openapi: dict[str, Any] = {}
    with suppress(EngineUnavailable):  # some versions fail to describe their routes
        openapi = await _optional(control, "/openapi.json")
    paths = openapi.get("paths")
    paths = paths if isinstance(paths, dict) else {}
    stats = await read_stats(control)
    fields = RequestFields(openapi)
    capabilities = {Capability.CACHED_TOKENS}
    if await _has(control, paths, EVENTS):
        capabilities.add(Capability.KV_EVENTS)
    if fields.accepts(CHAT, SALT):
        capabilities.add(Capability.CACHE_SALT)
    if await _has(control, paths, CHAT + _RENDER) and await _has(control, paths, COMPLETIONS + _RENDER):
        capabilities.add(Capability.TOKENIZE)
    reset_path = await _reset_route(control, paths)
    if reset_path is not None:
        capabilities.add(Capability.FLUSH)
    size = server.get("tokens_per_block")
    block_size = size if type(size) is int and size > 0 else stats.tokens_per_block
    info = EngineInfo(
        model=model.name,
        instance=instance,
        names_process=False,
        rendering=f"model {model.name}",
        capabilities=frozenset(capabilities),
        tokens_per_block=block_size,
        max_model_len=stats.max_model_len or model.max_model_len,
        tokenizer=stats.model or (model.name if "/" in model.name else None),
        gpu_blocks=stats.gpu_blocks,
        version=f"TensorRT-LLM {version.get('version', '')}".strip(),
        events_read_once=True,
        template_input=TemplateInput(tools=GivenTools(openapi)),
        served_as_chats=TRANSLATED_ROUTES,
        routes=ROUTES,
        card=model.card,
    )
    return Discovered(info, stats.partial_reuse is False, reset_path, fields, tuple(_findings(info, stats)))


async def read_stats(control: ControlClient) -> ServerFigures:
    """The figures that a server reports of its load and cache now. Raises EngineUnavailable."""
    with suppress(EngineRejected):
        return read_prometheus(await control.fetch("GET", PROMETHEUS))
    with suppress(EngineRejected):
        return read_iterations(await control.get(ITERATIONS))
    return ServerFigures()


def _findings(info: EngineInfo, stats: ServerFigures) -> Iterable[Finding]:
    if stats.block_reuse is False:
        yield NO_REUSE
    if Capability.KV_EVENTS not in info.capabilities:
        yield NO_EVENTS
    elif info.tokens_per_block is None:
        yield BLOCK_SIZE_UNKNOWN
    if stats.block_reuse is not False and stats.partial_reuse is not False:
        yield PARTIAL_REUSE if stats.partial_reuse else PARTIAL_REUSE_UNTOLD
    for capability, finding in (
        (Capability.CACHE_SALT, NO_SALT),
        (Capability.TOKENIZE, NO_TOKENIZE),
        (Capability.FLUSH, NO_RESET),
    ):
        if capability not in info.capabilities:
            yield finding


async def _optional(control: ControlClient, path: str) -> dict[str, Any]:
    """The JSON object at `path`, {} if it is missing. Raises EngineUnavailable."""
    try:
        answer = await control.get(path)
    except EngineRejected:
        return {}
    return answer if isinstance(answer, dict) else {}


async def _has(control: ControlClient, paths: dict[str, Any], path: str) -> bool:
    """True if the server has that POST route. `paths`: its own description of its routes, {} without one.
    Raises EngineUnavailable."""
    if paths:
        methods = paths.get(path)
        return isinstance(methods, dict) and "post" in methods
    return await control.status("GET", path) in (HTTPStatus.OK, HTTPStatus.METHOD_NOT_ALLOWED)


async def _reset_route(control: ControlClient, paths: dict[str, Any]) -> str | None:
    """The route that resets the cache, if it has one."""
    for path in [each for each in paths if _RESETS.fullmatch(each)] or _KNOWN_RESETS:
        if await _has(control, paths, path):
            return path
    return None
