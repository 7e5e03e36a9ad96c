"""Compares replay's times with the recorded ones, on as many engines as were recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.replay.arrivals import SEVERAL_SEEDS
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun, RunResult, quantile_of
from proxy.replay.trace import Trace

# A recording is compared if at least this share of its requests has a measured time: the others may differ.
MIN_MEASURED = 0.9
# A difference of the p99 from that of the nearest run that is worth a warning.
FAR_OFF = 0.2
_P99 = 0.99


def check(
    trace: Trace, model: EngineModel, run_all: Callable[[Sequence[ReplayRun]], Sequence[RunResult]]
) -> tuple[str, bool] | None:
    """A sentence about the p99 that replay predicts for the recorded engines and the one that was measured,
    and whether they are far apart. None if the trace has no measured times.

    The measured p99 is one draw, as that of each run is. So it is compared with the nearest one.
    """
    measured = sorted(request.ttft_s for request in trace.requests if request.ttft_s is not None)
    if not trace.engines or len(measured) < MIN_MEASURED * len(trace.requests):
        return None
    runs = [ReplayRun("kvpin", trace.engines, model, seed=seed) for seed in SEVERAL_SEEDS]
    predicted = sorted(result.ttft_s(_P99) or 0.0 for result in run_all(runs))
    measured_s = quantile_of(measured, _P99)
    ends = dict.fromkeys(f"{predicted[at]:.3g}" for at in (0, -1))
    engines = f"{trace.engines} recorded engine{'s' * (trace.engines > 1)}"
    said = (
        f"on the {engines}, replay predicts a p99 TTFT of {' to '.join(ends)} s in {len(predicted)} runs; "
        f"measured: {measured_s:.3g} s"
    )
    if min(abs(each - measured_s) for each in predicted) <= FAR_OFF * measured_s:
        return f"checked: {said}", False
    other = "fifo" if model.chunked else "chunked"
    return f"DOES NOT FIT: {said}: do not rely on the times here; try --model {other}", True
