"""Asks a vLLM server what it is and how it was started. Trials tell what it does not say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import TypeVar

import msgspec

from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.adapter import ServedModel, rank_headers, read_models, wrong_kind
from engine_adapter.http.control import ControlClient, Samples, read_samples
from engine_adapter.types import Finding
from engine_adapter.vllm.kv_transfer import KvTransfer
from engine_adapter.vllm.kv_transfer import ask as kv_transfer_of
from engine_adapter.vllm.options import VllmSpec

# --- reads vLLM's `/metrics` page: process identity, load, and the size of its cache --------------------

_STARTED, _CREATED = "process_start_time_seconds", "vllm:prefix_cache_queries_created"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _CONFIG = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_SOURCES, _FETCHED = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
_LMCACHE = "vllm:lmcache_mp_lookup_duration_seconds_count"
_NAMES = (_STARTED, _CREATED, _RUNNING, _WAITING, _USAGE, _CONFIG, _QUERIES, _HITS, _SOURCES, _LMCACHE)


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """One reading of an engine, or of all ranks of a server together.

    Attributes:
        ranks: the data-parallel ranks on the page.
        identity: of the process; None where several API servers share one page.
        usage: share of its blocks that running requests hold, 0–1.
        block_size: in tokens.
        blocks: usable for KV; vLLM keeps one block empty.
        caching: whether prefix caching is on; None where unknown.
        queries, hits: prompt tokens looked up and found so far.
        fetched: prompt tokens whose KV came from another engine or tier so far.
    """

    ranks: tuple[int, ...] = ()
    identity: str | None = None
    running: int = 0
    waiting: int = 0
    usage: float | None = None
    block_size: int | None = None
    blocks: int | None = None
    caching: bool | None = None
    queries: int = 0
    hits: int = 0
    fetched: int = 0
    lmcache: bool = False

    @property
    def tells_blocks(self) -> bool:
        """True if its block events can be followed."""
        return self.block_size is not None and self.caching is not False

    @property
    def addressable_ranks(self) -> tuple[int, ...]:
        """The ranks, if requests can name each; else none. A server with a part of all ranks
        (`--data-parallel-hybrid-lb`) counts its own from 0 in the header, but not on the page."""
        return self.ranks if self.ranks == tuple(range(len(self.ranks))) else ()


async def look(control: ControlClient, rank: int | None) -> VllmMetrics:
    """Reads the page; with `rank`, only that rank's values. A NIM 2 has it at `/v1/metrics`. Raises
    EngineUnavailable if it is not vLLM's."""
    try:
        page = await control.fetch("GET", "/metrics")
    except EngineRejected as error:
        page = await control.fetch("GET", "/v1/metrics") if error.status == HTTPStatus.NOT_FOUND else b""
        if b"vllm:" not in page:
            raise
    return read_metrics(page, rank)


def read_metrics(page: bytes, rank: int | None = None) -> VllmMetrics:
    """Reads a page, like `look`."""
    samples = read_samples(page, _NAMES)
    one = {} if rank is None else {"engine": str(rank)}
    config = samples.labels(_CONFIG, **one)
    # Request counts are missing if nothing has run yet and API servers share the page.
    names = {sample.labels.get("engine", "") for sample in samples.all(_CONFIG)}
    ranks = tuple(sorted(int(name) for name in names if name.isdecimal()))
    # The page reports the blocks of all ranks together; one block of each rank stays empty.
    total, parts = _number(config, "num_gpu_blocks") or 0, len(ranks) or 1
    blocks = total - parts if rank is None else total // parts - 1
    shares = [sample.value for sample in samples.all(_USAGE, **one)]
    return VllmMetrics(
        ranks=ranks,
        identity=_identity(samples, one),
        running=_count(samples, _RUNNING, one),
        waiting=_count(samples, _WAITING, one),
        usage=min(max(sum(shares) / len(shares), 0.0), 1.0) if shares else None,
        block_size=_number(config, "block_size"),
        blocks=blocks if total else None,
        caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        queries=_count(samples, _QUERIES, one),
        hits=_count(samples, _HITS, one),
        fetched=_count(samples, _SOURCES, {**one, "source": _FETCHED}),
        lmcache=bool(samples.all(_LMCACHE, **one)),
    )


def _identity(samples: Samples, one: Mapping[str, str]) -> str | None:
    """When the process started and when it created its counters, in microseconds."""
    created = [sample.value for sample in samples.all(_CREATED, **one)]
    started = samples.sum(_STARTED)
    times = [*([started] if started is not None else []), *([min(created)] if created else [])]
    return "-".join(f"{time:.6f}" for time in times) or None


