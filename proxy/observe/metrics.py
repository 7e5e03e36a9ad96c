"""Prometheus metrics: counts of finished requests, the loop's lag, and the fleet's state at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http import HTTPStatus

from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.families import Counter, Histogram, gauge
from proxy.observe.reasons import reason_of
from proxy.request.records import RequestRecord

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_BY_ENGINE = ("model", "engine")


class Metrics:
    """All metrics of one proxy.

    Attributes:
        loop_lag: how late the event loop was, see `loop_lag.py`.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._requests = Counter("kvpin_requests_total", "Requests answered", (*_BY_ENGINE, "status"))
        self._retries = Counter("kvpin_retries_total", "Attempts beyond a request's first", ("model",))
        self._interrupted = Counter(
            "kvpin_interrupted_streams_total",
            "Streams whose engine died in mid-answer, by whether another one went on with them",
            ("model", "result"),
        )
        self._placements = Counter(
            "kvpin_placements_total",
            "Requests placed, by the reason for their engine",
            ("model", "reason"),
        )
        self._prompt = Counter("kvpin_prompt_tokens_total", "Prompt tokens of requests", _BY_ENGINE)
        self._predicted = Counter(
            "kvpin_predicted_cached_tokens_total", "Cached tokens predicted", _BY_ENGINE
        )
        self._reported = Counter("kvpin_cached_tokens_total", "Cached tokens engines reported", _BY_ENGINE)
        self._inexact = Counter("kvpin_mispredictions_total", "Requests whose prediction missed", _BY_ENGINE)
        self._tokens = Counter(
            "kvpin_tokenisation_checks_total",
            "Prompts whose tokens the engine reported, by whether they equal kvpin's",
            (*_BY_ENGINE, "result"),
        )
        self._first_byte = Histogram(
            "kvpin_first_byte_seconds", "Time to the first byte of an answer", _BY_ENGINE, _SECONDS
        )
        self._queued = Histogram(
            "kvpin_queued_seconds", "Wait of requests for engines that were busy", ("model",), _SECONDS
        )
        self._refused = Counter(
            "kvpin_refused_total", "Requests refused before an engine was asked", ("reason",)
        )
        self._duration = Histogram("kvpin_request_seconds", "Duration of requests", _BY_ENGINE, _SECONDS)
        self._lag = Histogram(
            "kvpin_loop_lag_seconds", "How late the event loop ran its timer", (), _LAG_SECONDS
        )
        self.loop_lag = self._lag.of()

    def observe(self, record: RequestRecord) -> None:
        """Counts one finished request."""
        placement = record.placement
        # Not the client's name for it, which may be anything.
        model = (record.lora or record.served_as or "") if placement is not None else ""
        engine = placement.engine if placement is not None else ""
        self._requests.of(model, engine, str(record.status or "failed")).add()
        self._retries.of(model).add(max(len(record.attempts) - 1, 0))
        if record.interrupted:
            self._interrupted.of(model, "migrated" if record.error is None else "broken").add()
        if record.duration_s is not None:
            self._duration.of(model, engine).observe(record.duration_s)
        if record.queued_s is not None:
            self._queued.of(record.served_as or "").observe(record.queued_s)
        if (reason := _refusal(record)) is not None:
            self._refused.of(reason).add()
        if record.first_byte_s is not None:
            self._first_byte.of(model, engine).observe(record.first_byte_s)
        if record.tokens_agree is not None:
            self._tokens.of(model, engine, "same" if record.tokens_agree else "different").add()
        if placement is None:
            return
        self._placements.of(model, reason_of(placement).value).add()
        if record.prompt is not None:
            self._prompt.of(model, engine).add(placement.n_tokens)
            self._predicted.of(model, engine).add(placement.predicted_tokens)
            if record.reported_tokens is not None:
                self._reported.of(model, engine).add(record.reported_tokens)
                missed = record.reported_tokens != placement.predicted_tokens
                self._inexact.of(model, engine).add(int(missed))

    def refuse(self, status: int) -> None:
        """Counts a request that was refused before it got a record."""
        self._requests.of("", "", str(status)).add()

    def render(self) -> bytes:
        """The Prometheus text page."""
        families = (
            self._requests,
            self._retries,
            self._interrupted,
            self._placements,
            self._prompt,
            self._predicted,
            self._reported,
            self._inexact,
            self._tokens,
            self._first_byte,
            self._duration,
            self._queued,
            self._refused,
            self._lag,
        )
        counted = (line for family in families for line in family.lines())
        tasks = gauge("kvpin_tasks", "Tasks of the event loop", (), [((), len(asyncio.all_tasks()))])
        return "".join((*counted, *_of_fleet(self._fleet), tasks)).encode()


def _refusal(record: RequestRecord) -> str | None:
    """Why kvpin refused a request that it might have sent to an engine: `limit`, of its tenant, or `busy`."""
    if record.attempts:
        return None
    if record.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "limit"
    has_waited = record.status == HTTPStatus.SERVICE_UNAVAILABLE and record.queued_s is not None
    return "busy" if has_waited else None


def _of_fleet(fleet: Fleet) -> Iterator[str]:
    """The values of each engine and pool now."""
    engines, pools = fleet.engines.values(), fleet.pools.values()
    yield gauge(
        "kvpin_engine_ready",
        "1 when the engine takes requests",
        ("engine",),
        (((engine.id,), engine.state is EngineState.READY) for engine in engines),
    )
    yield gauge(
        "kvpin_engine_precise",
        "1 when the view of its cache is exact",
        ("engine",),
        (((engine.id,), engine.audit.trust is Trust.PRECISE) for engine in engines),
    )
    yield gauge(
        "kvpin_engine_in_flight",
        "Requests in flight",
        ("engine",),
        (((engine.id,), engine.ledger.in_flight) for engine in engines),
    )
    yield gauge(
        "kvpin_engine_blocks",
        "Blocks that the engine is known to hold",
        ("engine", "tier"),
        (
            ((engine_id, tier.value), pool.index.held(engine_id, tier))
            for pool in pools
            for engine_id in pool.engines
            for tier in Tier
        ),
    )
    yield gauge(
        "kvpin_index_entries",
        "Blocks in the index",
        ("model",),
        (((pool.model,), len(pool.index)) for pool in pools),
    )
    yield gauge(
        "kvpin_queue_requests",
        "Requests that wait for engines that are busy",
        ("model",),
        (((pool.model,), len(pool.line)) for pool in pools),
    )
    yield _restores_ahead(fleet)


def _restores_ahead(fleet: Fleet) -> str:
    restores = Counter(
        "kvpin_restores_ahead_total", "Restores ahead of need: begun, used, wasted", ("engine", "what")
    )
    for engine in fleet.engines.values():
        restores.of(engine.id, "begun").add(engine.ahead.restores)
        restores.of(engine.id, "used").add(engine.ahead.used)
        restores.of(engine.id, "wasted").add(engine.ahead.wasted)
    return "".join(restores.lines())
