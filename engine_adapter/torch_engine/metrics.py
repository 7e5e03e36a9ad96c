"""The engine's Prometheus metrics: their names begin with `kvpin_engine_`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_adapter.torch_engine.engine import Counters

_COUNTERS = {
    "steps": "Model steps",
    "prompt_tokens": "Prompt tokens of scheduled requests",
    "cached_tokens": "Prompt tokens that came from cache",
    "generated_tokens": "Generated tokens",
    "preemptions": "Requests stopped because blocks ran out; they run again later",
}
_GAUGES = {"running": "Requests running", "waiting": "Requests waiting"}
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EngineMetrics:
    """The metrics of `GET /metrics`, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = Counters()
        self._stats: Mapping[str, Any] = {}
        self.first_token_seconds = Histogram(
            "kvpin_engine_first_token_seconds",
            "Seconds from a request's submission to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(self)

    def render(self, counters: Counters, stats: Mapping[str, Any]) -> bytes:
        """Prometheus text of `counters` and of cache `stats` as in `GET /kv/stats`; {} when unknown."""
        self._counters, self._stats = counters, stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics; called by the registry."""
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvpin_engine_{name}", text, value=getattr(self._counters, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(
                f"kvpin_engine_requests_{name}", text, value=getattr(self._counters, name)
            )
        finished = CounterMetricFamily("kvpin_engine_requests_finished", "Requests ended", labels=["reason"])
        for reason, count in list(self._counters.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield from self._cache_metrics()

    def _cache_metrics(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "kvpin_engine_kv_blocks", "KV blocks by tier and state", labels=["tier", "state"]
        )
        for tier in ("gpu", "host"):
            for state in ("total", "free", "cached", "active"):
                count = self._stats.get(tier, {}).get(state)
                if count is not None:
                    blocks.add_metric([tier, state], count)
        yield blocks
        moved = CounterMetricFamily(
            "kvpin_engine_kv_blocks_moved", "KV blocks moved or dropped", labels=["what"]
        )
        for what, count in self._stats.get("blocks", {}).items():
            moved.add_metric([what], count)
        yield moved
        if "pinned_blocks" in self._stats:
            yield GaugeMetricFamily(
                "kvpin_engine_kv_pinned_blocks", "KV blocks under a pin", value=self._stats["pinned_blocks"]
            )
