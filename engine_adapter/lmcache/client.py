"""The routes of an LMCache node (its multi-process server) and of its coordinator, as kvpin reads them.

Every call raises EngineUnavailable if there is no answer or one of another form, and EngineRejected for an
error.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar

import msgspec

from engine_adapter.errors import EngineError, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import BelowGpu, Capability, Finding, KvTarget
from engine_adapter.vllm.options import VllmSpec

# --- finds out what the LMCache of an engine is, and what keeps kvpin from using it ---------------------

_UNUSED = "kvpin does not use it"
_CONNECTOR = (
    'start vLLM with --kv-transfer-config \'{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":{"lmcache.mp.host":"tcp://HOST","lmcache.mp.port":PORT}}\''
)

# Suffix of a model name whose context is spread over ranks.
_SPREAD = "##"
_REPORTING = "--coordinator-url http://HOST:PORT --coordinator-event-reporting"


@dataclass(frozen=True, slots=True)
class LmCacheSite:
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
        lacks = (Capability.OFFLOAD, Capability.RESTORE, Capability.PIN)
        self.finding = Finding(f"{problem}: {_UNUSED}", remedy, lacks)


async def survey(
    spec: VllmSpec, model: str, node: LmCacheNode, coordinator_at: Callable[[str], Coordinator]
) -> tuple[LmCacheSite | None, tuple[Finding, ...]]:
    """Asks the node and its coordinator what they are: the usable site or None, and the findings.

    The model the engine was started with is its name in LMCache."""
    try:
        return await _survey(spec, model, node, coordinator_at)
    except _Unusable as flaw:
        return None, (flaw.finding,)


async def _survey(
    spec: VllmSpec, model: str, node: LmCacheNode, coordinator_at: Callable[[str], Coordinator]
) -> tuple[LmCacheSite, tuple[Finding, ...]]:
    try:
        status, config = await node.status(), await node.config()
    except EngineError as error:
        problem = f"the LMCache server {spec.options.lmcache} is not reachable ({error})"
        raise _Unusable(problem, "start it, or leave lmcache= out") from None
    context = _context(spec, model, status)
    reporting = config.coordinator or _CoordinatorConfig()
    url = spec.options.lmcache_coordinator or reporting.url
    if url is None or not reporting.event_reporting:
        problem = f"the LMCache server {spec.options.lmcache} reports to no coordinator"
        raise _Unusable(problem, f"start `lmcache coordinator`, and the server with {_REPORTING}")
    scope = Scope(context.model_name, context.world_size, config.mp.instance_id)
    try:
        coordinator = coordinator_at(url)
        await _examine(spec, coordinator, scope, status.chunk_size)
    except EngineError as error:
        problem = f"the LMCache coordinator {url} is not reachable ({error})"
        raise _Unusable(problem, "start it, or name another: lmcache_coordinator=http://HOST:PORT") from None
    moves = frozenset({Capability.OFFLOAD, Capability.RESTORE})
    site = LmCacheSite(coordinator, scope, status.chunk_size, reporting.event_flush_interval, moves)
    try:
        await coordinator.pins()
    except EngineError as error:
        problem = f"the LMCache coordinator {url} cannot pin ({error})"
        return site, (Finding(problem, "start it with its eviction controller", (Capability.PIN,)),)
    return replace(site, capabilities=moves | {Capability.PIN}), ()


def _context(spec: VllmSpec, model: str, status: Status) -> _Context:
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


async def _examine(spec: VllmSpec, coordinator: Coordinator, scope: Scope, tokens_per_chunk: int) -> None:
    """Raises if the coordinator cannot be used."""
    if scope.instance_id not in await coordinator.instances():
        problem = f"the LMCache coordinator {coordinator.url} does not know the server {spec.options.lmcache}"
        raise _Unusable(problem, f"start that with {_REPORTING}")
    # One token less than two chunks must be one chunk, or the coordinator uses another chunk size.
    asked = await coordinator.lookup(scope, [0] * (2 * tokens_per_chunk - 1), "")
    if asked.chunks != 1:
        problem = f"the LMCache coordinator {coordinator.url} has chunks of another size than its server"
        raise _Unusable(problem, f"start it with --chunk-size {tokens_per_chunk}")


# --- client ---------------------------------------------------------------------------------------------

_PAGE = 5000


@dataclass(frozen=True, slots=True)
class Scope:
    """Selects one engine's KV: its model as LMCache names it, its ranks, and the node beside it."""

    model_name: str
    world_size: int
    instance_id: str

    def of(self, token_ids: Sequence[int], salt: str) -> dict[str, Any]:
        """A prompt there, as both servers take it."""
        name, size = self.model_name, self.world_size
        return {"model_name": name, "world_size": size, "token_ids": list(token_ids), "cache_salt": salt}