def _count(samples: Samples, name: str, one: Mapping[str, str]) -> int:
    return int(samples.sum(name, **one) or 0)


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else None


# --- trials ---------------------------------------------------------------------------------------------
# A trial request has one token or is refused, so it leaves nothing in the cache. Only an older server, which
# leaves out a count of 0, gets a prompt of one block.

_T = TypeVar("_T")
# Seconds that one trial may take: a busy engine may queue it, and a gateway may refuse several at once.
_PATIENCE_S, _AGAIN_S = 3.0, 0.5
_TOKEN = 1
_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
# One request for each route that takes a salt. A server that respects salts refuses an empty one.
_SALTED: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": [_TOKEN], "max_tokens": 1},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": _CHAT,
}


@dataclass(frozen=True, slots=True)
class Trials:
    """The results of the trials; None for what could not be tried yet.

    Attributes:
        takes_salt: every route of the server respects salts. Always known after `try_out`.
        reports_cached: its answers report the reused tokens.
    """

    takes_salt: bool | None = None
    reports_cached: bool | None = None


async def try_out(
    control: ControlClient, model: str, metrics: VllmMetrics, headers: Mapping[str, str], known: Trials
) -> Trials:
    """Tries what is not known yet, within 3 s.

    `metrics` say how its cache is cut, and `headers` send a request to the engine meant. `known` was found of
    the same process before. Raises EngineUnhealthy if no salt trial was answered, or if one had no other
    answer than "too many requests": an engine must not join before salts are known, because the requests of
    tenants would go to it unsalted."""
    reports = partial(_reports_cached, control, model, metrics, headers)
    takes_salt, reports_cached = await asyncio.gather(
        _known(known.takes_salt, lambda: _takes_salt(control, model)),
        _known(known.reports_cached, lambda: _answered(reports, is_needed=False)),
    )
    if takes_salt is None:
        raise EngineUnhealthy("it is too busy to show whether it respects cache salts")
    return Trials(takes_salt, reports_cached)


async def _known(before: bool | None, find_out: Callable[[], Awaitable[bool | None]]) -> bool | None:
    return await find_out() if before is None else before


async def _takes_salt(control: ControlClient, model: str) -> bool | None:
    """None when no route answers. A salt is refused before anything is queued: while one route answers, a
    silent one ignores it."""
    trials = (partial(_respects_salt, control, path, model) for path in _SALTED)
    respected = await asyncio.gather(*map(_answered, trials))
    return None if all(answer is None for answer in respected) else all(respected)


async def _answered(trial: Callable[[], Awaitable[_T]], *, is_needed: bool = True) -> _T | None:
    """The trial's result, None when it takes too long. One that `is_needed` raises as `_unrefused`."""
    try:
        return await _unrefused(trial, _PATIENCE_S)
    except (TimeoutError, EngineUnhealthy) as error:
        if is_needed and isinstance(error, EngineUnhealthy):
            raise
        return None


async def _unrefused(ask: Callable[[], Awaitable[_T]], within_s: float | None = None) -> _T:
    """The answer. "Too many requests" is none: it is asked again, for 3 s. Raises EngineUnhealthy if that
    does not help, and TimeoutError without any answer `within_s`."""
    refusal, ends = None, monotonic() + _PATIENCE_S
    try:
        async with asyncio.timeout(within_s):
            while refusal is None or monotonic() < ends:
                try:
                    return await ask()
                except EngineRejected as error:
                    if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                        raise
                    refusal = error
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError:
        if refusal is None:
            raise
    raise EngineUnhealthy("it is too busy to be asked what it can do: it answers 429") from refusal


async def _respects_salt(control: ControlClient, path: str, model: str) -> bool:
    body = {**_SALTED[path], "model": model, "cache_salt": ""}
    try:
        await control.call("POST", path, json=body)
    except EngineRejected as error:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise
        return error.status == HTTPStatus.NOT_FOUND or "cache_salt" in f"{error.param} {error}"
    return False


async def _reports_cached(
    control: ControlClient, model: str, metrics: VllmMetrics, headers: Mapping[str, str]
) -> bool | None:
    block = metrics.block_size
    lengths = (1, block + 1, block + 1) if block and metrics.caching else (1,)
    try:
        for length in lengths:
            body = {"model": model, "prompt": [_TOKEN] * length, "max_tokens": 1, "temperature": 0}
            match await control.call("POST", "/v1/completions", json=body, headers=headers):
                case {"usage": {"prompt_tokens_details": {"cached_tokens": int()}}}:
                    return True
    except EngineRejected as error:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise
        return None  # it does not serve completions
    return False


