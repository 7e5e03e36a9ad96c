"""Many runs of one trace, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from proxy.replay.simulator import Outcome, Run, simulate
from proxy.replay.trace import Trace

_traces: list[Trace] = []  # a worker's own copy, so that each worker gets it once


def run_all(
    trace: Trace, runs: Sequence[Run], *, jobs: int = 1, progress: Callable[[int], None] | None = None
) -> list[Outcome]:
    """The outcomes, in the order of the runs. `progress` is called with the number of requests served since
    its last call.

    Raises:
        ValueError: no request of the trace fits an engine.
    """
    tell = progress or _nobody
    if jobs == 1 or len(runs) == 1:
        return [simulate(trace, run, tell) for run in runs]
    # Not forked: forked processes would inherit the threads of a progress bar.
    with ProcessPoolExecutor(
        min(jobs, len(runs)), get_context("spawn"), initializer=_take, initargs=(trace,)
    ) as pool:
        futures = [pool.submit(_run, run) for run in runs]
        for _ in as_completed(futures):
            tell(len(trace.requests))
        return [future.result() for future in futures]


def _take(trace: Trace) -> None:
    _traces.append(trace)


def _run(run: Run) -> Outcome:
    return simulate(_traces[0], run)


def _nobody(_requests: int) -> None:
    """Ignores progress."""
