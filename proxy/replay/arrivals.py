"""When requests arrive: as recorded, faster or slower, or so that they make a given load."""

from __future__ import annotations

from collections import defaultdict
from random import Random

from proxy.replay.engine import EngineModel
from proxy.replay.trace import Request, Trace

# Seeds other than 0 move each arrival by up to so much. It is less than people's own turns vary by, and
# changes who meets whom in a queue.
JITTER_S = 2.0


def speedup_for_load(trace: Trace, model: EngineModel, engines: int, load: float) -> float:
    """How much faster the trace has to arrive for so many engines to be busy for `load` of its time if they
    computed all prompts in full. Infinite for a trace that arrives all at once is not: it cannot be scaled.

    Raises:
        ValueError: for a trace that arrives all at once.
    """
    duration = trace.requests[-1].at - trace.requests[0].at
    if duration <= 0:
        raise ValueError("all requests arrive at once, which makes no load that could be scaled")
    work_s = sum(model.prefill_s(0, request.n_tokens) for request in trace.requests)
    return load * duration * engines / work_s


def arrivals(trace: Trace, speedup: float, seed: int) -> list[tuple[float, Request]]:
    """Requests with the seconds at which they arrive, in order. The first does at 0, for seed 0.

    Seed 0 is the trace as it is. Others move arrivals at random; the turns of a session stay in order.
    """
    start = trace.requests[0].at
    times = [(request.at - start) / speedup for request in trace.requests]
    if seed:
        random = Random(seed)  # noqa: S311 - a simulation
        times = [max(time + random.uniform(-JITTER_S, JITTER_S), 0.0) for time in times]
        times = _in_turn(trace.requests, times)
    order = sorted(range(len(times)), key=times.__getitem__)
    return [(times[at], trace.requests[at]) for at in order]


def _in_turn(requests: tuple[Request, ...], times: list[float]) -> list[float]:
    """The same times, those of each session in the order of its turns."""
    turns = defaultdict[str, list[int]](list)
    for at, request in enumerate(requests):
        if request.session is not None:
            turns[request.session].append(at)
    times = list(times)
    for session in turns.values():
        for at, time in zip(session, sorted(times[at] for at in session), strict=True):
            times[at] = time
    return times
