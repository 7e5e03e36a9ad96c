"""Halves: engines that answer a request only two at a time, both at once.

    cost = prefiller: as of an engine that computes the prompt and answers
         + decoder: queue + room

in seconds, as in `scores.py`. The prompt's next turns come to the prefiller again, which holds it. So the
two are chosen apart: the cheapest prefiller, and the decoder with the shortest wait. Ties between decoders go
to the one with the fewest requests in flight. A pair that costs as little as an engine alone does not win.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from proxy.core.index.blocks import Chain
from proxy.core.placement.decision import Candidate, Cost, Outlook, Pair, Placement
from proxy.core.placement.scores import TIE_S, Scores, choose, place_least_loaded


def least_loaded_of(candidates: Sequence[Candidate]) -> Placement:
    """The candidate with the fewest requests in flight, and such a partner if it needs one. `candidates` is
    not empty."""
    placement = place_least_loaded(candidates)
    found = {id(each.partners): place_least_loaded(each.partners) for each in candidates if each.partners}
    if not found:
        return placement
    prefills = {each.engine: found.get(id(each.partners)) for each in candidates}
    costs = tuple(
        cost if (prefill := prefills[cost.engine]) is None else replace(cost, prefiller=prefill.engine)
        for cost in placement.costs
    )
    chosen = next(each for each in costs if each.engine == placement.engine)
    prefill = prefills[placement.engine]
    pair = None if prefill is None else Pair(prefill, placement, together=True)
    return replace(placement, chosen=chosen, all_costs=lambda: costs, pair=pair)


def place_halves(
    halves: Sequence[Candidate], chain: Chain, outlook: Outlook, alone: Placement | None
) -> Placement:
    """The cheapest pair of halves, or what was found `alone`, among the engines that need no partner.
    `halves` is not empty; each has partners."""
    groups: dict[int, list[Candidate]] = {}
    for each in halves:
        groups.setdefault(id(each.partners), []).append(each)
    found = [_best_pair(group, chain, outlook) for group in groups.values()]
    if alone is not None:
        found.insert(0, alone)
    best = min(found, key=lambda each: each.chosen.total_s)
    return replace(best, all_costs=lambda: tuple(cost for each in found for cost in each.all_costs()))


def _best_pair(decoders: Sequence[Candidate], chain: Chain, outlook: Outlook) -> Placement:
    """The cheapest pair of one of these engines and one of their partners."""
    prefillers = decoders[0].partners
    sources = Scores(prefillers, chain, outlook)
    prefill = choose(prefillers, sources, chain, outlook)
    targets = Scores(decoders, chain, outlook)
    costs = [targets.cost(at) for at in range(len(decoders))]
    least_s = min(map(_wait_s, costs))
    at = min(range(len(decoders)), key=lambda each: _order(costs[each], least_s))
    first, second = prefill.chosen, costs[at]

    def all_costs() -> tuple[Cost, ...]:
        """Of each prefiller with the chosen decoder, and of each decoder with the chosen prefiller."""
        ones = [first if cost.engine == first.engine else cost for cost in prefill.all_costs()]
        others = [cost for cost in costs if cost.engine != second.engine]
        return (
            *(_joined(one, second, chain) for one in ones),
            *(_joined(first, other, chain) for other in others),
        )

    return replace(
        prefill,
        chosen=_joined(first, second, chain),
        all_costs=all_costs,
        pair=Pair(prefill, targets.placement(at, chain, outlook), together=True),
    )


def _wait_s(cost: Cost) -> float:
    """Seconds until an engine that computes no prompt has room for its KV."""
    return cost.queue_s + cost.room_s


def _order(cost: Cost, least_s: float) -> tuple[float, int, bool, int]:
    """The order of decoders: waits that differ by less than a tie are equal."""
    over_s = _wait_s(cost) - least_s
    return over_s if over_s > TIE_S else 0.0, cost.in_flight, not cost.is_last, cost.turn


def _joined(first: Cost, second: Cost, chain: Chain) -> Cost:
    """The cost of a pair, from those of its engines."""
    return replace(
        first,
        engine=second.engine,
        prefiller=first.engine,
        queue_s=first.queue_s + second.queue_s,
        room_s=first.room_s + second.room_s,
        total_s=first.total_s + _wait_s(second),
        pulled_tokens=chain.n_tokens - second.cached_tokens,
        in_flight=second.in_flight,
        free_blocks=second.free_blocks,
        turn=second.turn,
        is_last=second.is_last,
    )
