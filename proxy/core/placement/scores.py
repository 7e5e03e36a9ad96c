"""Placement: the choice of an engine, with its reasons.

    cost = queue + room + interference + (restore + prefill + lost + again) / (1 - utilisation) + later

in seconds; the lowest cost wins.

Queue, room, interference, restore and prefill are the request's own wait for its first token. `lost` is the
work that this placement causes by evicting KV that will be requested again. Work is divided by
1 - utilisation because it delays others: in a queue of utilisation ρ, each second of work delays later
requests by ρ / (1 - ρ) seconds in all. `later` is what the prompt's next turns, which come to the same
engine, will wait there for other prefills; it keeps conversations apart that share only their beginning.

`again` is for hybrid models. A window or a state is left where two prompts part only if the engine held the
first one's blocks when it computed the second one. So a beginning that an engine holds without its window
is completed there; on any other engine, the next prompt with it would compute it once more.

A burst with a new beginning has a price of its own (`spare_of`): on an idle engine, work delays nobody; where
requests wait, it delays those of the burst that are still to come.

Ties go to the engine that served the session before, then to the one with the most free cache, then to the
one that was chosen longest ago.

Without reuse, or if the prompt is not known, the engine with the fewest requests in flight wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from engine_adapter.hold import Forecast
from proxy.core.index.blocks import Chain, reusable_tokens
from proxy.core.index.match import Match
from proxy.core.placement.decision import CALM, NOTHING, Candidate, Cost, Outlook, Placement
from proxy.core.placement.load import LoadView
from proxy.core.placement.rates import EngineRates

TIE_S = 0.001  # costs that differ by less than this are equal: nobody notices a millisecond
# Regret is computed for this many engines at most, the cheapest first: one of them is cheap enough.
MAX_LOOKS = 16
# Probability that a third prompt comes with a beginning that two have. With 0.3 to 1, mean times to first
# token were about the same in `benchmarks/placement_sim.py` and on workload b of `benchmarks/routers.py`.
SHARED = 0.5
# A burst is expected to bring this many requests more for each one that waits. With 1, bursts of 200 within a
# second took up to 12% longer on 16 engines than placed by load alone (`benchmarks/placement_bursts.py`).
GROWTH = 2.0
# The terms of a `Cost` that an engine has alone, in the order of its fields: from `queue_s` to `again_s`.
OwnTerms = tuple[float, float, float, float, float, float, float, float, float]


def predict(chain: Chain, blocks: int, tokens_per_block: int) -> int:
    """Cached tokens that an engine with that block size will report, if it holds so many leading blocks of
    the chain."""
    held, most = blocks * chain.tokens_per_block, reusable_tokens(chain.n_tokens, tokens_per_block)
    return held // tokens_per_block * tokens_per_block if held < most else most


def reuse_of(
    held: Match | Forecast, size: int, rates: EngineRates, chain: Chain, outlook: Outlook, computes: bool
) -> Cost:
    """The part of a prompt that an engine reuses, and the time for the rest, if it `computes` that itself. It
    is a cost without load: `interference_s` and `stall_s` are those of one decoding stream. Engines of equal
    match, block size and pace share it. So it is not told which one it is of."""
    cached = host = disk = pending = 0
    restore_s = prefill_s = 0.0
    if not isinstance(held, Match):
        cached, restore_s, prefill_s = held.cached_tokens, held.restore_s, held.prefill_s
    elif held is not NOTHING:
        cached, common = predict(chain, held.blocks, size), chain.tokens_per_block
        host = min(held.host * common, cached)
        disk = min(held.disk * common, cached - host)
        pending = min(held.pending * common, cached - host - disk)
        restore_s = rates.restore_s(host, disk)
    if not computes:
        prefill_s = 0.0
    elif isinstance(held, Match):
        prefill_s = rates.prefill_s(chain.n_tokens - cached)
    return Cost(
        "",
        restore_s=restore_s,
        prefill_s=prefill_s,
        interference_s=prefill_s * rates.pool.interference,
        stall_s=prefill_s * outlook.stall,
        congestion_s=(restore_s + prefill_s) * (outlook.strain - 1),
        cached_tokens=cached,
        host_tokens=host,
        disk_tokens=disk,
        pending_tokens=pending,
    )


class Scores:
    """The cost of each candidate: the total at once, named terms when somebody asks for them. Values that may
    change later are noted at once. So the terms are those that the decision saw, however late somebody asks
    for them."""

    __slots__ = "_candidates", "_terms", "regrets", "reuses", "totals"

    def __init__(
        self, candidates: Sequence[Candidate], chain: Chain, outlook: Outlook, *, computes: bool = True
    ) -> None:
        """`computes`: False if another engine computes the prompt for the candidate."""
        reuses: list[Cost] = []
        terms: list[OwnTerms] = []
        shared: dict[object, Cost] = {}
        blocks, turns_s = len(chain.hashes), (outlook.turns - 1) * outlook.rest_s
        arrivals, spare = outlook.arrivals, outlook.spare
        cut = [each.match.of_full_attention for each in candidates if each.match.cut] if computes else []
        least = max([each.match.blocks for each in candidates]) if cut else 0
        again = partial(_again_s, max(cut), least, chain, outlook) if cut else None
        for candidate in candidates:
            foreseen, rates, size = candidate.forecast, candidate.rates, candidate.tokens_per_block
            held = candidate.match if foreseen is None else foreseen
            key = id(held), size, rates.pool, rates.pace
            reuse = shared.get(key)
            if reuse is None:
                reuse = shared[key] = reuse_of(held, size, rates, chain, outlook, computes)
            room_s = stall_s = again_s = 0.0
            if foreseen is not None:
                queue_s, slowed_s = foreseen.wait_s, foreseen.interference_s
            else:
                load, in_use = candidate.load, candidate.in_use
                queue_s, decoding = load.queue_s, load.decoding
                slowed_s, stall_s = reuse.interference_s * decoding, reuse.stall_s * decoding
                is_full = False
                if in_use is not None and in_use.blocks + blocks > in_use.capacity:
                    is_full, room_s = True, in_use.wait_s(chain.hashes, outlook.answer_s)
                if arrivals is not None:
                    stall_s += _waiting_s(reuse, load, arrivals(candidate.engine), is_full=is_full)
                elif spare and queue_s:
                    # All of this work delays each request that is expected to come to the engine with the
                    # rest of the burst, judging by those that wait there now.
                    followers = load.in_flight - load.decoding
                    stall_s += spare * ((reuse.restore_s + reuse.prefill_s) * followers * GROWTH)
                if again is not None:
                    again_s = again(candidate)
            terms.append((
                queue_s, room_s, reuse.restore_s, reuse.prefill_s, slowed_s, stall_s, reuse.congestion_s,
                turns_s * candidate.busy, again_s,
            ))  # fmt: skip
            reuses.append(reuse)
        self._candidates, self._terms, self.reuses = candidates, terms, reuses  # `reuses`: see `reuse_of`
        self.totals: list[float] = [*map(sum, terms)]  # total seconds of each candidate, without regret
        # Cost of evicted KV that will be requested again, by the position of the candidate that evicts it;
        # only for candidates for which it was computed.
        self.regrets: dict[int, float] = {}

    def within(self, limit_s: float) -> list[int]:
        """The candidates whose totals are at most `limit_s`, the lowest first."""
        totals = self.totals
        found = [at for at, total_s in enumerate(totals) if total_s <= limit_s]
        if len(found) > 1:
            found.sort(key=lambda at: (totals[at], self.among_equals(at)))
        return found

    def among_equals(self, at: int) -> tuple[bool, int, int, int]:
        """The order of candidates whose costs are equal, best first."""
        candidate = self._candidates[at]
        return not candidate.is_last, -(candidate.free_blocks or 0), candidate.turn, at

    def costs(self) -> tuple[Cost, ...]:
        """The cost of every candidate, in their order."""
        return tuple([self.cost(at) for at in range(len(self.totals))])

    def placement(self, at: int, chain: Chain, outlook: Outlook) -> Placement:
        """The decision for one candidate."""
        chosen, candidate = self.cost(at), self._candidates[at]
        foreseen, held, gpu_tokens = candidate.forecast, candidate.match, chosen.cached_tokens
        others = [*self.reuses[:at], *self.reuses[at + 1 :]]
        if foreseen is None:
            gpu_tokens = predict(chain, held.lead, candidate.tokens_per_block)
        return Placement(
            chosen=chosen,
            predicted_tokens=chosen.cached_tokens,
            n_tokens=chain.n_tokens,
            all_costs=self.costs,
            rule="lowest cost",
            elsewhere=max([each.cached_tokens for each in others]) if others else None,
            firm=candidate.complete and not held.pending if foreseen is None else foreseen.firm,
            gpu_tokens=gpu_tokens,
            strain=outlook.strain,
            cut_tokens=held.cut * chain.tokens_per_block,
            lacks=held.lacks,
        )

    def cost(self, at: int) -> Cost:
        """The terms of one candidate."""
        candidate, reuse = self._candidates[at], self.reuses[at]
        return replace(
            Cost(candidate.engine, *self._terms[at]),
            regret_s=self.regrets.get(at),
            cached_tokens=reuse.cached_tokens,
            host_tokens=reuse.host_tokens,
            disk_tokens=reuse.disk_tokens,
            pending_tokens=reuse.pending_tokens,
            in_flight=candidate.load.in_flight,
            free_blocks=candidate.free_blocks,
            turn=candidate.turn,
            is_last=candidate.is_last,
        )


def _again_s(parted: int, least: int, chain: Chain, outlook: Outlook, each: Candidate) -> float:
    """See `Cost.again_s`. `parted`: where the prompt parts from others, in blocks; an engine whose full
    attention holds less of it will leave no window or state there. What any engine can reuse, `least` blocks,
    need not be computed again."""
    lacking = parted - max(each.match.of_full_attention, least)
    again_s = each.rates.prefill_s(lacking * chain.tokens_per_block) if lacking > 0 else 0.0
    return SHARED * outlook.strain * again_s


def _waiting_s(reuse: Cost, load: LoadView, per_s: float, *, is_full: bool) -> float:
    """What a prefill costs the requests that wait for its engine. Those that come while it runs, `per_s` a
    second, wait for half of it on average. Where memory `is_full`, requests wait until streams end. These
    wait for all of it, as the streams stand still meanwhile."""
    work_s = reuse.restore_s + reuse.prefill_s
    for_memory = load.in_flight - load.decoding if is_full else 0
    return work_s * work_s / 2 * per_s + reuse.prefill_s * for_memory


def spare_of(candidates: Sequence[Candidate], chain: Chain) -> float:
    """How far an engine is idle while requests in flight compute this prompt's beginning, 0 to 1. 1 if one
    has no queue: work there delays nobody. 0 if the least busy one is busy for as long as that beginning
    takes, or if no request computes it: then work is worth what it is on average."""
    pending = max([each.match.pending for each in candidates])
    if not pending:
        return 0.0
    idle_in_s = min([each.load.queue_s for each in candidates])
    pending_s = candidates[0].rates.pool.prefill_s(pending * chain.tokens_per_block)
    return 1 - idle_in_s / pending_s if idle_in_s < pending_s else 0.0


def place(candidates: Sequence[Candidate], chain: Chain, outlook: Outlook = CALM) -> Placement:
    """The engine that costs least. `candidates` is not empty."""
    return choose(candidates, Scores(candidates, chain, outlook), chain, outlook)


def choose(candidates: Sequence[Candidate], scores: Scores, chain: Chain, outlook: Outlook) -> Placement:
    """The candidate that costs least, by these scores and with regret."""
    totals, regrets = scores.totals, scores.regrets
    lowest = min(totals)
    first = totals.index(lowest) if totals.count(lowest) == 1 else scores.within(lowest)[0]
    regrets[first] = regret_of(candidates[first], scores.reuses[first], chain, outlook)
    least = totals[first] + regrets[first]
    if len(totals) > 1:
        for at in scores.within(least + TIE_S)[1:MAX_LOOKS]:
            if totals[at] > least + TIE_S:
                break  # costs more, even without its regret
            regrets[at] = regret_of(candidates[at], scores.reuses[at], chain, outlook)
            least = min(least, totals[at] + regrets[at])
    if len(regrets) > 1:
        equal = [at for at, regret_s in regrets.items() if totals[at] + regret_s <= least + TIE_S]
        first = min(equal, key=scores.among_equals)
    return scores.placement(first, chain, outlook)


def regret_of(candidate: Candidate, reuse: Cost, chain: Chain, outlook: Outlook) -> float:
    """The cost of computing or restoring again what this placement evicts, if it is requested again."""
    if candidate.forecast is not None:
        return candidate.forecast.regret_s * outlook.strain
    residents, room = candidate.residents, candidate.room
    if residents is None or room is None:
        return 0.0
    size, rates, returns = chain.tokens_per_block, candidate.rates, outlook.returns
    lost = residents.lost(outlook.now, (chain.n_tokens - reuse.cached_tokens) // size - room, returns)
    lost_s = rates.prefill_s(round(lost * size))
    if candidate.on_gpu is not None:
        # A block that leaves only the GPU is restored, not computed.
        in_need = (chain.n_tokens - reuse.cached_tokens + reuse.host_tokens) // size
        moved = candidate.on_gpu.lost(outlook.now, in_need - (candidate.free_blocks or 0), returns)
        lost_s += rates.restore_s(round(moved * size), 0)
    return lost_s * outlook.strain


def place_least_loaded(candidates: Sequence[Candidate]) -> Placement:
    """The engine with the fewest requests in flight. Caches do not count. For requests whose prompt is not
    known (reuse off, audio). `candidates` is not empty."""

    def cost(each: Candidate) -> Cost:
        return Cost(each.engine, in_flight=each.load.in_flight, turn=each.turn, is_last=each.is_last)

    best = min(candidates, key=lambda each: (each.load.in_flight, not each.is_last, each.turn))
    elsewhere = 0 if len(candidates) > 1 else None
    return Placement(cost(best), 0, 0, lambda: tuple(map(cost, candidates)), "least loaded", elsewhere)
