"""Finds out what a server is from its routes. Nothing here changes it or takes its events.

trtllm-serve lists its routes at `/openapi.json`. Where it does not, the known routes are tried with GET: a
POST route answers 405, a missing one 404, so nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.http.models import read_models
from engine_adapter.tensorrt_llm.fields import CHAT, COMPLETIONS, SALT, RequestFields
from engine_adapter.tensorrt_llm.poller import CONFIG
from engine_adapter.tensorrt_llm.stats import Stats, read_iterations, read_prometheus
from engine_adapter.types import Capability, Finding

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
        model: the name it serves under.
        card: its own fields of the model in `/v1/models`.
        version: free text.
        tokens_per_block: its block size, the default where it does not say.
        whole_blocks_only: it is known not to reuse parts of blocks.
        max_model_len, gpu_blocks: None where unknown.
        tokenizer: directory or hub id, None where unknown.
        capabilities: what it can do.
        reset_path: the route that empties its cache, None where there is none.
        fields: the request fields it takes.
        findings: what keeps kvpin from using it fully.
    """

    model: str
    card: Mapping[str, Any] = field(repr=False)
    version: str
    tokens_per_block: int
    whole_blocks_only: bool
    max_model_len: int | None
    gpu_blocks: int | None
    tokenizer: str | None
    capabilities: frozenset[Capability]
    reset_path: str | None
    fields: RequestFields
    findings: tuple[Finding, ...]


async def discover(control: ControlClient) -> Discovered:
    """Asks a server what it is.

    Raises:
        EngineUnavailable: it is not healthy, or not reachable.
        EngineRejected: it refuses a route that every server of this kind has.
    """
    await control.fetch("GET", "/health")
    model = read_models(await control.get("/v1/models"))
    version = await _optional(control, "/version")
    server = await _optional(control, "/server_info")
    routes = await _Routes.of(control)
    stats = await read_stats(control)
    fields = RequestFields(routes.openapi)
    reported = _block_size(server) or stats.tokens_per_block
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
    return Discovered(
        model=model.name,
        card=model.card,
        version=str(version.get("version", "")),
        tokens_per_block=reported or DEFAULT_TOKENS_PER_BLOCK,
        whole_blocks_only=stats.partial_reuse is False,
        max_model_len=stats.max_model_len or model.max_model_len,
        gpu_blocks=stats.gpu_blocks,
        tokenizer=stats.model or (model.name if "/" in model.name else None),
        capabilities=frozenset(capabilities),
        reset_path=reset_path,
        fields=fields,
        findings=tuple(_findings(frozenset(capabilities), stats, knows_size=reported is not None)),
    )


async def read_stats(control: ControlClient) -> Stats:
    """The figures that a server reports of its load and cache now. Raises EngineUnavailable."""
    with suppress(EngineRejected):
        return read_prometheus(await control.fetch("GET", PROMETHEUS))
    with suppress(EngineRejected):
        return read_iterations(await control.get(ITERATIONS))
    return Stats()


def _findings(capabilities: frozenset[Capability], stats: Stats, *, knows_size: bool) -> Iterable[Finding]:
    if stats.block_reuse is False:
        yield NO_REUSE
    if Capability.KV_EVENTS not in capabilities:
        yield NO_EVENTS
    elif not knows_size:
        yield BLOCK_SIZE_UNKNOWN
    if stats.block_reuse is not False and stats.partial_reuse is not False:
        yield PARTIAL_REUSE if stats.partial_reuse else PARTIAL_REUSE_UNTOLD
    for capability, finding in (
        (Capability.CACHE_SALT, NO_SALT),
        (Capability.TOKENIZE, NO_TOKENIZE),
        (Capability.FLUSH, NO_RESET),
    ):
        if capability not in capabilities:
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
        """Whether the route exists. Raises EngineUnavailable."""
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
