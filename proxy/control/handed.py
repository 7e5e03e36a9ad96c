"""What a worker counts, handed over to the worker that speaks for all: from then on it counts there alone."""

from __future__ import annotations

from operator import add as added
from typing import TypeVar

import msgspec

from engine_adapter.off_loop import THREADS, What
from proxy.core.audit import AuditCounts, Unchecked
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.observe.metric_families import Taken
from proxy.observe.metrics import Metrics, ReuseCounts
from proxy.prompt import PromptBuilder

_Counts = TypeVar("_Counts", AuditCounts, AheadCounts)


class EngineCounts(msgspec.Struct, array_like=True, frozen=True):
    """The counts of the requests of one engine."""

    served: int
    prefilled: int
    failed: int
    audit: AuditCounts
    unchecked: dict[Unchecked, int]
    ahead: AheadCounts


class Counts(msgspec.Struct, array_like=True, frozen=True):
    """The counts of one worker since it handed over last.

    Attributes:
        ended: requests.
        series: those of the page, by name and labels.
        reuse, engines: by engine.
        cpu_s: by tenant and kind of work, see `FairThreads.spent`.
        prompts: those whose tokens agreed with the engine's and differed, by model.
        passed_on: see `Fleet.passed_on`.
    """

    ended: int
    series: list[tuple[str, tuple[str, ...], Taken]]
    reuse: dict[str, ReuseCounts]
    total_reuse: ReuseCounts
    cpu_s: list[tuple[str | None, What, float]]
    engines: dict[str, EngineCounts]
    prompts: dict[str, tuple[int, int]]
    passed_on: dict[str, int]


def take(fleet: Fleet, metrics: Metrics) -> Counts:
    """The counts, which begin anew here."""
    cpu_s = [(*key, seconds) for key, seconds in THREADS.spent.items() if seconds]
    for tenant, what, seconds in cpu_s:
        THREADS.on_loop[tenant, what] -= seconds
    taken = Counts(
        metrics.ended,
        [
            (name, labels, taken)
            for name, family in metrics.families.items()
            for labels, each in family.series.items()
            if (taken := each.take()) is not None
        ],
        metrics.reuse,
        metrics.total_reuse,
        cpu_s,
        {engine.id: _take(engine) for engine in fleet.engines.values()},
        {model: (builder.agreed, builder.differed) for model, builder in _builders(fleet)},
        dict(fleet.passed_on),
    )
    metrics.ended, metrics.reuse, metrics.total_reuse = 0, {}, ReuseCounts()
    fleet.passed_on.clear()
    for _, builder in _builders(fleet):
        builder.agreed = builder.differed = 0
    return taken


def _builders(fleet: Fleet) -> list[tuple[str, PromptBuilder]]:
    return [(pool.model, pool.prompts) for pool in fleet.pools.values() if pool.prompts is not None]


def _take(engine: Engine) -> EngineCounts:
    ended, audit, ahead = (engine.served, engine.prefilled, engine.failed), engine.audit, engine.ahead
    counts = EngineCounts(*ended, audit.counts, dict(audit.unchecked), ahead)
    engine.from_peers += sum(ended)
    engine.prefilled = engine.failed = 0
    audit.counts, engine.ahead = AuditCounts(), AheadCounts()
    audit.unchecked.clear()
    return counts


def add(fleet: Fleet, metrics: Metrics, counts: Counts) -> None:
    """Counts what another worker has handed over."""
    metrics.ended += counts.ended
    own = {"engine": metrics.label, "prefiller": metrics.label, "tenant": metrics.tenant_label}
    for name, labels, taken in counts.series:
        family = metrics.families[name]
        pairs = zip(family.family.labels, labels, strict=True)
        named = tuple(own[each](value) if value and each in own else value for each, value in pairs)
        family.series[named].give(taken)
    for engine_id, reuse in counts.reuse.items():
        metrics.reuse.setdefault(engine_id, ReuseCounts()).add(reuse)
    metrics.total_reuse.add(counts.total_reuse)
    for tenant, what, seconds in counts.cpu_s:
        THREADS.on_loop[tenant, what] += seconds
    for engine_id, more in counts.engines.items():
        if (engine := fleet.engines.get(engine_id)) is not None:
            _add(engine, more)
    for model, builder in _builders(fleet):
        agreed, differed = counts.prompts.get(model, (0, 0))
        builder.agreed, builder.differed = builder.agreed + agreed, builder.differed + differed
    fleet.passed_on.update(counts.passed_on)


def _add(engine: Engine, counts: EngineCounts) -> None:
    engine.from_peers -= counts.served + counts.prefilled + counts.failed
    engine.prefilled += counts.prefilled
    engine.failed += counts.failed
    engine.audit.counts = _sum(engine.audit.counts, counts.audit)
    engine.audit.unchecked.update(counts.unchecked)
    engine.ahead = _sum(engine.ahead, counts.ahead)


def _sum(one: _Counts, more: _Counts) -> _Counts:
    """Both together, field by field."""
    return type(one)(*map(added, msgspec.structs.astuple(one), msgspec.structs.astuple(more)))