class RankSource(msgspec.Struct, frozen=True):
    """The address at which a rank publishes its events; an entry of `/kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = None
    enable_kv_cache_events: bool = True

    @property
    def publishes(self) -> bool:
        """True if events are sent there."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """Facts about a server and its start.

    Attributes:
        model: its base model.
        version: e.g. `0.32.0`; "" where it does not say.
        metrics: as of the connection.
        source: address of its events; None where it does not say.
        names_sources: it has the route that says this address.
        tokenizes, renders, resets, loads_loras: it has these routes.
        trials: the facts that only requests show.
        wrong_kind: it says that it is no vLLM.
        kv_transfer: how it passes KV on; None where it does not say.
    """

    model: ServedModel
    version: str
    metrics: VllmMetrics
    source: RankSource | None
    names_sources: bool
    tokenizes: bool
    renders: bool
    resets: bool
    loads_loras: bool
    trials: Trials
    wrong_kind: Finding | None = None
    kv_transfer: KvTransfer | None = None

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks that it offloads together, as far as it says."""
        return self.kv_transfer.blocks_per_chunk(self.metrics.block_size) if self.kv_transfer else 1


async def discover(control: ControlClient, spec: VllmSpec, known: VllmFacts | None) -> VllmFacts:
    """Asks everything. `known` holds the facts of the last time: the same process is not tried out again.
    Raises EngineUnavailable if it is not reachable, not vLLM, has no such rank, or is too busy to be tried
    out."""
    rank = spec.options.dp_rank
    models, version, sources, metrics, tokenizes, renders, resets, loads, kv_transfer = await asyncio.gather(
        _unrefused(partial(control.get, "/v1/models")),
        _unrefused(partial(control.read_optional, _Version, "/version")),
        _unrefused(partial(control.read_optional, dict[str, RankSource], "/kv_event_sources")),
        _unrefused(partial(look, control, rank)),
        _unrefused(partial(_exists, control, "/tokenize")),
        _unrefused(partial(_renders, control)),
        _unrefused(partial(_exists, control, "/reset_prefix_cache")),
        _unrefused(partial(_exists, control, "/v1/load_lora_adapter")),
        _unrefused(partial(kv_transfer_of, control)),
    )
    if rank is not None and metrics.ranks and rank not in metrics.ranks:
        raise EngineUnavailable(f"it has no data-parallel rank {rank}: it has {list(metrics.ranks)}")
    model = read_models(models, spec.model)
    same = known is not None and known.metrics.identity == metrics.identity is not None
    tried = known.trials if known is not None and same else Trials()
    return VllmFacts(
        model=model,
        version=version.version if version is not None else "",
        metrics=metrics,
        source=_source(sources or {}, rank),
        names_sources=sources is not None,
        tokenizes=tokenizes,
        renders=renders,
        resets=resets,
        loads_loras=loads,
        trials=await try_out(control, model.name, metrics, rank_headers(rank), tried),
        wrong_kind=wrong_kind(models, spec),
        kv_transfer=kv_transfer,
    )


def event_endpoints(facts: VllmFacts, spec: VllmSpec) -> EventEndpoints | None:
    """The addresses at which this machine reads the engine's events; None if it cannot follow them."""
    if not facts.metrics.tells_blocks or is_several(facts, spec):
        return None
    source = facts.source
    if source is None or not source.publishes:
        return spec.options.endpoints(spec.url, None, None)
    return spec.options.endpoints(spec.url, source.endpoint, source.replay_endpoint, source.topic)


def is_several(facts: VllmFacts, spec: VllmSpec) -> bool:
    """True if requests go to several ranks that kvpin cannot tell apart."""
    return spec.options.dp_rank is None and len(facts.metrics.ranks) > 1


def _source(sources: Mapping[str, RankSource], rank: int | None) -> RankSource | None:
    """The event source of the rank, or the only one."""
    if rank is not None:
        return sources.get(str(rank))
    return next(iter(sources.values())) if len(sources) == 1 else None


async def _renders(control: ControlClient) -> bool:
    """True if it renders prompts. Without --enable-scale-out the routes exist but refuse everybody."""
    status = await _status(control, "POST", "/v1/chat/completions/render", json={})
    return status not in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)


async def _exists(control: ControlClient, path: str) -> bool:
    """True if the server has a POST route; asked by GET, so nothing happens."""
    return await _status(control, "GET", path) != HTTPStatus.NOT_FOUND


async def _status(control: ControlClient, method: str, path: str, *, json: object = None) -> int:
    """As the client's own `status`; but "too many requests" says nothing of the route, and is raised."""
    status = await control.status(method, path, json=json)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        raise EngineRejected("too many requests", status=status)
    return status
