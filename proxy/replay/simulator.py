"""One run: a trace, when its requests arrive, engines and a policy on a virtual clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, inf
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from random import Random

from proxy.core.index.blocks import reusable_tokens
from proxy.replay.policy import Policy, SimFleet
from proxy.replay.rules import ORACLE, POLICIES
from proxy.replay.simulated_engine import EngineModel, Listener, SimEngine
from proxy.replay.trace import Trace, TraceRequest, predecessors

# --- when requests arrive: as recorded, faster or slower, or scaled to a given load ---------------------

# Seeds other than 0 move each arrival by up to this. It is less than the turns of people vary, and changes
# which requests meet in a queue.
JITTER_S = 2.0
# A p99 is that of a few requests, and which of these meet in a queue is chance: one run is one draw.
SEVERAL_SEEDS = (0, 1, 2, 3, 4)
# 30 years. Within that, a float resolves microseconds.
MAX_DURATION_S = 1e9


def fitting(trace: Trace, model: EngineModel) -> list[TraceRequest]:
    """The requests that fit into an engine. Raises ValueError if there is none."""
    fit = [request for request in trace.requests if model.fits(request)]
    if not fit:
        raise ValueError("no request of the trace fits an engine: give it more GPU tokens")
    return fit


def speedup_for_load(trace: Trace, model: EngineModel, engines: int, load: float) -> float:
    """Factor by which the trace must arrive faster so that `engines` engines would be busy for `load` of the
    time if nothing were cached. Raises ValueError if the whole trace arrives at once, or no request fits."""
    requests = fitting(trace, model)
    duration = requests[-1].at - requests[0].at
    if duration <= 0:
        raise ValueError("all requests arrive at once: such a trace cannot be scaled to a load")
    work_s = sum(model.prefill_s(0, request.n_tokens) for request in requests)
    return load * duration * engines / work_s


def arrivals(trace: Trace, speedup: float, seed: int) -> list[tuple[float, TraceRequest]]:
    """Requests with their arrival times in seconds, in order. With seed 0 the first arrives at 0.

    Seed 0 is the trace as recorded. Other seeds move arrivals at random and keep the turns of a conversation
    in order. Raises ValueError if at this pace they would arrive over more than MAX_DURATION_S."""
    start = trace.requests[0].at
    times = [(request.at - start) / speedup for request in trace.requests]
    if not times[-1] <= MAX_DURATION_S:
        raise ValueError(
            f"at {speedup:g} times the pace of the trace its requests arrive over more than 30 years: "
            "raise --speedup"
        )
    if seed:
        random = Random(seed)  # noqa: S311 - a simulation
        times = [max(time + random.uniform(-JITTER_S, JITTER_S), 0.0) for time in times]
        _sort_turns(trace, times)
    order = sorted(range(len(times)), key=times.__getitem__)
    return [(times[at], trace.requests[at]) for at in order]


def _sort_turns(trace: Trace, times: list[float]) -> None:
    """Sorts the times within each conversation."""
    turns, first_of = defaultdict[int, list[int]](list), list[int]()
    for at, before in enumerate(predecessors(trace.requests, trace.common_blocks)):
        first_of.append(at if before is None else first_of[before])
        turns[first_of[at]].append(at)
    for own in turns.values():
        for at, time in zip(own, sorted(times[at] for at in own), strict=True):
            times[at] = time


# --- one run: a trace, engines and a policy on a virtual clock ------------------------------------------


def oracle_hits(requests: Sequence[TraceRequest], engines: int, model: EngineModel) -> int:
    """Cached tokens of the requests, in this order, in an LRU cache with the room of all engines."""
    size = requests[0].chain.tokens_per_block
    whole = replace(model, gpu_tokens=model.gpu_tokens + model.host_tokens, host_tokens=0)
    cache, hits = whole.cache(size, engines), 0
    for request in requests:
        hashes = request.chain.hashes
        taken = cache.take(request.chain, len(hashes))
        if taken is not None:  # which it is: what fits one engine fits all of them
            hits += min(taken.gpu * size, reusable_tokens(request.n_tokens, size))
            cache.fill(hashes, taken.gpu)
            cache.release(hashes, len(hashes))
    return hits


# Requests between two reports of progress.
REPORT_EVERY = 256
_ROUNDING = 1e-9  # 0.99 of 100 is 99


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """A run to simulate. `speedup`: how much faster than recorded requests arrive. `seed`: 0 for arrivals as
    recorded."""

    policy: str
    engines: int
    model: EngineModel
    speedup: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of one run. Times in seconds, of all served requests.

    Attributes:
        too_long: requests that fit into no engine; they were left out.
        ttfts: times to the first token, sorted; empty for the oracle.
        computed: prompt tokens that each engine computed.
        predicted: requests whose cached tokens the policy predicted.
        exact: requests where the prediction was right.
        off_tokens: mean error of the predictions, in tokens.
    """

    run: ReplayRun
    requests: int
    too_long: int
    prompt_tokens: int
    gpu_hits: int
    host_hits: int
    ttfts: Sequence[float] = ()
    computed: Sequence[int] = ()
    evicted: int = 0
    predicted: int = 0
    exact: int = 0
    off_tokens: float = 0.0

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that were cached."""
        return (self.gpu_hits + self.host_hits) / self.prompt_tokens

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to first token; None if no times were simulated."""
        return sum(self.ttfts) / len(self.ttfts) if self.ttfts else None

    def ttft_s(self, quantile: float) -> float | None:
        """The time to first token that this share of the requests did not exceed; None if none were
        simulated."""
        return quantile_of(self.ttfts, quantile) if self.ttfts else None

    @property
    def imbalance(self) -> float | None:
        """The busiest engine's work over the mean; None if no work was simulated."""
        total = sum(self.computed)
        return max(self.computed) * len(self.computed) / total if total else None

    @property
    def exact_share(self) -> float | None:
        """Share of the predictions that were right; None for a policy that makes none."""
        return self.exact / self.predicted if self.predicted else None


