"""Many runs of one trace, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized

from proxy.replay.simulator import ReplayRun, RunResult, simulate
from proxy.replay.trace import Trace

# Seconds between looks at what the processes have done.
_LOOK_S = 0.2
# What a process got when it started: the trace, and the number of requests that all of them have served.
_given: list[tuple[Trace, Synchronized[int]]] = []


def run_all(
    trace: Trace, runs: Sequence[ReplayRun], *, jobs: int = 1, progress: Callable[[int], None] | None = None
) -> list[RunResult]:
    """The outcomes, in the order of the runs. `progress` is called with the number of requests served since
    its last call. Raises ValueError if no request of the trace fits an engine."""
    tell = progress or _nobody
    if jobs == 1 or len(runs) == 1:
        return [simulate(trace, run, tell) for run in runs]
    context = get_context("spawn")  # not forked: forked processes would inherit the threads of a progress bar
    served, told = context.Value("q"), 0
    with ProcessPoolExecutor(
        min(jobs, len(runs)), context, initializer=_take, initargs=(trace, served)
    ) as pool:
        futures = [pool.submit(_run, run) for run in runs]
        running = set(futures)
        while running:
            _, running = wait(running, _LOOK_S, FIRST_COMPLETED)
            now = served.value
            tell(now - told)
            told = now
        return [future.result() for future in futures]


def _take(trace: Trace, served: Synchronized[int]) -> None:
    _given.append((trace, served))


def _run(run: ReplayRun) -> RunResult:
    trace, served = _given[0]

    def count(requests: int) -> None:
        with served.get_lock():
            served.value += requests

    return simulate(trace, run, count)


def _nobody(_requests: int) -> None:
    """Ignores progress."""
