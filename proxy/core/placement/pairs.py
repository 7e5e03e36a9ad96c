"""Pairs: one engine computes a prompt, another one reads its KV and answers.

    cost = prefiller: queue + interference + (restore + prefill + lost) / (1 - utilisation)
         + transfer
         + decoder: rest of the queue + room + lost / (1 - utilisation) + later

in seconds, as in `decision.py`. A pair is one more candidate beside the single engines. It never wins against
one that costs as little. Where pairs are possible, a prefill on an engine that decodes is charged with the
delay of its streams: that is what a pair avoids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

import msgspec
from msgspec.structs import replace

from proxy.core.index.blocks import Chain
from proxy.core.placement.decision import (
    TIE_S,
    Candidate,
    Cost,
    Outlook,
    Pair,
    Placement,
    Scores,
    place,
    regret_of,
)

# What a second of prefill costs each stream on the same engine, in seconds. Tokens that come later matter
# less than an answer that begins later. Of 0 to 1, values from 0.1 to 0.25 gave the shortest times to first
# token in benchmarks/pairs_sim.py, with gaps between tokens that are hardly longer than with 1.
STALL = 0.18
# Shorter transfers are never worth their round trips.
MIN_PULL_TOKENS = 64
# The first leg may take as long as expected and, beyond that, as long as the other engine would need alone,
# but at least this. So the answer comes at most twice as late as without a pair.
LEAST_PATIENCE_S = 1.0


class Prefillers(msgspec.Struct, frozen=True):
    """The engines that may compute a prompt for others.

    Attributes:
        candidates: these engines.
        decoders: the engines that can read KV from them.
        transfer_s: (prefiller, decoder, tokens) → seconds of the transfer.
    """

    candidates: Sequence[Candidate]
    decoders: Collection[str]
    transfer_s: Callable[[str, str, int], float]


def place_with_pairs(
    candidates: Sequence[Candidate], prefillers: Prefillers, chain: Chain, outlook: Outlook
) -> Placement:
    """The engine, or the pair, that costs least. `candidates` is not empty."""
    outlook = replace(outlook, stall=STALL)
    alone = place(candidates, chain, outlook)
    pair = best_pair(candidates, prefillers, chain, outlook)
    if pair is None:
        return alone
    chosen = pair if pair.chosen.total_s < alone.chosen.total_s - TIE_S else alone
    alones, cost = alone.all_costs, pair.chosen
    return replace(chosen, all_costs=lambda: (*alones(), cost))


def best_pair(
    candidates: Sequence[Candidate], prefillers: Prefillers, chain: Chain, outlook: Outlook
) -> Placement | None:
    """The cheapest pair; None if there is none. Regret is computed for this one alone."""
    once = replace(outlook, turns=1.0)  # the next turns come to the decoder
    sources, targets = Scores(prefillers.candidates, chain, once), Scores(candidates, chain, outlook)
    first_legs = [sources.cost(at) for at in range(len(prefillers.candidates))]
    best, its_s = None, inf
    for at, candidate in enumerate(candidates):
        pulled = chain.n_tokens - targets.reuses[at].cached_tokens
        if candidate.engine not in prefillers.decoders or pulled < MIN_PULL_TOKENS:
            continue
        second_leg = targets.cost(at)
        for other, first_leg in enumerate(first_legs):
            transfer_s = prefillers.transfer_s(first_leg.engine, second_leg.engine, pulled)
            cost = _joined(first_leg, second_leg, transfer_s, pulled)
            if cost.total_s < its_s:
                best, its_s = (other, at, cost), cost.total_s
    if best is None:
        return None
    source, target, cost = best
    for at, scores, each in (
        (source, sources, prefillers.candidates[source]),
        (target, targets, candidates[target]),
    ):
        scores.regrets[at] = regret_of(each, scores.reuses[at], chain, outlook)
    lost_s = sources.regrets[source] + targets.regrets[target]
    prefill, decode = sources.placement(source, chain, once), targets.placement(target, chain, outlook)
    patience_s = prefill.chosen.first_token_s + max(decode.chosen.first_token_s, LEAST_PATIENCE_S)
    return replace(
        prefill,
        chosen=replace(cost, regret_s=lost_s, total_s=cost.total_s + lost_s),
        pair=Pair(prefill, decode, patience_s),
    )


def _joined(first: Cost, second: Cost, transfer_s: float, pulled: int) -> Cost:
    """The cost of a pair without regret, from those of its engines. While the first leg runs, the queue of
    the second engine gets shorter."""
    queue_s = max(second.queue_s - first.first_token_s - transfer_s, 0.0)
    at_second_s = queue_s + second.room_s + second.restore_s + second.later_s
    return replace(
        first,
        engine=second.engine,
        prefiller=first.engine,
        queue_s=first.queue_s + queue_s,
        room_s=first.room_s + second.room_s,
        restore_s=first.restore_s + second.restore_s,
        transfer_s=transfer_s,
        later_s=second.later_s,
        total_s=first.total_s + transfer_s + at_second_s,
        pulled_tokens=pulled,
        in_flight=second.in_flight,
        free_blocks=second.free_blocks,
        turn=second.turn,
        is_last=second.is_last,
    )
