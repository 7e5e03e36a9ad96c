"""When requests arrive: as recorded, faster or slower, or scaled to a given load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from random import Random

from proxy.core.index.blocks import BlockHash
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.trace import Trace, TraceRequest

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
        times = _in_turn(trace, times)
    order = sorted(range(len(times)), key=times.__getitem__)
    return [(times[at], trace.requests[at]) for at in order]


def _in_turn(trace: Trace, times: list[float]) -> list[float]:
    """The times, sorted within each conversation."""
    turns = defaultdict[Hashable, list[int]](list)
    for at, conversation in enumerate(_conversations(trace)):
        turns[conversation].append(at)
    times = list(times)
    for own in turns.values():
        for at, time in zip(own, sorted(times[at] for at in own), strict=True):
            times[at] = time
    return times


def _conversations(trace: Trace) -> Iterator[Hashable]:
    """Yields the conversation of each request: its session, or else that of the earlier request that it
    continues, whose last block it contains. Blocks that all requests share do not count."""
    ends: dict[BlockHash, int] = {}
    for at, request in enumerate(trace.requests):
        if request.session is not None:
            yield request.session
            continue
        own = request.chain.hashes[trace.common_blocks :]
        conversation = next((ends[block] for block in reversed(own) if block in ends), at)
        if own:
            ends[own[-1]] = conversation
        yield conversation
