"""Two legs: one engine computes a prompt, another one reads its KV and answers.

    cost = prefiller: queue + interference + (restore + prefill + lost) / (1 - utilisation)
         + transfer
         + decoder: rest of the queue + room + restore + lost / (1 - utilisation) + later

in seconds, as in `scores.py`: the decoder's part is the formula there with a prefill of zero, so that a new
term counts on both engines. A pair is one more candidate beside the single engines. It never wins against one
that costs as little.

The first engine is meant for prefills, or holds much of the prompt. Where engines are meant for prefills,
each prefill is charged with the delay of its engine's streams, and of requests that come to that engine
meanwhile: that is what a pair can spare them. A prefill that takes twice as long delays twice as many
requests, each for twice as long. So long ones are worth a pair first.

Halves are engines that answer a request only two at a time, both at once:

    cost = prefiller: as of an engine that computes the prompt and answers
         + decoder: queue + room

The prompt's next turns come to the prefiller again, which holds it. So the two are chosen apart: the cheapest
prefiller, and the decoder with the shortest wait. Ties between decoders go to the one with the fewest
requests in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import msgspec
from msgspec.structs import replace

from proxy.core.index.blocks import Chain
from proxy.core.placement.decision import NOTHING, TERMS, Candidate, Cost, Outlook, Pair, Placement
from proxy.core.placement.scores import TIE_S, Scores, choose, place, place_least_loaded, regret_of

# What a second of prefill costs each stream on the same engine, in seconds. Tokens that come later matter
# less than an answer that begins later. In benchmarks/pairs_sim.py, values from 0.03 to 0.05 gave the
# shortest times to first token. With more, gaps between tokens are shorter, and first tokens come later.
STALL = 0.05
MIN_PULL_TOKENS = 64  # shorter transfers are never worth their round trips, and measure nothing else
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
    """The engines that may compute a prompt for others."""

    candidates: Sequence[Candidate]  # the engines that are meant for that
    decoders: Collection[str]  # the engines that can read KV from others
    transfer_s: Callable[[str, str, int], float]  # (prefiller, decoder, tokens) → seconds of the transfer
    arrivals: Callable[[str], float]  # engine → requests that it gets per second
    # Further engines that can give KV, and do so if they hold much of the prompt.
    holders: Sequence[Candidate] = ()


def place_with_pairs(
    candidates: Sequence[Candidate], prefillers: Prefillers | None, chain: Chain, outlook: Outlook
) -> Placement:
    """The engine, or the pair, that costs least. `candidates` is not empty, and none of them is a half."""
    if prefillers is None:
        return place(candidates, chain, outlook)
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
    """The cheapest pair; None if there is none. Regret is computed for this one alone. `targets` are the
    scores of the candidates. `alone_s` is the cost of the best of them: engines that hold KV, and cost as
    much already, are left out."""
    once = replace(outlook, turns=1.0)  # the next turns come to the decoder
    meant = len(prefillers.candidates)
    holders = sorted(prefillers.holders, key=lambda each: each.match.blocks, reverse=True)[:MAX_HOLDERS]
    givers = [*prefillers.candidates, *[each for each in holders if each.match.blocks]]
    sources = Scores(givers, chain, once)
    later_s = (outlook.turns - 1) * outlook.rest_s * min([each.busy for each in candidates])
    limit_s = alone_s - later_s - TIE_S
    cheapest = [at for at in sources.within(inf) if at < meant or sources.totals[at] < limit_s]
    if not cheapest:
        return None
    first_legs = [(at, sources.cost(at)) for at in cheapest[:MAX_SOURCES]]
    apart = _apart(candidates, chain, outlook)
    best: tuple[float, int, int, tuple[Cost, Cost, int, float, float]] | None = None
    for target in _nearest(candidates, apart, prefillers, chain):
        second = apart.cost(target)
        pulled = chain.n_tokens - second.cached_tokens
        for source, first in first_legs:
            more = first.cached_tokens - second.cached_tokens
            if first.engine == second.engine or (source >= meant and more < LEAST_HELD * pulled):
                continue
            transfer_s = prefillers.transfer_s(first.engine, second.engine, pulled)
            # The KV moves when the first leg is over. By then, the second engine's queue is shorter.
            over_s = min(second.queue_s, first.first_token_s + transfer_s)
            total_s = sources.totals[source] + apart.totals[target] + transfer_s - over_s
            if best is None or total_s < best[0]:
                best = total_s, source, target, (first, second, pulled, transfer_s, over_s)
    if best is None:
        return None
    _, source, target, legs = best
    for at, scores, each in ((source, sources, givers[source]), (target, targets, candidates[target])):
        scores.regrets[at] = regret_of(each, scores.reuses[at], chain, outlook)
    lost_s = sources.regrets[source] + targets.regrets[target]
    prefill, decode = sources.placement(source, chain, once), targets.placement(target, chain, outlook)
    patience_s = prefill.chosen.first_token_s + max(decode.chosen.first_token_s, LEAST_PATIENCE_S)
    chosen = replace(_joined(*legs), regret_s=lost_s)
    return replace(prefill, chosen=chosen, pair=Pair(prefill, decode, patience_s))


def _apart(candidates: Sequence[Candidate], chain: Chain, outlook: Outlook) -> Scores:
    """The cost of each candidate if another engine computes the prompt, and pays for what that delays."""
    calm = replace(outlook, strain=1.0, arrivals=None, spare=0.0)
    return Scores(candidates, chain, calm, computes=False)


def _nearest(
    candidates: Sequence[Candidate], apart: Scores, prefillers: Prefillers, chain: Chain
) -> list[int]:
    """The targets for which the transfer, and what they add to it, costs least. Links count as equal here."""
    n_tokens = chain.n_tokens
    lacks = [n_tokens - reuse.cached_tokens for reuse in apart.reuses]
    able = [
        at
        for at, candidate in enumerate(candidates)
        if candidate.engine in prefillers.decoders and lacks[at] >= MIN_PULL_TOKENS
    ]
    if len(able) <= MAX_TARGETS:
        return able
    any_link = candidates[able[0]].engine, candidates[able[-1]].engine
    token_s = (prefillers.transfer_s(*any_link, n_tokens) - prefillers.transfer_s(*any_link, 0)) / n_tokens
    return sorted(able, key=lambda at: apart.totals[at] + token_s * lacks[at])[:MAX_TARGETS]


def _joined(first: Cost, second: Cost, pulled: int, transfer_s: float = 0.0, over_s: float = 0.0) -> Cost:
    """The cost of two legs: the sum of each term of theirs, of the second one's queue without `over_s`, and
    without the second one's regret."""
    terms: dict[str, float | None] = {
        name: (getattr(first, name) or 0.0) + (getattr(second, name) or 0.0) for name in TERMS
    }
    terms["queue_s"] = first.queue_s + (second.queue_s - over_s)
    terms |= {"transfer_s": transfer_s, "regret_s": first.regret_s}
    return replace(
        second,
        prefiller=first.engine,
        pulled_tokens=pulled,
        cached_tokens=first.cached_tokens,
        host_tokens=first.host_tokens,
        disk_tokens=first.disk_tokens,
        pending_tokens=first.pending_tokens,
        **terms,
    )


