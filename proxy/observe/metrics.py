"""Prometheus metrics: counts of finished requests, the loop's lag, and the fleet's state at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from http import HTTPStatus

from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.discovery import Source
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.families import Counter, Histogram, gauge
from proxy.observe.reasons import reason_of
from proxy.observe.reuse import ReuseCounts, available_tokens, saved_s
from proxy.peers.peers import Counts, Peers
from proxy.request.records import RequestRecord

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_BY_ENGINE = ("model", "engine")


class Metrics:
    """All metrics of one proxy.

    Attributes:
        loop_lag: how late the event loop was, see `loop_lag.py`.
    """

    def __init__(
        self, fleet: Fleet, sources: Mapping[str, Source] | None = None, peers: Peers | None = None
    ) -> None:
        """`sources`: where engines are found, by name. `peers`: other kvpins; None without an exchange."""
        self._fleet, self._peers = fleet, peers
        self._sources = {} if sources is None else sources
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
        self._available = Counter(
            "kvpin_available_cached_tokens_total",
            "Cached tokens on the eligible engine that held most of each prompt",
            _BY_ENGINE,
        )
        self._predicted = Counter(
            "kvpin_predicted_cached_tokens_total", "Cached tokens predicted", _BY_ENGINE
        )
        self._reported = Counter("kvpin_cached_tokens_total", "Cached tokens engines reported", _BY_ENGINE)
        self._saved = Counter(
            "kvpin_saved_prefill_seconds_total", "Seconds of prefill saved by reuse", _BY_ENGINE
        )
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
            self._available.of(model, engine).add(available_tokens(placement))
            self._predicted.of(model, engine).add(placement.predicted_tokens)
            if record.reported_tokens is not None:
                self._reported.of(model, engine).add(record.reported_tokens)
                self._saved.of(model, engine).add(saved_s(self._fleet, record))
                missed = record.reported_tokens != placement.predicted_tokens
                self._inexact.of(model, engine).add(int(missed))

    def refuse(self, status: int) -> None:
        """Counts a request that was refused before it got a record."""
        self._requests.of("", "", str(status)).add()

    def requests(self) -> int:
        """Requests that have ended."""
        return round(sum(self._requests.sums("status").values()))

    def reuse(self) -> dict[str, ReuseCounts]:
        """Reuse by engine, those that have left included."""
        counters = self._prompt, self._available, self._predicted, self._reported
        prompt, available, selected, delivered = (counter.sums("engine") for counter in counters)
        saved = self._saved.sums("engine")
        return {
            engine: ReuseCounts(
                prompt_tokens=round(tokens),
                available_tokens=round(available[engine]),
                selected_tokens=round(selected[engine]),
                delivered_tokens=round(delivered.get(engine, 0)),
                saved_s=round(saved.get(engine, 0.0), 3),
            )
            for engine, tokens in prompt.items()
        }

    def render(self) -> bytes:
        """The Prometheus text page."""
        families = (
            self._requests,
            self._retries,
            self._interrupted,
            self._placements,
            self._prompt,
            self._available,
            self._predicted,
            self._reported,
            self._saved,
            self._inexact,
            self._tokens,
            self._first_byte,
            self._duration,
            self._queued,
            self._refused,
            self._lag,
        )
        counted = (line for family in families for line in family.lines())
        on_fleet = (*_of_fleet(self._fleet), *_of_sources(self._sources), *_of_peers(self._peers))
        return "".join((*counted, *on_fleet, _of_loop())).encode()


def _of_loop() -> str:
    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # no loop runs here
        tasks = 0
    return gauge("kvpin_tasks", "Tasks of the event loop", (), [((), tasks)])


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


def _of_sources(sources: Mapping[str, Source]) -> Iterator[str]:
    yield gauge(
        "kvpin_source_answers",
        "1 when the source of engines answered last, 0 when it failed",
        ("source",),
        (((source.name,), source.error is None) for source in sources.values()),
    )
    yield gauge(
        "kvpin_source_engines",
        "Engines that the source named last",
        ("source",),
        (((source.name,), len(source.found)) for source in sources.values()),
    )


def _restores_ahead(fleet: Fleet) -> str:
    restores = Counter(
        "kvpin_restores_ahead_total", "Restores ahead of need: begun, used, wasted", ("engine", "what")
    )
    for engine in fleet.engines.values():
        restores.of(engine.id, "begun").add(engine.ahead.restores)
        restores.of(engine.id, "used").add(engine.ahead.used)
        restores.of(engine.id, "wasted").add(engine.ahead.wasted)
    return "".join(restores.lines())


def _of_peers(peers: Peers | None) -> Iterator[str]:
    """What is shared with other kvpins."""
    told = peers.stats() if peers is not None else None
    counts = peers.counts if peers is not None else Counts()
    yield gauge(
        "kvpin_exchange_up",
        "1 while this kvpin can tell others of its requests",
        (),
        [((), told.connected)] if told is not None else [],
    )
    yield gauge(
        "kvpin_exchange_peers",
        "Other kvpins in front of these engines",
        ("in_step",),
        [((str(step).lower(),), sum(peer.in_step is step for peer in told.peers)) for step in (False, True)]
        if told is not None
        else [],
    )
    messages = Counter("kvpin_exchange_messages_total", "Messages between kvpins", ("direction",))
    faults = Counter("kvpin_exchange_faults_total", "What went wrong between kvpins", ("fault",))
    if told is not None:
        messages.of("told").add(counts.told)
        messages.of("heard").add(counts.heard)
        faults.of("dropped").add(told.dropped)
        faults.of("lost").add(told.lost)
        faults.of("gap").add(counts.gaps + sum(peer.gaps for peer in told.peers))
        faults.of("divergence").add(counts.divergences + sum(peer.divergences for peer in told.peers))
    yield from messages.lines()
    yield from faults.lines()
