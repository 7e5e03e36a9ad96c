"""An LMCache node and its coordinator: the HTTP routes of 0.5.6, over sets in memory.

The answers follow recordings of the real ones, which the live tests run: listings, refusals, a finished
prefetch that is reported once, a coordinator that hears of changes later.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import count

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.engines import served
from tests.fake_engines.cache import CachePrompt, RunningPrompt
from tests.fake_engines.core import running
from tests.fake_engines.text import MODEL_DIR
from tests.fake_engines.vllm import FakeVllm, VllmOptions

CHUNK_BYTES = 131_072


@dataclass(frozen=True, slots=True)
class LmCacheOptions:
    """How both are started.

    Attributes:
        coordinator_chunk: the coordinator's `--chunk-size`.
        connected: an engine of `model` is registered with the node.
        flush_s: `--coordinator-event-flush-interval`.
    """

    model: str = str(MODEL_DIR)
    world_size: int = 1
    instance: str = "node-a"
    chunk_size: int = 64
    coordinator_chunk: int = 64
    connected: bool = True
    on_gpu: bool = False
    l2: bool = True
    reporting: bool = True
    registered: bool = True
    pins: bool = True
    flush_s: float = 0.02


@dataclass(slots=True)
class Entry:
    """One chunk: its tiers, and the LoRA adapter it was computed with."""

    l1: bool = True
    l2: bool = False
    in_use: bool = False
    dropped: bool = False
    lora: str | None = None


@dataclass(slots=True)
class FakeLmCache:
    """A node and its coordinator.

    Attributes:
        entries: the chunks, by (hash of the prompt up to the chunk's end, salt).
        told: what the coordinator knows; `tell` updates it.
        tells_at_once: the coordinator is updated at once.
        writes_through: stored chunks go to L2 at once.
        pins: number of pins per chunk.
        lost: hashes of chunks that cannot be loaded from L2.
        polls: number of `pending` answers before a prefetch ends.
        asked, statuses: look-ups and status requests so far.
        tells_in: update the coordinator after this many requests for its counts; 0: never.
        node_error, coordinator_error: status of every answer.
        mixed: tokens reused with another LoRA adapter than they were computed with.
    """

    options: LmCacheOptions
    url: str = ""
    coordinator_url: str = ""
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    told: dict[tuple[str, str], Entry] = field(default_factory=dict)
    tells_at_once: bool = True
    writes_through: bool = True
    pins: dict[tuple[str, str], int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    polls: int = 1
    asked: int = 0
    statuses: int = 0
    tells_in: int = 0
    node_error: int | None = None
    coordinator_error: int | None = None
    mixed: int = 0
    prefetches: list[dict] = field(default_factory=list)
    _jobs: dict[str, list[int]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=lambda: count(1))

    def reset(self) -> None:
        """Resets it to its initial state, at the same addresses."""
        new = FakeLmCache(LmCacheOptions(), self.url, self.coordinator_url)
        for each in fields(self):
            setattr(self, each.name, getattr(new, each.name))

    # --- what an engine does --------------------------------------------------------------------------

    def store(self, tokens: Sequence[int], salt: str = "", lora: str | None = None) -> None:
        """Stores a prompt that an engine computed; existing chunks stay."""
        for name in self.names(tokens, salt):
            entry = self.entries.setdefault(name, Entry(lora=lora))
            entry.l2 = entry.l2 or self.writes_through
            entry.l1 = True
        self._changed()

    def take(self, tokens: Sequence[int], salt: str = "", lora: str | None = None) -> int:
        """Tokens of the prompt that an engine gets from here."""
        found = 0
        for name in self.names(tokens, salt):
            entry = self.entries.get(name)
            if entry is None or not (entry.l1 or entry.l2):
                break
            self.mixed += self.options.chunk_size * (entry.lora != lora)
            found += self.options.chunk_size
        return min(found, len(tokens) - 1)

    def evict(self, tokens: Sequence[int], tier: str = "l1", salt: str = "") -> None:
        """Evicts a prompt from a tier."""
        for name in self.names(tokens, salt):
            self._drop(name, tier)
        self._changed()

    def write_through(self) -> None:
        """Writes everything in L1 to L2."""
        for entry in self.entries.values():
            entry.l2 = entry.l2 or entry.l1
        self.writes_through = True
        self._changed()

    def tiers(self, tokens: Sequence[int], salt: str = "") -> list[str]:
        """The tiers of each chunk of a prompt."""
        entries = [self.entries.get(name, Entry(l1=False)) for name in self.names(tokens, salt)]
        return ["+".join(tier for tier in ("l1", "l2") if getattr(entry, tier)) for entry in entries]

    def names(self, tokens: Sequence[int], salt: str = "", size: int | None = None) -> list[tuple[str, str]]:
        """The chunks of a prompt."""
        size = size or self.options.chunk_size
        digest, found = hashlib.sha256(), []
        for start in range(0, len(tokens) - size + 1, size):
            digest.update(array("i", tokens[start : start + size]).tobytes())
            found.append((digest.hexdigest(), salt))
        return found

    def tell(self) -> None:
        """Updates the coordinator."""
        self.told = {name: Entry(e.l1, e.l2) for name, e in self.entries.items() if e.l1 or e.l2}

    def _changed(self) -> None:
        self.entries = {name: entry for name, entry in self.entries.items() if entry.l1 or entry.l2}
        if self.tells_at_once:
            self.tell()

    def _drop(self, name: tuple[str, str], tier: str) -> bool:
        entry = self.entries.get(name)
        if entry is None:
            return True
        if tier in ("l2", "all"):
            entry.l2, entry.dropped = False, True
        if entry.in_use and tier in ("l1", "all"):
            return False
        if tier in ("l1", "all"):
            entry.l1 = False
        return True

    # --- the node -------------------------------------------------------------------------------------

    def node(self) -> Starlette:
        return Starlette(
            routes=[
                self._route("/healthcheck", self._healthy),
                self._route("/status", self._status),
                self._route("/config", self._config),
                self._route("/cache/objects", self._delete, "DELETE"),
                self._route("/cache/prefetches", self._prefetch, "POST"),
                self._route("/cache/prefetches/{id}", self._prefetched),
            ]
        )

    def _healthy(self, _: Request, _body: dict) -> Response:
        return JSONResponse({"status": "healthy"})

    def _status(self, _: Request, _body: dict) -> Response:
        options = self.options
        context = {"model_name": options.model, "world_size": options.world_size, "block_size": 16}
        contexts = {"3647367007383259074": context} if options.connected else {}
        l1 = sum(entry.l1 for entry in self.entries.values())
        waiting = sum(not (entry.l2 or entry.dropped) for entry in self.entries.values())
        self.statuses += 1
        storage = {
            "is_healthy": True,
            "l1_managers": {
                "_default": {
                    "total_object_count": l1 * options.world_size,
                    "memory_used_bytes": l1 * CHUNK_BYTES,
                    "memory_total_bytes": 1 << 30,
                }
            },
            "store_controllers": {"_default": {"pending_keys_count": waiting, "in_flight_task_count": 0}},
            "num_l2_adapters": int(options.l2),
        }
        engines = {"cache_context_meta": {}, "non_cuda_context_meta": {}}
        engines["cache_context_meta" if options.on_gpu else "non_cuda_context_meta"] = contexts
        status = {"is_healthy": True, "chunk_size": options.chunk_size, "storage_manager": storage}
        return JSONResponse(status | engines)

    def _config(self, _: Request, _body: dict) -> Response:
        url = self.coordinator_url if self.options.reporting else None
        coordinator = {"url": url, "event_reporting": self.options.reporting}
        coordinator["event_flush_interval"] = self.options.flush_s
        mp = {"instance_id": self.options.instance, "chunk_size": self.options.chunk_size}
        return JSONResponse({"mp": mp, "coordinator": coordinator})

    def _delete(self, _: Request, body: dict) -> Response:
        stayed = [
            key
            for key in body["keys"]
            if not self._drop((key["chunk_hash_hex"], key["cache_salt"]), body["tier"])
        ]
        self._changed()
        deleted = len(body["keys"]) - len(stayed)
        return JSONResponse({"deleted": deleted, "skipped": len(stayed), "ok": True})

    def _prefetch(self, _: Request, body: dict) -> Response:
        self.prefetches.append(body)
        if not self.options.connected or body["model_name"] != self.options.model:
            return _refused(503, f"no layout registered for model_name={body['model_name']!r}")
        names = self.names(body["token_ids"], body["cache_salt"])
        if not names:
            return JSONResponse({"chunks": 0, "status": "noop"}, 202)
        found = 0
        for name in names:
            entry = self.entries.get(name)
            if entry is not None and name[0] not in self.lost:
                entry.l1 = True
                found += 1
        self._changed()
        job = f"{next(self._ids):032x}"
        ranks = self.options.world_size
        self._jobs[job] = [self.polls, found * ranks, len(names) * ranks]
        return JSONResponse({"request_id": job, "chunks": len(names), "status": "submitted"}, 202)

    def _prefetched(self, request: Request, _body: dict) -> Response:
        name = request.path_params["id"]
        job = self._jobs.get(name)
        if job is None:
            return _refused(
                404, f"unknown prefetch request_id={name!r} (already completed or never submitted)"
            )
        if job[0]:
            job[0] -= 1
            return JSONResponse({"request_id": name, "status": "pending"})
        del self._jobs[name]
        done = {"status": "completed", "found_keys": job[1], "total_keys": job[2]}
        return JSONResponse({"request_id": name} | done)

    # --- the coordinator ------------------------------------------------------------------------------

    def coordinator(self) -> Starlette:
        pins = [
            self._route("/cache/pins", self._list_pins),
            self._route("/cache/pins", self._pin, "POST"),
            self._route("/cache/pins", self._unpin, "DELETE"),
        ]
        return Starlette(
            routes=[
                self._route("/healthz", self._healthy),
                self._route("/instances", self._instances),
                self._route("/directory/stats", self._stats),
                self._route("/directory/keys", self._keys),
                self._route("/directory/lookup", self._lookup, "POST"),
                *(pins if self.options.pins else ()),
            ]
        )

    def _instances(self, _: Request, _body: dict) -> Response:
        known = [self.options.instance] if self.options.registered else []
        return JSONResponse({"instances": [{"instance_id": name, "http_port": 1} for name in known]})

    def _stats(self, _: Request, _body: dict) -> Response:
        if self.tells_in:
            self.tells_in -= 1
            self.tells_at_once = self.tells_at_once or not self.tells_in
            self._changed()
        ranks = self.options.world_size
        counts = {tier: sum(getattr(e, tier) for e in self.told.values()) * ranks for tier in ("l1", "l2")}
        answer = {"num_keys": len(self.told), "l1_keys_by_instance": {self.options.instance: counts["l1"]}}
        for tier, objects in counts.items():
            answer |= {f"{tier}_count": objects, f"{tier}_size_bytes": objects * CHUNK_BYTES}
        return JSONResponse(answer)

    def _keys(self, request: Request, _body: dict) -> Response:
        start, limit = int(request.query_params["offset"]), int(request.query_params["limit"])
        found = [each for name in self.told for each in self._objects(name)]
        return JSONResponse({"total": len(found), "keys": found[start : start + limit]})

    def _lookup(self, _: Request, body: dict) -> Response:
        self.asked += 1
        names = self.names(body["token_ids"], body["cache_salt"], self.options.coordinator_chunk)
        found = [each for name in names for each in self._objects(name)]
        return JSONResponse({"chunks": len(names), "results": found})

    def _objects(self, name: tuple[str, str]) -> Iterator[dict]:
        entry = self.told.get(name, Entry(l1=False))
        place = {"instance_id": self.options.instance, "incarnation": 1, "size_bytes": CHUNK_BYTES}
        places = [
            place | {"tier": tier, "backend": backend, "shared": False}
            for tier, backend in (("l1", "dram"), ("l2", "fs"))
            if getattr(entry, tier)
        ]
        for rank in range(self.options.world_size):
            key = {"chunk_hash_hex": name[0], "model_name": self.options.model, "kv_rank": rank}
            key |= {"object_group_id": 0, "cache_salt": name[1]}
            yield {"key": key, "placements": places, "token_ids": [], "access_count": 0}

    def _list_pins(self, _: Request, _body: dict) -> Response:
        return JSONResponse({"total": len(self.pins), "pins": []})

    def _pin(self, _: Request, body: dict) -> Response:
        names = self.names(body["token_ids"], body["cache_salt"])
        for name in names:
            self.pins[name] = self.pins.get(name, 0) + 1
        return JSONResponse({"requested": len(names), "affected": len(names), "status": "pinned"})

    def _unpin(self, _: Request, body: dict) -> Response:
        names = self.names(body["token_ids"], body["cache_salt"])
        for name in names:
            self.pins[name] = self.pins.get(name, 1) - 1
        self.pins = {name: pins for name, pins in self.pins.items() if pins}
        return JSONResponse({"requested": len(names), "affected": len(names), "status": "unpinned"})

    # --- both -----------------------------------------------------------------------------------------

    def _route(self, path: str, answer, method: str = "GET") -> Route:
        of_node = answer in (self._status, self._config, self._delete, self._prefetch, self._prefetched)
        of_node = of_node or path == "/healthcheck"

        async def handle(request: Request) -> Response:
            error = self.node_error if of_node else self.coordinator_error
            if error is not None:
                return _refused(error, "engine not initialized")
            body = await request.body()
            return answer(request, msgspec.json.decode(body) if body else {})

        return Route(path, handle, methods=[method])


class TieredFakeVllm(FakeVllm):
    """A vLLM over an LMCache: it stores there what it computes, and reuses what lies there."""

    def __init__(self, options: VllmOptions, lmcache: FakeLmCache) -> None:
        self.lmcache = lmcache
        super().__init__(options)

    def metrics(self) -> str:
        labels = f'{{engine="0",model_name="{self.options.model}"}}'
        return f"{super().metrics()}vllm:lmcache_mp_lookup_duration_seconds_count{labels} 0.0\n"

    def _core(self, rank: int):
        core = super()._core(rank)
        begin = core.cache.begin

        def tiered(prompt: CachePrompt, *, read: bool = True) -> RunningPrompt:
            running = begin(prompt, read=read)
            salt, adapter = prompt.namespace.salt or "", prompt.namespace.lora
            below = self.lmcache.take(prompt.tokens, salt, adapter) if read else 0
            running.cached_tokens = max(running.cached_tokens, below)
            self.lmcache.store(prompt.tokens, salt, adapter)
            return running

        core.cache.begin = tiered
        return core


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"detail": why}, status)


@contextmanager
def running_lmcache(**options) -> Iterator[FakeLmCache]:
    """Node and coordinator with these `LmCacheOptions`, on free ports."""
    fake = FakeLmCache(LmCacheOptions(**options))
    with served(fake.node()) as fake.url, served(fake.coordinator()) as fake.coordinator_url:
        yield fake


@contextmanager
def running_tiered_vllm(lmcache: FakeLmCache, **options) -> Iterator[tuple[str, TieredFakeVllm]]:
    """A fake vLLM over a fake LMCache, with these `VllmOptions`; its address, and itself."""
    with running(TieredFakeVllm(VllmOptions(**options), lmcache)) as server:
        yield server.url, server.fake
