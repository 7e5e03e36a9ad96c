"""Pairs: one engine computes a prompt, another one reads its KV and answers.

    cost = prefiller: queue + interference + (restore + prefill + lost) / (1 - utilisation)
         + transfer
         + decoder: rest of the queue + room + lost / (1 - utilisation) + later

in seconds, as in `scores.py`. A pair is one more candidate beside the single engines. It never wins against
one that costs as little.

The first engine is meant for prefills, or holds much of the prompt. Where engines are meant for prefills,
each prefill is charged with the delay of its engine's streams, and of requests that come to that engine
meanwhile: that is what a pair can spare them. A prefill that takes twice as long delays twice as many
requests, each for twice as long. So long ones are worth a pair first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import nlargest, nsmallest
from math import inf

import msgspec
from msgspec.structs import replace

from proxy.core.index.blocks import Chain
from proxy.core.placement.decision import Candidate, Cost, Outlook, Pair, Placement
from proxy.core.placement.scores import TIE_S, Scores, choose, regret_of

# What a second of prefill costs each stream on the same engine, in seconds. Tokens that come later matter
# less than an answer that begins later. In benchmarks/pairs_sim.py, values from 0.03 to 0.05 gave the
# shortest times to first token. With more, gaps between tokens are shorter, and first tokens come later.
STALL = 0.05
# Shorter transfers are never worth their round trips.
MIN_PULL_TOKENS = 64
# The first leg may take as long as expected and, beyond that, as long as the other engine would need alone,
# but at least this. So the answer comes at most twice as late as without a pair.
LEAST_PATIENCE_S = 1.0
# Pairs are made of the cheapest engines, so that a decision in a large pool takes little more time.
MAX_SOURCES = 4
MAX_HOLDERS = 2
MAX_TARGETS = 4
# An engine that is not meant for prefills computes no prompt for another one: it holds at least this share of
# what that one lacks.
LEAST_HELD = 0.5


class Prefillers(msgspec.Struct, frozen=True):
    """The engines that may compute a prompt for others.

    Attributes:
        candidates: the engines that are meant for that.
        decoders: the engines that can read KV from others.
        transfer_s: (prefiller, decoder, tokens) → seconds of the transfer.
        arrivals: engine → requests that it gets per second.
        holders: further engines that can give KV, and do so if they hold much of the prompt.
    """

    candidates: Sequence[Candidate]
    decoders: Collection[str]
    transfer_s: Callable[[str, str, int], float]
    arrivals: Callable[[str], float]
    holders: Sequence[Candidate] = ()


def place_with_pairs(
    candidates: Sequence[Candidate], prefillers: Prefillers, chain: Chain, outlook: Outlook
) -> Placement:
    """The engine, or the pair, that costs least. `candidates` is not empty."""
    if prefillers.candidates:
        outlook = replace(outlook, stall=STALL, arrivals=prefillers.arrivals)
    scores = Scores(candidates, chain, outlook)
    alone = choose(candidates, scores, chain, outlook)
    pair = best_pair(candidates, prefillers, chain, outlook, scores, alone.chosen.total_s)
    if pair is None:
        return alone
    chosen = pair if pair.chosen.total_s < alone.chosen.total_s - TIE_S else alone
    alones, cost = alone.all_costs, pair.chosen
    return replace(chosen, all_costs=lambda: (*alones(), cost))


def best_pair(
    candidates: Sequence[Candidate],
    prefillers: Prefillers,
    chain: Chain,
    outlook: Outlook,
    targets: Scores,
    alone_s: float = inf,
) -> Placement | None:
    """The cheapest pair; None if there is none. Regret is computed for this one alone.

    `targets` are the scores of the candidates. `alone_s` is the cost of the best of them: engines that hold
    KV, and cost as much already, are left out.
    """
    once = replace(outlook, turns=1.0)  # the next turns come to the decoder
    meant = len(prefillers.candidates)
    givers = [*prefillers.candidates, *_most_held(prefillers.holders)]
    sources = Scores(givers, chain, once)
    later_s = (outlook.turns - 1) * outlook.rest_s * min([each.busy for each in candidates])
    limit_s = alone_s - later_s - TIE_S
    cheapest = [at for at in sources.within(inf) if at < meant or sources.totals[at] < limit_s]
    if not cheapest:
        return None
    first_legs = [(at, sources.cost(at)) for at in cheapest[:MAX_SOURCES]]
    best: tuple[int, int, Cost] | None = None
    for target in _nearest(candidates, targets, prefillers, chain):
        pulled, second = _lacks(targets, target, chain), targets.cost(target)
        for source, first in first_legs:
            held = first.cached_tokens - second.cached_tokens
            if first.engine == second.engine or (source >= meant and held < LEAST_HELD * pulled):
                continue
            transfer_s = prefillers.transfer_s(first.engine, second.engine, pulled)
            cost = _joined(first, second, transfer_s, pulled)
            if best is None or cost.total_s < best[2].total_s:
                best = source, target, cost
    if best is None:
        return None
    source, target, cost = best
    for at, scores, each in ((source, sources, givers[source]), (target, targets, candidates[target])):
        scores.regrets[at] = regret_of(each, scores.reuses[at], chain, outlook)
    lost_s = sources.regrets[source] + targets.regrets[target]
    prefill, decode = sources.placement(source, chain, once), targets.placement(target, chain, outlook)
    patience_s = prefill.chosen.first_token_s + max(decode.chosen.first_token_s, LEAST_PATIENCE_S)
    return replace(
        prefill,
        chosen=replace(cost, regret_s=lost_s, total_s=cost.total_s + lost_s),
        pair=Pair(prefill, decode, patience_s),
    )


def _most_held(holders: Sequence[Candidate]) -> list[Candidate]:
    """The engines that hold most of the prompt."""
    return nlargest(MAX_HOLDERS, [each for each in holders if each.match.blocks], key=_blocks_of)


def _blocks_of(candidate: Candidate) -> int:
    return candidate.match.blocks


def _lacks(targets: Scores, at: int, chain: Chain) -> int:
    """Prompt tokens that a target does not hold."""
    return chain.n_tokens - targets.reuses[at].cached_tokens


def _nearest(
    candidates: Sequence[Candidate], targets: Scores, prefillers: Prefillers, chain: Chain
) -> list[int]:
    """The targets for which the transfer, and what they add to it, costs least. Links count as equal here."""
    able = [
        at
        for at, candidate in enumerate(candidates)
        if candidate.engine in prefillers.decoders and _lacks(targets, at, chain) >= MIN_PULL_TOKENS
    ]
    if len(able) <= MAX_TARGETS:
        return able
    any_link = candidates[able[0]].engine, candidates[able[-1]].engine
    n_tokens = chain.n_tokens
    token_s = (prefillers.transfer_s(*any_link, n_tokens) - prefillers.transfer_s(*any_link, 0)) / n_tokens

    def seconds(at: int) -> float:
        return targets.apart_s(at) + token_s * _lacks(targets, at, chain)

    return nsmallest(MAX_TARGETS, able, key=seconds)


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
