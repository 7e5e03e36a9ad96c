"""Compares replay's times with the recorded ones, on as many engines as were recorded."""

from __future__ import annotations

from collections.abc import Callable

from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun, RunResult, quantile_of
from proxy.replay.trace import Trace

# A recording is compared if at least this share of its requests has a measured time: the others may differ.
MIN_MEASURED = 0.9
# A difference of the p99 that is worth a warning.
FAR_OFF = 0.2
_P99 = 0.99


def check(trace: Trace, model: EngineModel, run: Callable[[ReplayRun], RunResult]) -> tuple[str, bool] | None:
    """A sentence about the p99 that replay predicts for the recorded engines and the one that was measured,
    and whether they are far apart. None if the trace has no measured times."""
    measured = sorted(request.ttft_s for request in trace.requests if request.ttft_s is not None)
    if not trace.engines or len(measured) < MIN_MEASURED * len(trace.requests):
        return None
    predicted_s = run(ReplayRun("kvpin", trace.engines, model)).ttft_s(_P99) or 0.0
    measured_s = quantile_of(measured, _P99)
    engines = f"{trace.engines} recorded engine{'s' * (trace.engines > 1)}"
    said = (
        f"on the {engines}, replay predicts a p99 TTFT of {predicted_s:.3g} s; measured: {measured_s:.3g} s"
    )
    if abs(predicted_s - measured_s) <= FAR_OFF * measured_s:
        return f"checked: {said}", False
    other = "fifo" if model.chunked else "chunked"
    return f"DOES NOT FIT: {said}: do not rely on the times here; try --model {other}", True