def quantile_of(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed. There must be one."""
    return ordered[max(ceil(share * len(ordered) - _ROUNDING) - 1, 0)]


def simulate(trace: Trace, run: ReplayRun, progress: Callable[[int], None] = lambda _: None) -> RunResult:
    """The outcome of a run; the same run always has the same outcome. `progress` is called with the number of
    requests placed since its last call.

    Raises ValueError if no request of the trace fits an engine, or they would arrive over too long a time;
    RuntimeError if the engines ended without having served all requests."""
    served = fitting(trace, run.model)
    too_long = len(trace.requests) - len(served)
    prompt_tokens = sum(request.n_tokens for request in served)
    timed = arrivals(trace, run.speedup, run.seed)
    timed = [each for each in timed if run.model.fits(each[1])] if too_long else timed
    if run.policy == ORACLE:
        hits = oracle_hits([request for _, request in timed], run.engines, run.model)
        progress(len(timed))
        return RunResult(run, len(served), too_long, prompt_tokens, hits, 0)
    fleet = SimFleet(run.engines, run.model, trace.tokens_per_block, trace.common_blocks)
    simulation = Simulation(fleet, POLICIES[run.policy](fleet, run.seed))
    simulation.play(timed, progress)
    outcome = simulation.outcome(run, too_long, prompt_tokens)
    if outcome.requests != len(timed):
        raise RuntimeError(f"{run.policy}: of {len(timed)} requests {outcome.requests} were served")
    return outcome


class Simulation(Listener):
    """The event loop, which also collects what the engines report. `ttfts`: request → seconds to its first
    token."""

    def __init__(self, fleet: SimFleet, policy: Policy) -> None:
        self._policy = policy
        # Ends of answers and KV events reach the policy at once.
        self.finished = policy.finished  # type: ignore[method-assign]
        self.stored, self.removed = policy.stored, policy.removed  # type: ignore[method-assign]
        self._engines = [
            SimEngine(at, fleet.model, fleet.tokens_per_block, self) for at in range(fleet.engines)
        ]
        self._arrived: dict[int, tuple[float, int | None]] = {}  # request → when, prediction
        self.ttfts: dict[int, float] = {}
        self._gpu_hits = self._host_hits = 0
        self._predicted = self._exact = self._off = 0

    def play(self, timed: Sequence[tuple[float, TraceRequest]], progress: Callable[[int], None]) -> None:
        """Plays all requests, to the last token of the last one."""
        engines, agenda = self._engines, list[tuple[float, int]]()
        for count, (now, request) in enumerate(timed, 1):
            self._until(now, agenda)
            choice = self._policy.choose(now, request, engines)
            self._arrived[request.id] = now, choice.predicted_tokens
            engine = engines[choice.engine]
            before = engine.due
            engine.submit(now, request)
            if engine.due != before:
                heappush(agenda, (engine.due, choice.engine))
            if count % REPORT_EVERY == 0:
                progress(REPORT_EVERY)
        self._until(inf, agenda)
        progress(len(timed) % REPORT_EVERY)

    def _until(self, now: float, agenda: list[tuple[float, int]]) -> None:
        """Runs what is due by `now`. Skips entries that are out of date."""
        engines = self._engines
        while agenda and agenda[0][0] <= now:
            due, at = heappop(agenda)
            engine = engines[at]
            if engine.due != due:
                continue
            engine.advance(due)
            if engine.due < inf:
                heappush(agenda, (engine.due, at))

    def outcome(self, run: ReplayRun, too_long: int, prompt_tokens: int) -> RunResult:
        """The outcome."""
        return RunResult(
            run=run,
            requests=len(self.ttfts),
            too_long=too_long,
            prompt_tokens=prompt_tokens,
            gpu_hits=self._gpu_hits,
            host_hits=self._host_hits,
            ttfts=sorted(self.ttfts.values()),
            computed=[engine.computed for engine in self._engines],
            evicted=sum(engine.evicted for engine in self._engines),
            predicted=self._predicted,
            exact=self._exact,
            off_tokens=self._off / self._predicted if self._predicted else 0.0,
        )

    # --- called by the engines ----------------------------------------------------------------------

    def started(self, now: float, engine: int, request: TraceRequest, gpu: int, host: int) -> None:
        """Counts its cached tokens."""
        self._gpu_hits += gpu
        self._host_hits += host
        predicted = self._arrived[request.id][1]
        if predicted is not None:
            self._predicted += 1
            self._exact += predicted == gpu + host
            self._off += abs(predicted - gpu - host)

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Notes its time to first token."""
        self.ttfts[request.id] = now - self._arrived.pop(request.id)[0]
        self._policy.first_token(now, engine, request)


# Seconds between looks at what the processes have done.
_LOOK_S = 0.2
# What a process got when it started: the trace, and the number of requests that all of them have served.
_given: list[tuple[Trace, Synchronized[int]]] = []


def run_all(
    trace: Trace,
    runs: Sequence[ReplayRun],
    *,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> list[RunResult]:
    """The outcomes, in the order of the runs. `progress` is called with the number of requests served since
    its last call. Raises ValueError if no request of the trace fits an engine."""
    if jobs == 1 or len(runs) == 1:
        return [simulate(trace, run, progress) for run in runs]
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
            progress(now - told)
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