class Key(msgspec.Struct, frozen=True):
    """The name of one object: a chunk of one rank's KV."""

    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class ObjectPlace(msgspec.Struct, frozen=True):
    """One place of an object. `tier` is l1 or l2; `shared` backends belong to every node."""

    instance_id: str
    tier: str
    size_bytes: int = 0
    shared: bool = False


class KeyPlacements(msgspec.Struct, frozen=True):
    """One object and all its places."""

    key: Key
    placements: list[ObjectPlace]


class Lookup(msgspec.Struct, frozen=True):
    """The whole chunks of a prompt, and their objects in order."""

    chunks: int
    results: list[KeyPlacements]


class DirectoryStats(msgspec.Struct, frozen=True):
    """The amount of KV on each tier, as the coordinator knows it."""

    l1_keys_by_instance: dict[str, int]
    l1_count: int
    l1_size_bytes: int
    l2_count: int
    l2_size_bytes: int


class _Context(msgspec.Struct, frozen=True):
    model_name: str
    world_size: int


class _L1(msgspec.Struct, frozen=True):
    total_object_count: int = 0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0


class Storing(msgspec.Struct, frozen=True):
    """Objects on their way from L1 to L2."""

    pending_keys_count: int = 0
    in_flight_task_count: int = 0


class Storage(msgspec.Struct, frozen=True):
    """A node's tiers. A node with several memories counts each under its own name."""

    l1_managers: dict[str, _L1] = {}
    store_controllers: dict[str, Storing] = {}
    num_l2_adapters: int = 0

    @property
    def l1_objects(self) -> int:
        """Objects in memory."""
        return sum(l1.total_object_count for l1 in self.l1_managers.values())

    @property
    def is_storing(self) -> bool:
        """True if any object is on its way to L2."""
        return any(s.pending_keys_count or s.in_flight_task_count for s in self.store_controllers.values())


class Status(msgspec.Struct, frozen=True):
    """A node's content and its engines, those on GPUs and those on CPUs."""

    chunk_size: int
    storage_manager: Storage
    cache_context_meta: dict[str, _Context] = {}
    non_cuda_context_meta: dict[str, _Context] = {}


class _CoordinatorConfig(msgspec.Struct, frozen=True):
    url: str | None = None
    event_reporting: bool = False
    event_flush_interval: float = 1.0


class _Instance(msgspec.Struct, frozen=True):
    instance_id: str


class _Config(msgspec.Struct, frozen=True):
    mp: _Instance
    coordinator: _CoordinatorConfig | None = None


class Prefetch(msgspec.Struct, frozen=True):
    """A load from L2 to L1. Its status is noop, submitted, pending or completed."""

    status: str
    request_id: str = ""
    found_keys: int = 0
    total_keys: int = 0


class Deleted(msgspec.Struct, frozen=True):
    """The result of a deletion: a request uses the `skipped` objects."""

    deleted: int
    skipped: int = 0
    ok: bool = True
    error: str = ""


class _Listing(msgspec.Struct):
    total: int
    keys: list[KeyPlacements]


class _Instances(msgspec.Struct):
    instances: list[_Instance]


class _Pinned(msgspec.Struct):
    affected: int


class _Pins(msgspec.Struct):
    total: int


class _LmCacheServer:
    health: ClassVar[str]

    def __init__(self, spec: VllmSpec, url: str) -> None:
        """Raises EngineSpecError for an invalid address."""
        self.url = url
        self._control = ControlClient(replace(spec, url=url, api_key=None, headers={}))

    async def check(self) -> None:
        """Raises if it is not healthy."""
        await self._control.get(self.health)

    async def aclose(self) -> None:
        await self._control.aclose()


class LmCacheNode(_LmCacheServer):
    """The LMCache server beside an engine."""

    health = "/healthcheck"

    async def status(self) -> Status:
        """Its content, and the connected engines."""
        return await self._control.read(Status, "GET", "/status")

    async def config(self) -> _Config:
        """Its configuration."""
        return await self._control.read(_Config, "GET", "/config")

    async def prefetch(self, scope: Scope, token_ids: Sequence[int], salt: str) -> Prefetch:
        """Starts to load a prompt's chunks from L2 to L1."""
        return await self._control.read(Prefetch, "POST", "/cache/prefetches", json=scope.of(token_ids, salt))

    async def prefetched(self, request_id: str) -> Prefetch:
        """Progress of a prefetch. The node reports its end only once."""
        return await self._control.read(Prefetch, "GET", f"/cache/prefetches/{request_id}")

    async def delete(self, keys: Sequence[Key], tier: str) -> Deleted:
        """Drops objects from `l1` or from `all` tiers, except those that a request uses."""
        body = {"keys": keys, "tier": tier, "force": False}
        deleted = await self._control.read(Deleted, "DELETE", "/cache/objects", json=body)
        if not deleted.ok:
            raise EngineUnavailable(f"LMCache could not delete: {deleted.error}")
        return deleted


