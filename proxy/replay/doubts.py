"""Why the runs of a trace cannot tell which policy is better."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.replay.policy_names import ORACLE
from proxy.replay.simulator import RunResult
from proxy.replay.trace import Trace

# With fewer requests, policies differ by a few percent by chance.
MIN_REQUESTS = 1000
# Engines that compute less of the time than this have no queues: every policy answers at once.
MIN_BUSY = 0.1


def doubts(trace: Trace, outcomes: Sequence[RunResult]) -> list[str]:
    """One sentence for each reason; none where fewer than two policies are compared."""
    simulated = [outcome for outcome in outcomes if outcome.run.policy != ORACLE]
    if len({outcome.run.policy for outcome in simulated}) < 2:  # noqa: PLR2004 - two are compared
        return []
    found = []
    requests = simulated[0].requests
    if requests < MIN_REQUESTS:
        found.append(
            f"too short to compare policies: {requests:,} requests, and differences of a few percent are "
            f"chance; use {MIN_REQUESTS:,} requests or more"
        )
    light = _light(trace, simulated)
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
