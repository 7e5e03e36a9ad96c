"""The figures of a router under a workload, from the client's clock, the engines' own reports and /proc."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table
from router_client import Answer
from router_peers import ROUTERS

from proxy.replay.simulator import quantile_of


@dataclass(frozen=True, slots=True)
class Result:
    """One router under one workload.

    Attributes:
        hits: share of the prompt tokens that engines had in their caches, by their own reports.
        mean_ms, median_ms, p99_ms: to the first token, at the client, from when the request was due.
        engine_ms: mean to the first token at the engine: without what the router itself took.
        imbalance: requests of the busiest engine, by the mean.
        busy, busiest: share of the time that engines spent on prompts, on average and at the most.
        errors: requests that failed, or were answered with other than the engine's words.
        exact: share of answers with exactly the predicted reuse; None if the router predicts none.
        router_cpu_s, engines_cpu_s, client_cpu_s: used meanwhile.
        machine: share of the machine's CPU time in use meanwhile, by all processes.
        late_ms: how late the client sent, 99 times of 100 at most.
    """

    workload: str
    router: str
    seed: int
    requests: int
    hits: float
    mean_ms: float
    median_ms: float
    p99_ms: float
    engine_ms: float
    imbalance: float
    busy: float
    busiest: float
    errors: int
    first_error: str
    exact: float | None
    router_cpu_s: float
    engines_cpu_s: float
    client_cpu_s: float
    machine: float
    late_ms: float

    def line(self) -> str:
        """In a few words."""
        return (
            f"({self.workload}) seed {self.seed} {self.router}: {100 * self.hits:.1f}%, "
            f"mean {self.mean_ms:.1f} ms, p99 {self.p99_ms:.0f} ms, "
            f"errors {self.errors} {self.first_error}".rstrip()
        )


class EngineRecord(msgspec.Struct, frozen=True):
    """An engine's record of its work since it was started; see `mock_engine.Record`."""

    requests: int
    busy_s: float
    cpu_s: float
    first_token_s: list[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """The readings of all clocks and counters at one moment.

    Attributes:
        engines: one record each.
        router_cpu_s: of the router's processes.
    """

    engines: Sequence[EngineRecord]
    router_cpu_s: float
    client_cpu_s: float
    machine_used: float
    machine_all: float

    @classmethod
    def now(cls, engines: Sequence[EngineRecord], router_cpu_s: float) -> Reading:
        """With this process's CPU, as it is the client, and the machine's."""
        ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return cls(engines, router_cpu_s, time.process_time(), sum(ticks) - idle, sum(ticks))


def summarise(
    workload: str,
    router: str,
    seed: int,
    seconds: float,
    answers: Sequence[Answer],
    readings: tuple[Reading, Reading],
) -> Result:
    """The figures of one run. `readings` are from before and after it, `seconds` what the arrivals took."""
    then, now = readings
    engines = list(zip(then.engines, now.engines, strict=True))
    counts = [end.requests - begin.requests for begin, end in engines]
    busy = [(end.busy_s - begin.busy_s) / seconds for begin, end in engines]
    waits = [wait for begin, end in engines for wait in end.first_token_s[len(begin.first_token_s) :]]
    first = sorted(answer.first_token_s for answer in answers if answer.first_token_s is not None)
    errors = [answer.error for answer in answers if answer.error]
    return Result(
        workload=workload,
        router=router,
        seed=seed,
        requests=len(answers),
        hits=sum(answer.cached_tokens for answer in answers)
        / max(1, sum(answer.prompt_tokens for answer in answers)),
        mean_ms=1000 * statistics.mean(first or [0]),
        median_ms=1000 * quantile_of(first or [0.0], 0.5),
        p99_ms=1000 * quantile_of(first or [0.0], 0.99),
        engine_ms=1000 * statistics.mean(waits or [0]),
        imbalance=max(counts) * len(counts) / max(1, sum(counts)),
        busy=statistics.mean(busy),
        busiest=max(busy),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        exact=_exactness(answers),
        router_cpu_s=now.router_cpu_s - then.router_cpu_s,
        engines_cpu_s=sum(end.cpu_s - begin.cpu_s for begin, end in engines),
        client_cpu_s=now.client_cpu_s - then.client_cpu_s,
        machine=(now.machine_used - then.machine_used) / max(1, now.machine_all - then.machine_all),
        late_ms=1000 * quantile_of(sorted(answer.sent_late_s for answer in answers), 0.99),
    )


def table(title: str, results: Sequence[Result]) -> Table:
    """One row for each router, quickest first; means over seeds."""
    columns = ("hits", "mean", "median", "p99", "at engine", "imbalance", "busy (most)", "errors", "exact")
    columns += ("late p99", "router CPU", "engines", "client", "machine")
    shown = Table(
        title=title,
        caption="ms from when a request was due to its first token, and until it was sent; CPU in s",
    )
    shown.add_column("router")
    for column in columns:
        shown.add_column(column, justify="right")
    by_router: dict[str, list[Result]] = {}
    for result in results:
        by_router.setdefault(result.router, []).append(result)
    for group in sorted(by_router.values(), key=lambda group: _mean(group, "mean_ms")):
        shown.add_row(ROUTERS[group[0].router].title, *_cells(group))
    return shown


def _cells(group: Sequence[Result]) -> list[str]:
    exact = [result.exact for result in group if result.exact is not None]
    return [
        f"{100 * _mean(group, 'hits'):.1f}%",
        f"{_mean(group, 'mean_ms'):.1f}",
        f"{_mean(group, 'median_ms'):.1f}",
        f"{_mean(group, 'p99_ms'):.0f}",
        f"{_mean(group, 'engine_ms'):.1f}",
        f"{_mean(group, 'imbalance'):.2f}",
        f"{_mean(group, 'busy'):.2f} ({_mean(group, 'busiest'):.2f})",
        str(sum(result.errors for result in group)),
        f"{100 * statistics.mean(exact):.1f}%" if exact else "",
        f"{_mean(group, 'late_ms'):.1f}",
        f"{_mean(group, 'router_cpu_s'):.1f}",
        f"{_mean(group, 'engines_cpu_s'):.1f}",
        f"{_mean(group, 'client_cpu_s'):.1f}",
        f"{100 * _mean(group, 'machine'):.0f}%",
    ]


def _mean(group: Sequence[Result], name: str) -> float:
    return statistics.mean(getattr(result, name) for result in group)


def _exactness(answers: Sequence[Answer]) -> float | None:
    checked = [answer for answer in answers if answer.predicted is not None]
    return sum(a.predicted == a.cached_tokens for a in checked) / len(checked) if checked else None
