"""What vLLM's `/metrics` page says: which process it is, how busy, and how its cache is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_adapter.http.control import ControlClient
from engine_adapter.http.prometheus_text import Samples, read_samples

_STARTED, _CREATED = "process_start_time_seconds", "vllm:prefix_cache_queries_created"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _CONFIG = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_LMCACHE = "vllm:lmcache_mp_lookup_duration_seconds_count"
_NAMES = (_STARTED, _CREATED, _RUNNING, _WAITING, _USAGE, _CONFIG, _QUERIES, _HITS, _LMCACHE)


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """One look at an engine, or at all ranks of a server together.

    Attributes:
        ranks: the data-parallel ranks the page tells of.
        identity: of the process, None where the page does not tell (several API servers share one page).
        running, waiting: requests.
        usage: share of its blocks that running requests hold, 0–1.
        block_size: in tokens.
        blocks: KV can lie in; vLLM keeps one of its blocks empty.
        caching: whether it keeps prefixes; None where the page does not tell.
        queries, hits: prompt tokens looked up and found so far.
        lmcache: it runs over LMCache.
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
    lmcache: bool = False

    @property
    def tells_blocks(self) -> bool:
        """Whether there are blocks whose events can be understood."""
        return self.block_size is not None and self.caching is not False


async def look(control: ControlClient, rank: int | None) -> VllmMetrics:
    """Reads the page. With `rank`, what it says of that rank alone."""
    return read_metrics(await control.fetch("GET", "/metrics"), rank)


def read_metrics(page: bytes, rank: int | None = None) -> VllmMetrics:
    """See `look`.

    Raises:
        EngineUnavailable: it is not such a page.
    """
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
        caching=_flag(config, "enable_prefix_caching"),
        queries=_count(samples, _QUERIES, one),
        hits=_count(samples, _HITS, one),
        lmcache=bool(samples.all(_LMCACHE, **one)),
    )


def _ranks(samples: Samples) -> tuple[int, ...]:
    # Counts of requests are missing where nothing has run yet and API servers share the page.
    names = {sample.labels.get("engine", "") for sample in samples.all(_CONFIG)}
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def _blocks(config: Mapping[str, str], ranks: tuple[int, ...], rank: int | None) -> int | None:
    """The page tells each rank the blocks of all of them together; one of each stays empty."""
    total, parts = _number(config, "num_gpu_blocks"), len(ranks) or 1
    if not total:
        return None
    return total - parts if rank is None else total // parts - 1


def _identity(samples: Samples, one: Mapping[str, str]) -> str | None:
    """When the process started and, to the microsecond, when it made its counters."""
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


def _flag(labels: Mapping[str, str], name: str) -> bool | None:
    return {"True": True, "False": False}.get(labels.get(name, ""))
