"""What is to be run on a trace, and what a reader of the results has to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxy.replay.arrivals import speedup_for_load
from proxy.replay.engine import EngineModel
from proxy.replay.simulator import Outcome, Run
from proxy.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Target:
    """What engines have to keep: a p99 time to first token, with `max_engines` of them at most."""

    p99_s: float
    max_engines: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every policy, with every seed, on every number of engines.

    Attributes:
        model: what each engine can do.
        engines: numbers of them.
        policies: names.
        seeds: 0 for arrivals as recorded.
        load: what the engines' compute is used for, if they computed all prompts in full; None for arrivals
            as recorded, or at `speedup`.
        speedup: how much faster than recorded requests arrive.
        target: with it the number of engines is searched for; `engines` is empty.
    """

    model: EngineModel
    engines: Sequence[int]
    policies: Sequence[str]
    seeds: Sequence[int] = (0,)
    load: float | None = None
    speedup: float = 1.0
    target: Target | None = None

    def runs(self, trace: Trace) -> list[Run]:
        """All of it.

        Raises:
            ValueError: when no such load can be made of the trace.
        """
        return [
            Run(policy, engines, self.model, self._speedup(trace, engines), seed)
            for engines in self.engines
            for seed in self.seeds
            for policy in self.policies
        ]

    def seeded(self, trace: Trace, policy: str, engines: int) -> list[Run]:
        """One policy on so many engines, with every seed."""
        speedup = self._speedup(trace, engines)
        return [Run(policy, engines, self.model, speedup, seed) for seed in self.seeds]

    def _speedup(self, trace: Trace, engines: int) -> float:
        if self.load is None:
            return self.speedup
        return speedup_for_load(trace, self.model, engines, self.load)

    def settings(self, trace: Trace) -> dict[str, Any]:
        """As data."""
        return {
            "trace": trace.name,
            "requests": len(trace.requests),
            "prompt_tokens": trace.n_tokens,
            "tokens_per_block": trace.tokens_per_block,
            "load": self.load,
            "model": asdict(self.model),
        }

    def title(self, trace: Trace) -> str:
        """In a line."""
        pace = f"load {self.load:g}" if self.load is not None else f"{self.speedup:g}x as recorded"
        kind = "chunked prefill with decode" if self.model.chunked else "prefill alone"
        tiers = f"{self.model.gpu_tokens:,} tokens on the GPU"
        if self.model.host_tokens:
            tiers += f" and {self.model.host_tokens:,} in host memory"
        return f"{trace.name}: {len(trace.requests):,} requests, {pace}; each engine {tiers}, {kind}"


def notes(trace: Trace, outcomes: Sequence[Outcome]) -> list[str]:
    """What the figures do not say themselves."""
    told = []
    too_long = outcomes[0].too_long
    if too_long:
        told.append(f"{too_long:,} requests are longer than an engine has room for, and were left out")
    if trace.failed:
        told.append(f"{trace.failed:,} requests were answered with an error, and were left out")
    if trace.cut:
        told.append("the last line of the trace breaks off, and was passed over")
    if trace.rechained:
        told.append(
            "an id of the trace stands for a block alone, not for all before it: blocks were chained here"
        )
    by_affinity = {"sticky", "chwbl"} & {outcome.run.policy for outcome in outcomes}
    if by_affinity and not trace.has_sessions:
        told.append(
            f"the trace names no sessions: for {' and '.join(sorted(by_affinity))}, the first block that not "
            "all requests share stands for one"
        )
    return told
