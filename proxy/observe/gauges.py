"""Metrics that are read from kvpin's state at each scrape: gauges, and counters that others count."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import NamedTuple

import msgspec

from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.core.quotas import ByteBudget
from proxy.fleet.discovery import Source
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.metric_families import Counter, Family, gauge
from proxy.peers.peers import Peers

_VERSION = version("kvpin")
_IN_FLIGHT = "kvpin_engine_in_flight"


class WorkerNow(msgspec.Struct, array_like=True, frozen=True):
    """What goes on in a worker: requests in flight by engine, unless the exchange tells them; requests that
    wait because engines are busy, by model; bytes of bodies that no engine has yet; tasks of its loop."""

    in_flight: dict[str, int]
    waiting: dict[str, int]
    body_bytes: int
    tasks: int


class ScrapedState(NamedTuple):
    """The state that gauges are read from: engines, where they are found, other kvpins if there are any,
    memory for requests' bodies, whether the last reload succeeded, and what other workers told last."""

    fleet: Fleet
    sources: Mapping[str, Source]
    peers: Peers | None
    bodies: ByteBudget
    reload_ok: bool = True
    others: Sequence[WorkerNow] = ()


class _Gauge(NamedTuple):
    """A family of gauges.

    Attributes:
        labels: the names of its labels.
        series: label values and value of each series.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    series: Callable[[ScrapedState], Iterable[tuple[tuple[str, ...], float]]]

    @property
    def family(self) -> Family:
        """The declaration of its family."""
        return Family(self.name, "gauge", self.text, self.labels)


_GAUGES = (
    _Gauge(
        "kvpin_engine_ready",
        "1 while the engine takes requests",
        ("engine",),
        lambda now: (((each.id,), each.state is EngineState.READY) for each in now.fleet.engines.values()),
    ),
    _Gauge(
        "kvpin_engine_draining",
        "1 while the engine gets no new requests because it was drained on purpose",
        ("engine",),
        lambda now: (((each.id,), each.state is EngineState.DRAINING) for each in now.fleet.engines.values()),
    ),
    _Gauge(
        "kvpin_engine_precise",
        "1 while the view of its cache is exact",
        ("engine",),
        lambda now: (((each.id,), each.audit.trust is Trust.PRECISE) for each in now.fleet.engines.values()),
    ),
    _Gauge(
        "kvpin_engine_owner",
        "1 for the owner of an engine that only one kvpin may use",
        ("engine", "owner"),
        lambda now: (
            ((each.id, each.owner), 1) for each in now.fleet.engines.values() if each.owner is not None
        ),
    ),
    _Gauge(
        _IN_FLIGHT,
        "Requests in flight",
        ("engine",),
        lambda now: (((each.id,), each.in_flight) for each in now.fleet.engines.values()),
    ),
    _Gauge(
        "kvpin_engine_blocks",
        "Blocks that the engine is known to hold",
        ("engine", "tier"),
        lambda now: (
            ((engine_id, tier.value), pool.index.held(engine_id, tier))
            for pool in now.fleet.pools.values()
            for engine_id in pool.engines
            for tier in Tier
        ),
    ),
    _Gauge(
        "kvpin_index_entries",
        "Different blocks in the index",
        ("model",),
        lambda now: (((pool.model,), len(pool.index)) for pool in now.fleet.pools.values()),
    ),
    _Gauge(
        "kvpin_queue_requests",
        "Requests that wait now for engines that are busy",
        ("model",),
        lambda now: (((model,), count) for model, count in waiting_of(now.fleet, now.others).items()),
    ),
    _Gauge(
        "kvpin_body_bytes",
        "Bytes of requests' bodies that no engine has yet",
        (),
        lambda now: [((), now.bodies.used + sum(each.body_bytes for each in now.others))],
    ),
    _Gauge(
        "kvpin_reload_ok",
        "0 when the settings were refused as they were last read again (SIGHUP): the old ones stay",
        (),
        lambda now: [((), now.reload_ok)],
    ),
    _Gauge(
        "kvpin_source_answers",
        "1 when the source of engines answered last, 0 when it failed",
        ("source",),
        lambda now: (((each.name,), each.error is None) for each in now.sources.values()),
    ),
    _Gauge(
        "kvpin_source_engines",
        "Engines that the source named last",
        ("source",),
        lambda now: (((each.name,), len(each.found)) for each in now.sources.values()),
    ),
    _Gauge(
        "kvpin_exchange_up",
        "1 while this kvpin can tell others of its requests; no value without an exchange",
        (),
        lambda now: [((), now.peers.stats().connected)] if now.peers is not None else [],
    ),
    _Gauge(
        "kvpin_exchange_peers",
        "Other kvpins in front of these engines; in_step: true if all their requests are known here",
        ("in_step",),
        lambda now: _peers_by_step(now.peers) if now.peers is not None else [],
    ),
    _Gauge(
        "kvpin_tasks",
        "Tasks of the event loop; they fall with requests in flight, unless kvpin leaks",
        (),
        lambda now: [((), tasks() + sum(each.tasks for each in now.others))],
    ),
    _Gauge("kvpin_build_info", "1, with the version of kvpin", ("version",), lambda _: [((_VERSION,), 1)]),
)


GAUGES = tuple(each.family for each in _GAUGES)


def gauges_of(now: ScrapedState) -> Iterator[str]:
    """The families of gauges, line by line. Each is as it was when its first line was taken."""
    for each in _GAUGES:
        yield from gauge(each.family, list(each.series(now)))


def waiting_of(fleet: Fleet, others: Iterable[WorkerNow] = ()) -> Counts[str]:
    """Requests that wait because engines are busy, by model."""
    waiting = Counts({pool.model: len(pool.line) for pool in fleet.pools.values()})
    for each in others:
        waiting.update(each.waiting)
    return waiting


def counters_of(fleet: Fleet, peers: Peers | None) -> tuple[Counter, ...]:
    """Restores ahead of need, messages between kvpins, and what went wrong between them."""
    restores = Counter(
        "kvpin_restores_ahead_total",
        "Restores ahead of need, by what: begun, and of these used and wasted",
        ("engine", "what"),
    )
    for engine in fleet.engines.values():
        restores.of(engine.id, "begun").add(engine.ahead.restores)
        restores.of(engine.id, "used").add(engine.ahead.used)
        restores.of(engine.id, "wasted").add(engine.ahead.wasted)
    messages = Counter(
        "kvpin_exchange_messages_total", "Messages between kvpins, by direction: told, heard", ("direction",)
    )
    faults = Counter(
        "kvpin_exchange_faults_total",
        "What went wrong between kvpins, by fault: dropped (a peer had not read enough), missed (the "
        "beginnings of requests were lost), lost (a kvpin fell silent)",
        ("fault",),
    )
    if peers is not None:
        told, counts = peers.stats(), peers.counts
        messages.of("told").add(counts.told)
        messages.of("heard").add(counts.heard)
        faults.of("dropped").add(told.dropped)
        faults.of("lost").add(told.lost)
        faults.of("missed").add(counts.missed + sum(peer.missed for peer in told.peers))
    return restores, messages, faults


def _peers_by_step(peers: Peers) -> list[tuple[tuple[str, ...], float]]:
    told = peers.stats().peers
    return [((str(step).lower(),), sum(peer.in_step is step for peer in told)) for step in (False, True)]


def tasks() -> int:
    """Tasks of the event loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no loop runs here
        return 0
