"""The runs of a replay, the search for the engines that a p99 needs, and the notes that results need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from proxy.replay.figures import FigureSource, assumed_figures, used_figures
from proxy.replay.rules import ORACLE
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun, RunResult, speedup_for_load
from proxy.replay.trace import Trace

# With fewer requests, policies differ by a few percent by chance.
MIN_REQUESTS = 1000
# Engines that compute less of the time than this have no queues: every policy answers at once.
MIN_BUSY = 0.1
# Where neither the options nor the trace say how many.
ENGINES = 4


@dataclass(frozen=True, slots=True)
class P99Target:
    """The target that engines have to keep: a p99 time to first token, with at most `max_engines` engines.

    `margin` is the share of further traffic that they should be able to take."""

    p99_s: float
    max_engines: int
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Every policy, with every seed, on every number of engines of every size.

    Attributes:
        models: the engine of each run; they differ in GPU tokens alone.
        engines: numbers of them; empty for as many as the trace names, or else `ENGINES`.
        seeds: 0 for arrivals as recorded.
        load: share of the time that engines would be busy if nothing were cached; None for arrivals as
            recorded, or at `speedup`.
        target: with it the number of engines is searched for.
        sources: where the figures of `models` come from.
    """

    models: Sequence[EngineModel]
    engines: Sequence[int]
    policies: Sequence[str]
    seeds: Sequence[int] = (0,)
    load: float | None = None
    speedup: float = 1.0
    target: P99Target | None = None
    sources: Mapping[str, FigureSource] = field(default_factory=dict)

    def runs(self, trace: Trace) -> list[ReplayRun]:
        """All runs. Raises ValueError if the trace cannot be scaled to the load."""
        return [
            ReplayRun(policy, engines, model, self._speedup(trace, model, engines), seed)
            for engines in self.engines or (trace.engines or ENGINES,)
            for model in self.models
            for seed in self.seeds
            for policy in self.policies
        ]

    def seeded(self, trace: Trace, policy: str, engines: int) -> list[ReplayRun]:
        """One policy on a number of engines of the first size, with every seed."""
        model = self.models[0]
        speedup = self._speedup(trace, model, engines)
        return [ReplayRun(policy, engines, model, speedup, seed) for seed in self.seeds]

    def _speedup(self, trace: Trace, model: EngineModel, engines: int) -> float:
        return self.speedup if self.load is None else speedup_for_load(trace, model, engines, self.load)

    def settings(self, trace: Trace) -> dict[str, Any]:
        """The settings, for JSON."""
        return {
            "trace": trace.name,
            "requests": len(trace.requests),
            "prompt_tokens": trace.n_tokens,
            "tokens_per_block": trace.tokens_per_block,
            "load": self.load,
            "models": [asdict(model) for model in self.models],
            "sources": dict(self.sources),
        }

    def title(self, trace: Trace) -> str:
        """The replay in one line."""
        is_as_named = not self.engines and self.target is None and trace.engines
        fleet = f" of {trace.engines} engine{'s' * (trace.engines > 1)}" if is_as_named else ""
        pace = f"load {self.load:g}" if self.load is not None else f"{self.speedup:g}x as recorded"
        model = self.models[0]
        kind = "chunked prefill with decode" if model.chunked else "prefill alone"
        tiers = " or ".join(f"{each.gpu_tokens:,}" for each in self.models) + " tokens on the GPU"
        if model.host_tokens:
            tiers += f" and {model.host_tokens:,} in host memory"
        return f"{trace.name}: {len(trace.requests):,} requests{fleet}, {pace}; each engine {tiers}, {kind}"


def doubts(plan: ReplayPlan, trace: Trace, outcomes: Sequence[RunResult]) -> list[str]:
    """Reasons not to rely on the result, one sentence each: the one that weighs most is the first."""
    figures = assumed_figures(plan.models, plan.sources), trace.differ
    found = [sentence for sentence in figures if sentence]
    if trace.unrecorded:
        found.append(
            f"{trace.unrecorded:,} more requests were served meanwhile, whose prompts kvpin did not know: "
            "their load is missing here"
        )
    simulated = [outcome for outcome in outcomes if outcome.run.policy != ORACLE]
    if not simulated:
        return found
    is_compared = len({outcome.run.policy for outcome in simulated}) > 1
    requests = simulated[0].requests
    if requests < MIN_REQUESTS:
        reason = (
            "to compare policies: {}, and differences of a few percent are chance"
            if is_compared
            else f"to rely on: {{}}, and the p99 is that of the slowest {-(-requests // 100)}"
        ).format(f"{requests:,} requests")
        found.insert(0, f"too short {reason}; use {MIN_REQUESTS:,} requests or more")
    light = _light(trace, simulated) if is_compared else []
    if light:
        found.append(
            f"too light to compare policies with {' and '.join(map(str, light))} engines: they compute less "
            f"than {MIN_BUSY:.0%} of the time; raise --load or --speedup, or use fewer engines"
        )
    return found