class Coordinator(_LmCacheServer):
    """The LMCache coordinator, which knows what lies where."""

    health = "/healthz"

    async def instances(self) -> frozenset[str]:
        """The nodes it knows."""
        answer = await self._control.read(_Instances, "GET", "/instances")
        return frozenset(each.instance_id for each in answer.instances)

    async def stats(self) -> DirectoryStats:
        """The amount of KV on each tier."""
        return await self._control.read(DirectoryStats, "GET", "/directory/stats")

    async def lookup(self, scope: Scope, token_ids: Sequence[int], salt: str) -> Lookup:
        """The places of a prompt's whole chunks."""
        return await self._control.read(Lookup, "POST", "/directory/lookup", json=scope.of(token_ids, salt))

    async def keys(self) -> list[KeyPlacements]:
        """All objects of every model and node."""
        found: list[KeyPlacements] = []
        while True:
            path = f"/directory/keys?offset={len(found)}&limit={_PAGE}"
            page = await self._control.read(_Listing, "GET", path)
            found += page.keys
            if not page.keys or len(found) >= page.total:
                return found

    async def pins(self) -> int:
        """Pinned objects, of all clients."""
        return (await self._control.read(_Pins, "GET", "/cache/pins?limit=1")).total

    async def pin(self, scope: Scope, token_ids: Sequence[int], salt: str) -> int:
        """Pins the whole chunks of a prompt on L2; returns the number of objects."""
        return await self._change_pins("POST", scope.of(token_ids, salt))

    async def unpin(self, scope: Scope, token_ids: Sequence[int], salt: str) -> int:
        """Removes one pin of these chunks."""
        return await self._change_pins("DELETE", scope.of(token_ids, salt))

    async def _change_pins(self, method: str, prompt: object) -> int:
        return (await self._control.read(_Pinned, method, "/cache/pins", json=prompt)).affected


@dataclass(frozen=True, slots=True)
class KvChunk:
    """One chunk of KV.

    Attributes:
        on_host: all lie in the node's L1.
        on_disk: all lie on an L2 that the node reaches.
        bytes: of one copy.
    """

    keys: tuple[Key, ...]
    on_host: bool
    on_disk: bool
    bytes: int

    @property
    def held(self) -> bool:
        """True if any tier of the node holds it."""
        return self.on_host or self.on_disk


def chunks_of(objects: Iterable[KeyPlacements], instance_id: str) -> list[KvChunk]:
    """Groups objects into the chunks of one node, in the order of their first objects."""
    groups: dict[tuple[str, str, str], list[KeyPlacements]] = {}
    for each in objects:
        name = (each.key.chunk_hash_hex, each.key.model_name, each.key.cache_salt)
        groups.setdefault(name, []).append(each)
    return [_chunk(group, instance_id) for group in groups.values()]


def leading(chunks: Sequence[KvChunk]) -> list[KvChunk]:
    """The chunks before the first that is not held."""
    return list(takewhile(lambda chunk: chunk.held, chunks))


def below_gpu(chunks: Sequence[KvChunk], n_tokens: int, tokens_per_chunk: int) -> BelowGpu:
    """The part of a prompt that an engine would reuse with these chunks.

    If every token is held, the engine computes the last one again, so one token less is reused."""
    held = leading(chunks)
    host = sum(1 for _ in takewhile(lambda chunk: chunk.on_host, held)) * tokens_per_chunk
    total = len(held) * tokens_per_chunk
    return BelowGpu(host, total - host, min(total, n_tokens - 1))


def text_of(target: KvTarget, tokens_per_chunk: int) -> array[int]:
    """The whole chunks of a prompt before its first image, because LMCache names chunks with images
    differently."""
    token_ids = target.token_ids if target.token_ids is not None else array("i")
    end = len(token_ids)
    if target.extra_ids is not None:
        end = next((at for at, extra in enumerate(target.extra_ids) if extra), end)
    return token_ids[: end // tokens_per_chunk * tokens_per_chunk]


def _chunk(objects: Sequence[KeyPlacements], instance_id: str) -> KvChunk:
    def lies(tier: str, each: KeyPlacements) -> bool:
        return any(
            place.tier == tier and (place.shared or place.instance_id == instance_id)
            for place in each.placements
        )

    return KvChunk(
        keys=tuple(each.key for each in objects),
        on_host=all(lies("l1", each) for each in objects),
        on_disk=all(lies("l2", each) for each in objects),
        bytes=sum(max((place.size_bytes for place in each.placements), default=0) for each in objects),
    )
