"""Which runs a replay consists of, and the notes that its results need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxy.replay.arrivals import speedup_for_load
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun, RunResult
from proxy.replay.trace import Trace

# Where neither the options nor the trace say how many.
ENGINES = 4


@dataclass(frozen=True, slots=True)
class P99Target:
    """The target that engines have to keep: a p99 time to first token, with at most `max_engines` engines."""

    p99_s: float
    max_engines: int


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Every policy, with every seed, on every number of engines of every size.

    Attributes:
        models: what each engine of a run can do; they differ in GPU tokens alone.
        engines: numbers of them; empty for as many as the trace names, or else `ENGINES`.
        seeds: 0 for arrivals as recorded.
        load: share of the time that engines would be busy if nothing were cached; None for arrivals as
            recorded, or at `speedup`.
        target: with it the number of engines is searched for.
    """

    models: Sequence[EngineModel]
    engines: Sequence[int]
    policies: Sequence[str]
    seeds: Sequence[int] = (0,)
    load: float | None = None
    speedup: float = 1.0
    target: P99Target | None = None

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
        if self.load is None:
            return self.speedup
        return speedup_for_load(trace, model, engines, self.load)

    def settings(self, trace: Trace) -> dict[str, Any]:
        """The settings, for JSON."""
        return {
            "trace": trace.name,
            "requests": len(trace.requests),
            "prompt_tokens": trace.n_tokens,
            "tokens_per_block": trace.tokens_per_block,
            "load": self.load,
            "models": [asdict(model) for model in self.models],
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


def notes(trace: Trace, outcomes: Sequence[RunResult]) -> list[str]:
    """Notes on what was left out or assumed, one sentence each."""
    left_out = {outcome.run.model.gpu_tokens: outcome.too_long for outcome in outcomes}
    noted = [
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