def _light(trace: Trace, outcomes: Sequence[RunResult]) -> list[int]:
    """Numbers of engines that were hardly busy under every policy."""
    busy: dict[int, float] = {}
    for outcome in outcomes:
        engines = outcome.run.engines
        busy[engines] = max(busy.get(engines, 0.0), _busy(trace, outcome))
    return sorted(engines for engines, share in busy.items() if share < MIN_BUSY)


def _busy(trace: Trace, outcome: RunResult) -> float:
    """Share of the trace's time that engines computed prompts."""
    run = outcome.run
    lasts_s = (trace.requests[-1].at - trace.requests[0].at) / run.speedup
    computing_s = sum(outcome.computed) / run.model.prefill_tok_s
    return computing_s / (run.engines * lasts_s) if lasts_s else 1.0


def notes(plan: ReplayPlan, trace: Trace, outcomes: Sequence[RunResult]) -> list[str]:
    """Notes on the figures of engines, and on what was left out, one sentence each."""
    left_out = {outcome.run.model.gpu_tokens: outcome.too_long for outcome in outcomes}
    noted = [used_figures(plan.models, plan.sources)]
    noted += [
        f"{too_long:,} requests do not fit into an engine and were left out"
        if len(left_out) == 1
        else f"{too_long:,} requests do not fit into an engine of {gpu_tokens:,} GPU tokens: its figures are "
        "those of the others"
        for gpu_tokens, too_long in left_out.items()
        if too_long
    ]
    if trace.failed:
        noted.append(f"{trace.failed:,} requests got an error and were left out")
    if trace.cut:
        noted.append("the last line of the trace is incomplete and was left out")
    if trace.rechained:
        noted.append(
            "an id of the trace stands for its block alone, not for all blocks before it; replay chained them"
        )
    by_affinity = {"sticky", "chwbl"} & {outcome.run.policy for outcome in outcomes}
    if by_affinity and not trace.has_sessions:
        noted.append(
            "the trace names no sessions: the first block that not all requests share counts as one "
            f"({' and '.join(sorted(by_affinity))})"
        )
    return noted


P99 = 0.99


@dataclass(frozen=True, slots=True)
class Need:
    """The engines that one policy needs.

    Attributes:
        engines: the fewest that keep it; None if the allowed maximum does not.
        p99_s: p99 with `engines`, or with the allowed maximum; of several seeds the worst.
        p99_s_with_one_less: the same with one engine less; None if one engine is enough.
        planned: the fewest that keep it with the target's margin of traffic; None as for `engines`.
        planned_p99_s: p99 with `planned`, or the allowed maximum, and the margin.
        runs: seeds, of which the worst counts.
    """

    policy: str
    target: P99Target
    engines: int | None
    p99_s: float
    p99_s_with_one_less: float | None = None
    planned: int | None = None
    planned_p99_s: float = 0.0
    runs: int = 1

    def __str__(self) -> str:
        goal = f"a p99 TTFT of {self.target.p99_s:g} s"
        most = f"{_engines(self.target.max_engines)} not enough"
        allow = "allow more with --max-engines, or use faster engines"
        if self.engines is None:
            return f"{self.policy}: {most} for {goal}: it is {self.p99_s:.3g} s{self._of_runs}; {allow}"
        less = ""
        if self.p99_s_with_one_less is not None:
            less = f", and {self.p99_s_with_one_less:.3g} s with {self.engines - 1}"
        enough = f"{_engines(self.engines)} enough for the traffic as it is: {self.p99_s:.3g} s{less}"
        more = f"with {self.target.margin:.0%} more traffic"
        if self.planned is None:
            planned = f"{self.planned_p99_s:.3g} s{self._of_runs}"
            return f"{self.policy}: {enough}; {more}, {most} for {goal}: {planned}; {allow}"
        return (
            f"{self.policy}: plan {_counted(self.planned)} for {goal}: it is {self.planned_p99_s:.3g} s "
            f"{more}; {enough}{self._of_runs}"
        )

    @property
    def _of_runs(self) -> str:
        return f" (each p99 is the worst of {self.runs} runs)" if self.runs > 1 else ""

    def as_data(self) -> dict[str, str | float | None]:
        """The need as a JSON object."""
        return {
            "policy": self.policy,
            "target_p99_s": self.target.p99_s,
            "max_engines": self.target.max_engines,
            "engines": self.engines,
            "p99_ttft_s": self.p99_s,
            "p99_ttft_s_with_one_less": self.p99_s_with_one_less,
            "margin": self.target.margin,
            "engines_with_margin": self.planned,
            "p99_ttft_s_with_margin": self.planned_p99_s,
        }


