"""Placement: the choice of an engine, with its reasons.

    cost = queue + room + interference + (restore + prefill + lost) / (1 - utilisation) + later

in seconds; the lowest cost wins.

Queue, room, interference, restore and prefill are the request's own wait for its first token. `lost` is the
work that this placement causes by evicting KV that will be requested again. Work is divided by
1 - utilisation because it delays others: in a queue of utilisation ρ, each second of work delays later
requests by ρ / (1 - ρ) seconds in all. `later` is what the prompt's next turns, which come to the same
engine, will wait there for other prefills; it keeps conversations apart that share only their beginning.

Ties go to the engine that served the session before, then to the one with the most free cache, then to the
one that was chosen longest ago.

Without reuse, or if the prompt is not known, the engine with the fewest requests in flight wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from engine_adapter.hold import Forecast
from proxy.core.index.blocks import Chain, reusable_tokens
from proxy.core.index.prefix_index import Match
from proxy.core.placement.in_use import InUse
from proxy.core.placement.load import IDLE, LoadView, Work
from proxy.core.placement.rates import EngineRates
from proxy.core.placement.residents import Residents

# Costs that differ by less than this are equal: nobody notices a millisecond.
TIE_S = 0.001
# Regret is computed for this many engines at most, the cheapest first: one of them is cheap enough.
MAX_LOOKS = 16
# The match of an engine that holds none of a prompt.
NOTHING = Match()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """What is known of one engine when a request is placed.

    Attributes:
        engine: its id.
        tokens_per_block: its own block size in tokens, which bounds what it can reuse.
        rates: how fast it is.
        match: leading blocks of the chain it holds.
        load: its work in flight.
        room: pool blocks it can store before it evicts; None if unknown.
        free_blocks: how many of those are on its GPU; None if unknown.
        turn: number of the placement that last chose it, 0 for none.
        residents: the prompts it would evict; None if they are not known.
        on_gpu: the prompts that would move from its GPU to its host tier; None if it has no host tier.
        forecast: its adapter's own estimate, if that follows the engine's cache token by token. It replaces
            the estimate from `match` and the rates.
        complete: False if the engine may hold blocks that its events did not report.
        is_last: it served this session before.
        busy: share of its time that it computes prompts.
        in_use: GPU memory that requests in flight hold; None if its capacity is not known.
    """

    engine: str
    tokens_per_block: int
    rates: EngineRates
    match: Match = NOTHING
    load: LoadView = IDLE
    room: int | None = None
    free_blocks: int | None = None
    turn: int = 0
    residents: Residents | None = None
    on_gpu: Residents | None = None
    forecast: Forecast | None = None
    complete: bool = True
    is_last: bool = False
    busy: float = 0.0
    in_use: InUse | None = None


class Cost(msgspec.Struct, frozen=True, gc=False):
    """The cost of placing a request on one engine, term by term. Times in seconds.

    Attributes:
        engine: its id.
        queue_s: prefill in flight before this request.
        room_s: until the streams that hold the memory it needs have ended.
        restore_s: to bring KV back from lower tiers.
        prefill_s: to compute the rest.
        interference_s: what decoding streams add to the prefill.
        congestion_s: what later requests wait for it.
        later_s: what its own next turns will wait there for prompts of others.
        regret_s: cost of what it evicts and will be requested again. None if it was not computed, because the
            engine costs more than others without it.
        total_s: the sum.
        cached_tokens: prompt tokens the engine would reuse.
        host_tokens: how many of those are on its host tier.
        disk_tokens: how many are on its disk.
        pending_tokens: how many requests in flight have yet to leave.
        in_flight: requests it has.
        free_blocks: empty blocks on its GPU; None if unknown. This and the next two break ties.
        turn: number of the placement that last chose it, 0 for none.
        is_last: it served this session before.
    """

    engine: str
    queue_s: float = 0.0
    room_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    interference_s: float = 0.0
    congestion_s: float = 0.0
    later_s: float = 0.0
    regret_s: float | None = None
    total_s: float = 0.0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    pending_tokens: int = 0
    in_flight: int = 0
    free_blocks: int | None = None
    turn: int = 0
    is_last: bool = False

    @property
    def first_token_s(self) -> float:
        """Seconds the request itself waits for its first token."""
        return self.queue_s + self.room_s + self.restore_s + self.prefill_s + self.interference_s


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: the engine, the cached tokens it should report, and the cost of every candidate.

    Attributes:
        engine: the one chosen.
        predicted_tokens: cached tokens it should report.
        n_tokens: prompt tokens.
        costs: of every candidate.
        rule: what decided: "lowest cost" or "least loaded".
        firm: False if the prediction counts blocks that requests in flight have yet to leave, or the engine
            may hold more than is known.
        gpu_tokens: predicted tokens that lie on the GPU.
        strain: how many times a second of prefill counted, see `Outlook`.
    """

    engine: str
    predicted_tokens: int
    n_tokens: int
    costs: tuple[Cost, ...]
    rule: str
    firm: bool = True
    gpu_tokens: int = 0
    strain: float = 1.0

    @property
    def chosen(self) -> Cost:
        """The terms of the engine that was chosen."""
        return next(cost for cost in self.costs if cost.engine == self.engine)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens the engine has to compute."""
        return self.n_tokens - self.predicted_tokens

    @property
    def work(self) -> Work:
        """The engine's work before the first token."""
        chosen = self.chosen
        return Work(self.uncached_tokens, chosen.host_tokens, chosen.disk_tokens)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a placement costs other requests.

    Attributes:
        now: the time, in seconds of the caller's clock.
        strain: seconds that all requests wait for one second of prefill: 1 / (1 - utilisation).
        returns: seconds idle → probability that a prompt is requested again.
        turns: how many more times a prompt is requested, the present one included.
        rest_s: what is left of a prefill that a prompt finds running, on average.
        answer_s: from the first token of an answer to its last.
    """

    now: float
    strain: float
    returns: Callable[[float], float]
    turns: float = 1.0
    rest_s: float = 0.0
    answer_s: float = 0.0


# No other requests run, and no prompt comes back.
CALM = Outlook(0.0, 1.0, lambda _idle_s: 0.0)


def predict(chain: Chain, match: Match, tokens_per_block: int) -> int:
    """Cached tokens that an engine with that block size will report for the chain."""
    held, most = match.blocks * chain.tokens_per_block, reusable_tokens(chain.n_tokens, tokens_per_block)
    return held // tokens_per_block * tokens_per_block if held < most else most


def cost_of(candidate: Candidate, chain: Chain, outlook: Outlook = CALM) -> Cost:
    """The terms of the cost rule for one engine, without regret."""
    foreseen, load, rates = candidate.forecast, candidate.load, candidate.rates
    if foreseen is not None:
        return _foreseen(candidate, foreseen, outlook)
    cached = host = disk = pending = 0
    restore_s = 0.0
    match = candidate.match
    if match is not NOTHING:
        cached = predict(chain, match, candidate.tokens_per_block)
        if match.gpu != match.blocks:
            host = min(match.host * chain.tokens_per_block, cached)
            disk = min(match.disk * chain.tokens_per_block, cached - host)
            pending = min(match.pending * chain.tokens_per_block, cached - host - disk)
            restore_s = rates.restore_s(host, disk)
    queue_s, prefill_s = load.queue_s, rates.prefill_s(chain.n_tokens - cached)
    in_use = candidate.in_use
    room_s = in_use.wait_s(chain.hashes, outlook.answer_s) if in_use is not None and in_use.blocks else 0.0
    interference_s = prefill_s * rates.pool.interference * load.decoding
    congestion_s = (restore_s + prefill_s) * (outlook.strain - 1)
    later_s = (outlook.turns - 1) * candidate.busy * outlook.rest_s
    return Cost(
        candidate.engine,
        queue_s,
        room_s,
        restore_s,
        prefill_s,
        interference_s,
        congestion_s,
        later_s,
        None,
        queue_s + room_s + restore_s + prefill_s + interference_s + congestion_s + later_s,
        cached,
        host,
        disk,
        pending,
        load.in_flight,
        candidate.free_blocks,
        candidate.turn,
        candidate.is_last,
    )


def _foreseen(candidate: Candidate, forecast: Forecast, outlook: Outlook) -> Cost:
    congestion_s = (forecast.restore_s + forecast.prefill_s) * (outlook.strain - 1)
    later_s = (outlook.turns - 1) * candidate.busy * outlook.rest_s
    own_s = forecast.wait_s + forecast.restore_s + forecast.prefill_s + forecast.interference_s
    return Cost(
        engine=candidate.engine,
        queue_s=forecast.wait_s,
        restore_s=forecast.restore_s,
        prefill_s=forecast.prefill_s,
        interference_s=forecast.interference_s,
        congestion_s=congestion_s,
        later_s=later_s,
        total_s=own_s + congestion_s + later_s,
        cached_tokens=forecast.cached_tokens,
        in_flight=candidate.load.in_flight,
        free_blocks=candidate.free_blocks,
        turn=candidate.turn,
        is_last=candidate.is_last,
    )


def place(candidates: Sequence[Candidate], chain: Chain, outlook: Outlook = CALM) -> Placement:
    """The engine that costs least. `candidates` is not empty."""
    costs = [cost_of(candidate, chain, outlook) for candidate in candidates]
    order = [(cost.total_s, *_among_equals(cost, at)) for at, cost in enumerate(costs)]
    order.sort()
    least, looked_at = inf, list[int]()
    for total_s, *_, at in order[:MAX_LOOKS]:
        if total_s > least + TIE_S:
            break  # costs more, even without its regret
        costs[at] = _with_regret(costs[at], candidates[at], chain, outlook)
        least = min(least, costs[at].total_s)
        looked_at.append(at)
    best = min(
        (at for at in looked_at if costs[at].total_s <= least + TIE_S),
        key=lambda at: _among_equals(costs[at], at),
    )
    return Placement(
        engine=costs[best].engine,
        predicted_tokens=costs[best].cached_tokens,
        n_tokens=chain.n_tokens,
        costs=tuple(costs),
        rule="lowest cost",
        firm=_is_firm(candidates[best]),
        gpu_tokens=_on_gpu(candidates[best], costs[best], chain),
        strain=outlook.strain,
    )


def _among_equals(cost: Cost, at: int) -> tuple[bool, int, int, int]:
    """The order of engines whose costs are equal, best first."""
    return not cost.is_last, -(cost.free_blocks or 0), cost.turn, at


def _with_regret(cost: Cost, candidate: Candidate, chain: Chain, outlook: Outlook) -> Cost:
    regret_s = _regret_s(cost, candidate, chain, outlook)
    return msgspec.structs.replace(cost, regret_s=regret_s, total_s=cost.total_s + regret_s)


def _regret_s(cost: Cost, candidate: Candidate, chain: Chain, outlook: Outlook) -> float:
    """The cost of computing or restoring again what this placement evicts, if it is requested again."""
    if candidate.forecast is not None:
        return candidate.forecast.regret_s * outlook.strain
    residents, room = candidate.residents, candidate.room
    if residents is None or room is None:
        return 0.0
    size, rates, returns = chain.tokens_per_block, candidate.rates, outlook.returns
    lost = residents.lost(outlook.now, (chain.n_tokens - cost.cached_tokens) // size - room, returns)
    lost_s = rates.prefill_s(round(lost * size))
    if candidate.on_gpu is not None:
        # A block that leaves only the GPU is restored, not computed.
        in_need = (chain.n_tokens - cost.cached_tokens + cost.host_tokens) // size
        moved = candidate.on_gpu.lost(outlook.now, in_need - (candidate.free_blocks or 0), returns)
        lost_s += rates.restore_s(round(moved * size), 0)
    return lost_s * outlook.strain


def _on_gpu(candidate: Candidate, cost: Cost, chain: Chain) -> int:
    """Predicted tokens that lie on the GPU."""
    if candidate.forecast is not None:
        return cost.cached_tokens
    return predict(chain, Match(gpu=candidate.match.lead), candidate.tokens_per_block)


def _is_firm(candidate: Candidate) -> bool:
    if candidate.forecast is not None:
        return candidate.forecast.firm
    return candidate.complete and candidate.match.pending == 0


def place_least_loaded(candidates: Sequence[Candidate], n_tokens: int = 0) -> Placement:
    """The engine with the fewest requests in flight. Caches do not count.

    For requests whose prompt is not known (reuse off, audio). `candidates` is not empty.
    """
    costs = tuple(
        Cost(c.engine, in_flight=c.load.in_flight, turn=c.turn, is_last=c.is_last) for c in candidates
    )
    best = min(costs, key=lambda cost: (cost.in_flight, not cost.is_last, cost.turn))
    return Placement(best.engine, 0, n_tokens, costs, "least loaded")