# --- halves -------------------------------------------------------------------------------------------------


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
    candidates: Sequence[Candidate], prefillers: Prefillers | None, chain: Chain, outlook: Outlook
) -> Placement:
    """The engine that answers alone, or the two legs, that cost least, where some candidates are halves."""
    groups: dict[int, list[Candidate]] = {}
    for each in candidates:
        groups.setdefault(id(each.partners) if each.partners else 0, []).append(each)
    whole = groups.pop(0, None)
    found = [place_with_pairs(whole, prefillers, chain, outlook)] if whole else []
    found += [_both_halves(group, chain, outlook) for group in groups.values()]
    best = min(found, key=lambda each: each.chosen.total_s)
    return replace(best, all_costs=lambda: tuple(cost for each in found for cost in each.all_costs()))


def _both_halves(decoders: Sequence[Candidate], chain: Chain, outlook: Outlook) -> Placement:
    """The cheapest two of these engines and of their partners, which all have the same."""
    prefill = place(decoders[0].partners, chain, outlook)
    targets = Scores(decoders, chain, outlook)
    # The first engine does everything but answer, and the next turns come to it.
    lacking = [replace(each, match=NOTHING) for each in decoders]
    apart = _apart(lacking, chain, replace(outlook, turns=1.0))
    least_s = min(apart.totals)

    def order(at: int) -> tuple[float, int, bool, int]:
        """Waits that differ by less than a tie are equal."""
        over_s, each = apart.totals[at] - least_s, decoders[at]
        return over_s if over_s > TIE_S else 0.0, each.load.in_flight, not each.is_last, each.turn

    at = min(range(len(decoders)), key=order)

    def joined(first: Cost, at: int) -> Cost:
        return _joined(first, apart.cost(at), chain.n_tokens - targets.reuses[at].cached_tokens)

    def all_costs() -> tuple[Cost, ...]:
        """Of each prefiller with the chosen decoder, and of each decoder with the chosen prefiller."""
        others = [other for other in range(len(decoders)) if other != at]
        return (
            *(joined(first, at) for first in prefill.all_costs()),
            *(joined(prefill.chosen, other) for other in others),
        )

    return replace(
        prefill,
        chosen=joined(prefill.chosen, at),
        all_costs=all_costs,
        pair=Pair(prefill, targets.placement(at, chain, outlook), together=True),
    )