def search(
    plan: ReplayPlan,
    target: P99Target,
    trace: Trace,
    run_all: Callable[[Sequence[ReplayRun]], Sequence[RunResult]],
) -> tuple[list[Need], list[RunResult]]:
    """Finds how many engines each policy of the plan needs. Also returns the outcomes of the runs with the
    traffic as it is.

    The number of engines doubles until it suffices. Bisection then finds the smallest number that suffices.
    Both assume that p99 falls as engines are added, and rises with the traffic.
    """
    tried: dict[str, dict[int, float]] = {policy: {} for policy in plan.policies}
    outcomes = _search(plan, target, trace, run_all, tried)
    with_margin = {
        policy: {engines: p99_s for engines, p99_s in p99s.items() if p99_s > target.p99_s}
        for policy, p99s in tried.items()
    }
    _search(replace(plan, speedup=plan.speedup * (1 + target.margin)), target, trace, run_all, with_margin)
    needs = [_need(policy, p99s, with_margin[policy], target) for policy, p99s in tried.items()]
    return [replace(need, runs=len(plan.seeds)) for need in needs], outcomes


def _search(
    plan: ReplayPlan,
    target: P99Target,
    trace: Trace,
    run_all: Callable[[Sequence[ReplayRun]], Sequence[RunResult]],
    tried: dict[str, dict[int, float]],
) -> list[RunResult]:
    """Searches on from the p99 of what was `tried`, and adds to it. Returns the outcomes of the runs."""
    outcomes = list[RunResult]()
    while wanted := {name: n for name, p99s in tried.items() if (n := next_count(p99s, target)) is not None}:
        done = run_all([run for name, engines in wanted.items() for run in plan.seeded(trace, name, engines)])
        outcomes += done
        for outcome in done:
            p99s, engines = tried[outcome.run.policy], outcome.run.engines
            p99s[engines] = max(p99s.get(engines, 0.0), outcome.ttft_s(P99) or 0.0)
    return outcomes


def next_count(p99s: Mapping[int, float], target: P99Target) -> int | None:
    """The number of engines to try after these, by their p99; None where the search is over."""
    enough = _enough(p99s, target)
    if enough is None:
        most = max(p99s, default=0)
        return None if most == target.max_engines else min(max(2 * most, 1), target.max_engines)
    too_few = max((engines for engines in p99s if engines < enough), default=0)
    return None if enough - too_few == 1 else (enough + too_few) // 2


def _need(
    policy: str, p99s: Mapping[int, float], with_margin: Mapping[int, float], target: P99Target
) -> Need:
    """The need, by the p99 of the numbers tried, with the traffic as it is and with the margin."""
    enough, planned = _enough(p99s, target), _enough(with_margin, target)
    if enough is None:
        return Need(policy, target, None, p99s[target.max_engines])
    planned_p99_s = with_margin[planned or target.max_engines]
    return Need(policy, target, enough, p99s[enough], p99s.get(enough - 1), planned, planned_p99_s)


def _enough(p99s: Mapping[int, float], target: P99Target) -> int | None:
    """The fewest engines tried that keep the target."""
    return min((engines for engines, p99_s in p99s.items() if p99_s <= target.p99_s), default=None)


def _engines(count: int) -> str:
    return f"{_counted(count)} {'is' if count == 1 else 'are'}"


def _counted(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines} engines"
