"""Finds out what the LMCache of an engine is, and what keeps kvpin from using it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_adapter.errors import EngineError
from engine_adapter.lmcache.client import Context, Coordinator, CoordinatorConfig, LmCacheNode, Scope, Status
from engine_adapter.lmcache.options import LmCacheSpec
from engine_adapter.types import Capability, Finding

_UNUSED = "kvpin does not use it"
_CONNECTOR = (
    'start vLLM with --kv-transfer-config \'{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":{"lmcache.mp.host":"tcp://HOST","lmcache.mp.port":PORT}}\''
)

# Suffix of a model name whose context is spread over ranks.
_SPREAD = "##"
_REPORTING = "--coordinator-url http://HOST:PORT --coordinator-event-reporting"


@dataclass(frozen=True, slots=True)
class Site:
    """A usable node with its coordinator.

    Attributes:
        coordinator: knows the place of every chunk.
        scope: selects the engine's KV.
        flush_s: delay in seconds until the coordinator hears of changes on the node.
        capabilities: those they add to the engine's.
    """

    coordinator: Coordinator
    scope: Scope
    tokens_per_chunk: int
    flush_s: float
    capabilities: frozenset[Capability]


class _Unusable(Exception):
    """Ends a survey, with its finding."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.finding = Finding(f"{problem}: {_UNUSED}", remedy)


async def survey(
    spec: LmCacheSpec, model: str, node: LmCacheNode, coordinator_at: Callable[[str], Coordinator]
) -> tuple[Site | None, tuple[Finding, ...]]:
    """Asks the node and its coordinator what they are: the usable site or None, and the findings.

    The model the engine was started with is its name in LMCache.
    """
    try:
        return await _survey(spec, model, node, coordinator_at)
    except _Unusable as flaw:
        return None, (flaw.finding,)


async def _survey(
    spec: LmCacheSpec, model: str, node: LmCacheNode, coordinator_at: Callable[[str], Coordinator]
) -> tuple[Site, tuple[Finding, ...]]:
    try:
        status, config = await node.status(), await node.config()
    except EngineError as error:
        problem = f"the LMCache server {spec.options.lmcache} is not reachable ({error})"
        raise _Unusable(problem, "start it, or leave lmcache= out") from None
    context = _context(spec, model, status)
    reporting = config.coordinator or CoordinatorConfig()
    url = spec.options.lmcache_coordinator or reporting.url
    if url is None or not reporting.event_reporting:
        problem = f"the LMCache server {spec.options.lmcache} reports to no coordinator"
        raise _Unusable(problem, f"start `lmcache coordinator`, and the server with {_REPORTING}")
    scope = Scope(context.model_name, context.world_size, config.mp.instance_id)
    coordinator = coordinator_at(url)
    try:
        await _examine(spec, coordinator, scope, status.chunk_size)
    except EngineError as error:
        problem = f"the LMCache coordinator {url} is not reachable ({error})"
        raise _Unusable(problem, "start it, or name another: lmcache_coordinator=http://HOST:PORT") from None
    moves = frozenset({Capability.OFFLOAD, Capability.RESTORE})
    site = Site(coordinator, scope, status.chunk_size, reporting.event_flush_interval, moves)
    try:
        await coordinator.pins()
    except EngineError as error:
        problem = f"the LMCache coordinator {url} cannot pin ({error})"
        return site, (Finding(problem, "start it with its eviction controller"),)
    return replace(site, capabilities=moves | {Capability.PIN}), ()


def _context(spec: LmCacheSpec, model: str, status: Status) -> Context:
    """The engine as it is registered with the node."""
    contexts = [*status.cache_context_meta.values(), *status.non_cuda_context_meta.values()]
    for each in contexts:
        if each.model_name.partition(_SPREAD)[0] == model:
            if not status.storage_manager.num_l2_adapters:
                problem = f"the LMCache server {spec.options.lmcache} has no L2 to offload to"
                raise _Unusable(problem, """start it with --l2-adapter '{"type":"fs","base_path":"DIR"}'""")
            return each
    known = ", ".join(sorted({each.model_name for each in contexts})) or "none"
    problem = f"no vLLM of {model!r} is connected to the LMCache server {spec.options.lmcache}, only: {known}"
    raise _Unusable(problem, f"{_CONNECTOR}, naming that server's --host and --port")


async def _examine(spec: LmCacheSpec, coordinator: Coordinator, scope: Scope, tokens_per_chunk: int) -> None:
    """Raises if the coordinator cannot be used."""
    if scope.instance_id not in await coordinator.instances():
        problem = f"the LMCache coordinator {coordinator.url} does not know the server {spec.options.lmcache}"
        raise _Unusable(problem, f"start that with {_REPORTING}")
    # One token less than two chunks must be one chunk, or the coordinator uses another chunk size.
    asked = await coordinator.lookup(scope, [0] * (2 * tokens_per_chunk - 1), "")
    if asked.chunks != 1:
        problem = f"the LMCache coordinator {coordinator.url} has chunks of another size than its server"
        raise _Unusable(problem, f"start it with --chunk-size {tokens_per_chunk}")
