"""Prometheus metrics: counters of finished requests, and gauges read from the fleet at each scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.reasons import reason_of
from proxy.request.records import RequestRecord

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """All metrics of one proxy, in their own registry."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        by_engine = ("model", "engine")
        self._requests = Counter(
            "kvpin_requests", "Requests answered", (*by_engine, "status"), registry=self.registry
        )
        self._retries = Counter(
            "kvpin_retries", "Attempts beyond a request's first", ("model",), registry=self.registry
        )
        self._placements = Counter(
            "kvpin_placements",
            "Requests placed, by the reason for their engine",
            ("model", "reason"),
            registry=self.registry,
        )
        self._prompt = Counter(
            "kvpin_prompt_tokens", "Prompt tokens of requests", by_engine, registry=self.registry
        )
        self._predicted = Counter(
            "kvpin_predicted_cached_tokens", "Cached tokens predicted", by_engine, registry=self.registry
        )
        self._reported = Counter(
            "kvpin_cached_tokens", "Cached tokens engines reported", by_engine, registry=self.registry
        )
        self._inexact = Counter(
            "kvpin_mispredictions", "Requests whose prediction missed", by_engine, registry=self.registry
        )
        self._tokens = Counter(
            "kvpin_tokenisation_checks",
            "Prompts whose tokens the engine reported, by whether they equal kvpin's",
            (*by_engine, "result"),
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "kvpin_first_byte_seconds",
            "Time to the first byte of an answer",
            by_engine,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "kvpin_request_seconds",
            "Duration of requests",
            by_engine,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_FleetCollector(fleet))

    def observe(self, record: RequestRecord) -> None:
        """Counts one finished request."""
        model = record.model if record.placement is not None and record.model else ""
        engine = record.placement.engine if record.placement is not None else ""
        self._requests.labels(model, engine, str(record.status or "failed")).inc()
        self._retries.labels(model).inc(max(len(record.attempts) - 1, 0))
        if record.placement is not None:
            self._placements.labels(model, reason_of(record.placement).value).inc()
        if record.duration_s is not None:
            self._duration.labels(model, engine).observe(record.duration_s)
        if record.first_byte_s is not None:
            self._first_byte.labels(model, engine).observe(record.first_byte_s)
        if record.tokens_agree is not None:
            self._tokens.labels(model, engine, "same" if record.tokens_agree else "different").inc()
        if record.placement is not None and record.prompt is not None:
            self._prompt.labels(model, engine).inc(record.placement.n_tokens)
            self._predicted.labels(model, engine).inc(record.placement.predicted_tokens)
            if record.reported_tokens is not None:
                self._reported.labels(model, engine).inc(record.reported_tokens)
                self._inexact.labels(model, engine).inc(
                    record.reported_tokens != record.placement.predicted_tokens
                )

    def render(self) -> bytes:
        """The Prometheus text page."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """Gauges, read from the fleet at each scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """The samples of every engine and pool."""
        ready = GaugeMetricFamily("kvpin_engine_ready", "1 when the engine takes requests", labels=["engine"])
        precise = GaugeMetricFamily(
            "kvpin_engine_precise", "1 when the view of its cache is exact", labels=["engine"]
        )
        flight = GaugeMetricFamily("kvpin_engine_in_flight", "Requests in flight", labels=["engine"])
        held = GaugeMetricFamily(
            "kvpin_engine_blocks", "Blocks that the engine is known to hold", labels=["engine", "tier"]
        )
        ahead = CounterMetricFamily(
            "kvpin_restores_ahead",
            "Restores ahead of need: begun, used, wasted",
            labels=["engine", "what"],
        )
        for engine in self._fleet.engines.values():
            counts = engine.ahead
            for what, number in (
                ("begun", counts.restores),
                ("used", counts.used),
                ("wasted", counts.wasted),
            ):
                ahead.add_metric([engine.id, what], number)
            ready.add_metric([engine.id], engine.state is EngineState.READY)
            precise.add_metric([engine.id], engine.audit.trust is Trust.PRECISE)
            flight.add_metric([engine.id], engine.ledger.in_flight)
        entries = GaugeMetricFamily("kvpin_index_entries", "Blocks in the index", labels=["model"])
        for pool in self._fleet.pools.values():
            entries.add_metric([pool.model], len(pool.index))
            for engine_id in pool.engines:
                for tier in Tier:
                    held.add_metric([engine_id, tier.value], pool.index.held(engine_id, tier))
        return (ready, precise, flight, held, entries, ahead)