# --- transfers ----------------------------------------------------------------------------------------------

SPEEDUP = 10.0  # prior: moving KV is ten times as fast as computing it
HANDSHAKE_S = 0.5  # prior: engines that meet for the first time exchange addresses and memory keys
# The fastest of this many measurements counts, none older than this.
WINDOW = 16
KEPT_S = 300.0


class TransferResult(StrEnum):
    """What came of a prompt that one engine was to compute for another."""

    MOVED = "moved"  # the other engine answered from it
    FAILED = "failed"  # it was not computed, or not in time: the other engine computed it
    LATE = "late"  # the other engine did not answer while it was surely kept


@dataclass(slots=True)
class _Link:
    """What is known of one link: whether the two have met, and (when, tokens a second)."""

    has_met: bool = False
    _rates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _fastest: float | None = None

    def measured(self, now: float, rate: float) -> None:
        self._rates.append((now, rate))
        self._fastest = max([each for _, each in self._rates])

    def rate(self, now: float) -> float | None:
        """The fastest; None if nothing was measured lately."""
        rates = self._rates
        if rates and rates[0][0] < now - KEPT_S:
            while rates and rates[0][0] < now - KEPT_S:
                rates.popleft()
            self._fastest = max([each for _, each in rates], default=None)
        return self._fastest


class Transfers:
    """How long it takes to move KV between the engines of a pool: a handshake, if the two have not met, and
    tokens / rate.

    The engines of a pool serve the same model, so a token has the same bytes everywhere, and a rate in tokens
    a second is one in bytes a second. Each link between two engines has its own, the fastest that was
    measured lately: a measurement ends with the first token, so it may contain a wait for the engine's
    prompts or memory. Measurements are forgotten, so that a link that was slow for a while is tried again.
    """

    def __init__(self, prefill_tok_s: Callable[[], float]) -> None:
        """`prefill_tok_s`: tokens that an engine of the pool computes in a second."""
        self._prefill_tok_s = prefill_tok_s
        self._links: dict[tuple[str, str], _Link] = {}
        self._all = _Link()  # a link that is new is as fast as the others were lately

    def seconds(self, now: float, source: str, target: str, tokens: int) -> float:
        """Seconds to move the KV of `tokens` tokens from engine `source` to engine `target`."""
        link = self._links.get((source, target))
        rate = link.rate(now) if link is not None else None
        if rate is None:
            rate = self._all.rate(now) or SPEEDUP * self._prefill_tok_s()
        handshake_s = 0.0 if link is not None and link.has_met else HANDSHAKE_S
        return handshake_s + tokens / rate

    def measured(self, now: float, source: str, target: str, tokens: int, seconds: float) -> None:
        """Moving the KV of `tokens` tokens took `seconds`. The first time tells the handshake, not the
        rate."""
        link = self._links.setdefault((source, target), _Link())
        if link.has_met and tokens >= MIN_PULL_TOKENS and seconds > 0:
            for each in (link, self._all):
                each.measured(now, tokens / seconds)
        link.has_met = True

    def forget(self, engine: str) -> None:
        """The engine is gone: who has its place must be met anew."""
        for link in [each for each in self._links if engine in each]:
            del self._links[link]
