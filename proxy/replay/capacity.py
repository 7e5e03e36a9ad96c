"""Finds the number of engines that a policy needs to keep a p99 time to first token.

The number of engines doubles until it suffices. Bisection then finds the smallest number that suffices. Both
assume that p99 falls as engines are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.replay.plan import P99Target, ReplayPlan
from proxy.replay.simulator import ReplayRun, RunResult
from proxy.replay.trace import Trace

P99 = 0.99


@dataclass(frozen=True, slots=True)
class Need:
    """The engines that one policy needs.

    Attributes:
        engines: the fewest that keep it; None if the allowed maximum does not.
        p99_s: p99 with `engines`, or with the allowed maximum; of several seeds the worst.
        p99_s_with_one_less: the same with one engine less; None if one engine is enough.
    """

    policy: str
    target: P99Target
    engines: int | None
    p99_s: float
    p99_s_with_one_less: float | None = None

    def __str__(self) -> str:
        goal = f"a p99 TTFT of {self.target.p99_s:g} s"
        if self.engines is None:
            return (
                f"{self.policy}: {_engines(self.target.max_engines)} not enough for {goal}: it is "
                f"{self.p99_s:.3g} s; allow more with --max-engines, or use faster engines"
            )
        less = ""
        if self.p99_s_with_one_less is not None:
            less = f", and {self.p99_s_with_one_less:.3g} s with {self.engines - 1}"
        return f"{self.policy}: {_engines(self.engines)} enough for {goal}: it is {self.p99_s:.3g} s{less}"

    def as_data(self) -> dict[str, str | float | None]:
        """The need as a JSON object."""
        return {
            "policy": self.policy,
            "target_p99_s": self.target.p99_s,
            "max_engines": self.target.max_engines,
            "engines": self.engines,
            "p99_ttft_s": self.p99_s,
            "p99_ttft_s_with_one_less": self.p99_s_with_one_less,
        }


def search(
    plan: ReplayPlan,
    target: P99Target,
    trace: Trace,
    run_all: Callable[[Sequence[ReplayRun]], Sequence[RunResult]],
) -> tuple[list[Need], list[RunResult]]:
    """Finds how many engines each policy of the plan needs. Also returns the outcomes of all runs."""
    outcomes = list[RunResult]()
    tried: dict[str, dict[int, float]] = {policy: {} for policy in plan.policies}
    while wanted := _wanted(tried, target):
        done = run_all([run for policy, engines in wanted for run in plan.seeded(trace, policy, engines)])
        outcomes += done
        for outcome in done:
            p99s, engines = tried[outcome.run.policy], outcome.run.engines
            p99s[engines] = max(p99s.get(engines, 0.0), outcome.ttft_s(P99) or 0.0)
    return [_need(policy, p99s, target) for policy, p99s in tried.items()], outcomes


def _wanted(tried: Mapping[str, Mapping[int, float]], target: P99Target) -> list[tuple[str, int]]:
    """The number of engines to try next, for each policy whose need is not known."""
    following = ((policy, next_count(p99s, target)) for policy, p99s in tried.items())
    return [(policy, engines) for policy, engines in following if engines is not None]


def next_count(p99s: Mapping[int, float], target: P99Target) -> int | None:
    """The number of engines to try after these, by their p99; None where the search is over."""
    enough = _enough(p99s, target)
    if enough is None:
        most = max(p99s, default=0)
        return None if most == target.max_engines else min(max(2 * most, 1), target.max_engines)
    too_few = max((engines for engines in p99s if engines < enough), default=0)
    return None if enough - too_few == 1 else (enough + too_few) // 2


def _need(policy: str, p99s: Mapping[int, float], target: P99Target) -> Need:
    enough = _enough(p99s, target)
    if enough is None:
        return Need(policy, target, None, p99s[target.max_engines])
    return Need(policy, target, enough, p99s[enough], p99s.get(enough - 1))


def _enough(p99s: Mapping[int, float], target: P99Target) -> int | None:
    """The fewest engines tried that keep the target."""
    return min((engines for engines, p99_s in p99s.items() if p99_s <= target.p99_s), default=None)


def _engines(count: int) -> str:
    return "1 engine is" if count == 1 else f"{count} engines are"
