"""Reads vLLM's `/metrics` page: process identity, load, and the size of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from engine_adapter.errors import EngineRejected
from engine_adapter.http.control import ControlClient
from engine_adapter.http.prometheus_text import Samples, read_samples

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
    ranks = _ranks(samples)
    return VllmMetrics(
        ranks=ranks,
        identity=_identity(samples, one),
        running=_count(samples, _RUNNING, one),
        waiting=_count(samples, _WAITING, one),
        usage=_share(samples, one),
        block_size=_number(config, "block_size"),
        blocks=_blocks(config, ranks, rank),
        caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        queries=_count(samples, _QUERIES, one),
        hits=_count(samples, _HITS, one),
        fetched=_count(samples, _SOURCES, {**one, "source": _FETCHED}),
        lmcache=bool(samples.all(_LMCACHE, **one)),
    )


def _ranks(samples: Samples) -> tuple[int, ...]:
    # Request counts are missing if nothing has run yet and API servers share the page.
    names = {sample.labels.get("engine", "") for sample in samples.all(_CONFIG)}
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def _blocks(config: Mapping[str, str], ranks: tuple[int, ...], rank: int | None) -> int | None:
    """The page reports the blocks of all ranks together; one block of each rank stays empty."""
    total, parts = _number(config, "num_gpu_blocks"), len(ranks) or 1
    if not total:
        return None
    return total - parts if rank is None else total // parts - 1


def _identity(samples: Samples, one: Mapping[str, str]) -> str | None:
    """When the process started and when it created its counters, in microseconds."""
    created = [sample.value for sample in samples.all(_CREATED, **one)]
    started = samples.sum(_STARTED)
    times = [*([started] if started is not None else []), *([min(created)] if created else [])]
    return "-".join(f"{time:.6f}" for time in times) or None


def _count(samples: Samples, name: str, one: Mapping[str, str]) -> int:
    return int(samples.sum(name, **one) or 0)


def _share(samples: Samples, one: Mapping[str, str]) -> float | None:
    values = [sample.value for sample in samples.all(_USAGE, **one)]
    return min(max(sum(values) / len(values), 0.0), 1.0) if values else None


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else None
