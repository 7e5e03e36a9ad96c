"""Finds out what a server is from its routes. Nothing here changes it or takes its events.

trtllm-serve lists its routes at `/openapi.json`. Where it does not, the known routes are tried with GET: a
POST route answers 405, a missing one 404, so nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.adapter import read_models
from engine_adapter.http.control import ControlClient
from engine_adapter.prompt.template_input import TemplateInput
from engine_adapter.tensorrt_llm.fields import CHAT, COMPLETIONS, SALT, GivenTools, RequestFields
from engine_adapter.tensorrt_llm.poller import CONFIG
from engine_adapter.tensorrt_llm.routes import ROUTES
from engine_adapter.tensorrt_llm.stats import ServerFigures, read_iterations, read_prometheus
from engine_adapter.types import TRANSLATED_ROUTES, Capability, EngineInfo, Finding

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
)
NO_TOKENIZE = Finding(
    "it has no route to tokenise: kvpin cannot check its own tokens",
    "set TRTLLM_ENABLE_RENDER_ENDPOINTS=1 in its environment, if its version knows that",
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
    routes = await _Routes.of(control)
    stats = await read_stats(control)
    fields = RequestFields(routes.openapi)
    capabilities = {Capability.CACHED_TOKENS}
    if await routes.has(EVENTS):
        capabilities.add(Capability.KV_EVENTS)
    if fields.accepts(CHAT, SALT):
        capabilities.add(Capability.CACHE_SALT)
    if await routes.has(CHAT + _RENDER) and await routes.has(COMPLETIONS + _RENDER):
        capabilities.add(Capability.TOKENIZE)
    reset_path = await routes.reset()
    if reset_path is not None:
        capabilities.add(Capability.FLUSH)
    info = EngineInfo(
        model=model.name,
        instance=instance,
        names_process=False,
        rendering=f"model {model.name}",
        capabilities=frozenset(capabilities),
        tokens_per_block=_block_size(server) or stats.tokens_per_block,
        max_model_len=stats.max_model_len or model.max_model_len,
        tokenizer=stats.model or (model.name if "/" in model.name else None),
        gpu_blocks=stats.gpu_blocks,
        version=f"TensorRT-LLM {version.get('version', '')}".strip(),
        events_read_once=True,
        template_input=TemplateInput(tools=GivenTools(routes.openapi)),
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


def _block_size(server: dict[str, Any]) -> int | None:
    size = server.get("tokens_per_block")
    return size if type(size) is int and size > 0 else None


async def _optional(control: ControlClient, path: str) -> dict[str, Any]:
    """The JSON object at `path`, {} if it is missing. Raises EngineUnavailable."""
    try:
        answer = await control.get(path)
    except EngineRejected:
        return {}
    return answer if isinstance(answer, dict) else {}


class _Routes:
    """The POST routes of a server."""

    def __init__(self, control: ControlClient, openapi: dict[str, Any]) -> None:
        self._control = control
        self.openapi = openapi
        paths = openapi.get("paths")
        self._paths = paths if isinstance(paths, dict) else {}

    @classmethod
    async def of(cls, control: ControlClient) -> _Routes:
        """Its own description of its routes, if it gives one. Raises EngineUnavailable."""
        try:
            openapi = await _optional(control, "/openapi.json")
        except EngineUnavailable:  # some versions fail to describe their routes
            openapi = {}
        return cls(control, openapi)

    async def has(self, path: str) -> bool:
        """True if the route exists. Raises EngineUnavailable."""
        if self._paths:
            methods = self._paths.get(path)
            return isinstance(methods, dict) and "post" in methods
        return await self._control.status("GET", path) in (HTTPStatus.OK, HTTPStatus.METHOD_NOT_ALLOWED)

    async def reset(self) -> str | None:
        """The route that resets the cache, if it has one. Raises EngineUnavailable."""
        named = [path for path in self._paths if _RESETS.fullmatch(path)]
        for path in named or _KNOWN_RESETS:
            if await self.has(path):
                return path
        return None
