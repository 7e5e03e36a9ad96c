"""Why a request was placed where it was: one word for metrics, one sentence for people.

reason_of   the case, out of seven
why         the term that made the difference, with figures
tie_of      what decided when costs were equal

Everything follows from the placement itself, so a past decision is explained by what was known then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from proxy.core.placement.decision import Cost, Placement
from proxy.core.placement.scores import TIE_S


class Reason(StrEnum):
    """The reason why a request went to its engine."""

    HELD = "held"  # the engine holds the most of the prompt
    GATHERED = "gathered"  # the engine will hold the most, once its requests in flight are computed
    RELEASED = "released"  # another engine holds more of the prompt, and costs more
    SPREAD = "spread"  # no engine holds any of the prompt
    ONLY = "only"  # no other engine could take the request
    PAIRED = "paired"  # another engine computes the prompt for it, and costs less together with it
    BALANCED = "balanced"  # the prompt is not known here: placed by requests in flight alone


def reason_of(placement: Placement) -> Reason:
    """The case that a placement is."""
    if placement.rule == "least loaded":
        return Reason.BALANCED
    if placement.pair is not None:
        return Reason.PAIRED
    chosen, elsewhere = placement.chosen, placement.elsewhere
    if elsewhere is None:
        return Reason.ONLY
    if elsewhere > chosen.cached_tokens:
        return Reason.RELEASED
    if not chosen.cached_tokens:
        return Reason.SPREAD
    there_now = chosen.cached_tokens - chosen.pending_tokens
    is_ahead_by_it = there_now <= elsewhere < chosen.cached_tokens
    return Reason.GATHERED if is_ahead_by_it or there_now < chosen.pending_tokens else Reason.HELD


def utilisation_of(placement: Placement) -> float:
    """The share of their time that the engines compute prompts, as this placement counted it."""
    return 1 - 1 / placement.strain


def tie_of(placement: Placement) -> str | None:
    """The fact that decided between engines of equal cost; None where costs decided."""
    chosen, equals = placement.chosen, _equals(placement)
    if not equals:
        return None
    equals = [cost for cost in equals if cost.is_last == chosen.is_last]
    if not equals:
        return "served this session before"
    free = chosen.free_blocks or 0
    if all(free > (cost.free_blocks or 0) for cost in equals):
        return f"has the most free cache ({free:,} blocks)"
    return "was chosen longest ago" if chosen.turn else "was not chosen before"


def why(placement: Placement, *, unknown: str = "the prompt is not known here") -> str:
    """The term that made the difference, in one sentence. `unknown` says why a prompt is not known."""
    name, chosen, total = placement.engine, placement.chosen, placement.n_tokens
    reason = reason_of(placement)
    if reason is Reason.BALANCED:
        fewest = f"{name} has the fewest requests in flight ({chosen.in_flight})"
        return f"{unknown}: {fewest}{_tie(placement)}"
    if reason in _OF_TWO:
        return _OF_TWO[reason](placement)
    if reason is Reason.ONLY:
        return f"{name} is the only engine that can take the request; it holds {_held(chosen, total)}"
    said, subject = f"{name} holds {_held(chosen, total)}", "it"
    if reason is Reason.GATHERED:
        said = f"{name} is computing {chosen.pending_tokens:,} of {total:,} tokens for requests in flight"
    elif reason is Reason.SPREAD:
        said, subject = "no engine holds any of the prompt", name
    if _equals(placement):
        return said + _tie(placement)
    others = _others(placement)
    sooner = min(others, key=lambda cost: cost.first_token_s)
    if sooner.first_token_s + TIE_S < chosen.first_token_s:
        return f"{said}; {_of_the_sooner(sooner, placement)}"
    rival = min(others, key=lambda cost: cost.total_s)
    obstacle = _obstacle(rival, placement, f"on {rival.engine}")
    return f"{said}; {subject} {_takes(chosen, total)}, but {obstacle}"


def _of_a_pair(placement: Placement) -> str:
    """The sentence when another engine computes the prompt."""
    chosen, total = placement.chosen, placement.n_tokens
    if placement.pair is not None and placement.pair.together:
        holds = f"{chosen.prefiller} holds {_held(chosen, total)}; it {_takes(chosen, total)}"
        return f"{holds}, and {chosen.engine} answers: neither of them can alone"
    rival = min(_others(placement), key=lambda cost: cost.total_s)
    read = f"{chosen.engine} reads the KV of {chosen.pulled_tokens:,} from it in {_s(chosen.transfer_s)}"
    alone = _obstacle(rival, placement, f"on {rival.engine}")
    return f"{chosen.prefiller} {_takes(chosen, total)}, and {read}; without a pair, {alone}"


def _of_a_release(placement: Placement) -> str:
    """The sentence when another engine holds more of the prompt."""
    chosen, total = placement.chosen, placement.n_tokens
    holder = max(_others(placement), key=lambda cost: (cost.cached_tokens, -cost.total_s))
    verb = "is computing" if holder.pending_tokens == holder.cached_tokens else "holds"
    said = f"{holder.engine} {verb} {_held(holder, total)}"
    if holder in _equals(placement):
        return f"{said}, which saves less than a millisecond{_tie(placement)}"
    obstacle = _obstacle(holder, placement, "there")
    return f"{said}, but {obstacle}; {chosen.engine} {_takes(chosen, total)}"


# The sentences about another engine's part in a decision.
_OF_TWO: Mapping[Reason, Callable[[Placement], str]] = {
    Reason.PAIRED: _of_a_pair,
    Reason.RELEASED: _of_a_release,
}


def _of_the_sooner(sooner: Cost, placement: Placement) -> str:
    """The end of the sentence when another engine would answer sooner, at a cost to other requests."""
    chosen = placement.chosen
    times = f"{_s(sooner.first_token_s)} against {_s(chosen.first_token_s)}"
    said = f"{sooner.engine} would answer sooner, in {times}, but would"
    price_s, dearest = max(
        (sooner.congestion_s - chosen.congestion_s, "congestion"),
        (_regret_s(sooner) - _regret_s(chosen), "regret"),
        (sooner.later_s - chosen.later_s, "later"),
        (sooner.again_s - chosen.again_s, "again"),
    )
    if dearest == "regret":
        return f"{said} evict KV worth {_s(_regret_s(sooner))}"
    if dearest == "later":
        return f"{said} make the next turns wait {_s(price_s)} longer, because it is busier"
    if dearest == "again":
        return f"{said} have the next prompt with this beginning compute it again"
    busy = f"at {utilisation_of(placement):.0%} utilisation"
    return f"{said} delay later requests by {_s(sooner.congestion_s)}, {busy}"


def _obstacle(rival: Cost, placement: Placement, place: str) -> str:
    """The term that adds most to the rival's cost over the chosen engine's."""
    chosen, strain = placement.chosen, placement.strain
    computed = f"{placement.n_tokens - rival.cached_tokens:,} tokens"
    terms = (
        (rival.queue_s - chosen.queue_s, f"{_s(rival.queue_s)} of prefill wait {place}"),
        (
            rival.room_s - chosen.room_s,
            f"running streams {place} leave no memory for it for {_s(rival.room_s)}",
        ),
        (
            (rival.restore_s - chosen.restore_s) * strain,
            f"restoring {_restored(rival)} {place} takes {_s(rival.restore_s)}",
        ),
        (
            (rival.prefill_s - chosen.prefill_s) * strain,
            f"computing {computed} {place} takes {_s(rival.prefill_s)}",
        ),
        (
            rival.interference_s - chosen.interference_s,
            f"running streams {place} slow the prompt by {_s(rival.interference_s)}",
        ),
        (
            rival.stall_s - chosen.stall_s,
            f"computing {computed} {place} delays other requests by {_s(rival.stall_s)} in all",
        ),
        (
            rival.later_s - chosen.later_s,
            f"the next turns would wait {_s(rival.later_s)} {place}",
        ),
        (
            rival.again_s - chosen.again_s,
            f"the next prompt with this beginning would compute it {place} again: {_s(rival.again_s)}",
        ),
        (
            _regret_s(rival) - _regret_s(chosen),
            f"making room {place} evicts KV worth {_s(_regret_s(rival))}",
        ),
    )
    return max(terms)[1]


def _regret_s(cost: Cost) -> float:
    """The cost of what it evicts; 0 where that was not looked at."""
    return cost.regret_s or 0.0


def _takes(cost: Cost, total: int) -> str:
    """The steps of an engine before the first token, as a part of a sentence."""
    steps = []
    if cost.queue_s > TIE_S:
        steps.append(f"is free in {_s(cost.queue_s)}")
    if cost.room_s > TIE_S:
        steps.append(f"has memory {_s(cost.room_s)} later")
    if cost.restore_s > TIE_S:
        steps.append(f"restores {_restored(cost)} in {_s(cost.restore_s)}")
    steps.append(f"computes {total - cost.cached_tokens:,} tokens in {_s(cost.prefill_s)}")
    return " and ".join(filter(None, (", ".join(steps[:-1]), steps[-1])))


def _tie(placement: Placement) -> str:
    """The fact that decided between equal costs, as the end of a sentence; empty where costs decided."""
    tie = tie_of(placement)
    if tie is None:
        return ""
    count = len(_equals(placement)) + 1
    if placement.rule == "least loaded":
        return f"; of {count} engines with as few, {placement.engine} {tie}"
    return f"; of {count} engines within {TIE_S * 1000:.0f} ms, {placement.engine} {tie}"


def _equals(placement: Placement) -> list[Cost]:
    """The other engines that cost the same."""
    chosen, others = placement.chosen, _others(placement)
    if placement.rule == "least loaded":
        return [cost for cost in others if cost.in_flight == chosen.in_flight]
    looked_at = [cost for cost in others if cost.regret_s is not None]
    least = min(cost.total_s for cost in (chosen, *looked_at))
    return [cost for cost in looked_at if cost.total_s <= least + TIE_S]


def _others(placement: Placement) -> list[Cost]:
    """The single engines that were not chosen. An engine of the chosen pair is one: it could do all alone."""
    pair = placement.pair
    chosen = None if pair is not None and not pair.together else placement.engine
    return [cost for cost in placement.costs if cost.prefiller is None and cost.engine != chosen]


def _held(cost: Cost, total: int) -> str:
    return f"{cost.cached_tokens:,} of {total:,} tokens"


def _restored(cost: Cost) -> str:
    tokens = cost.host_tokens + cost.disk_tokens
    return f"{tokens:,} tokens" if tokens else "its KV"


def _s(seconds: float) -> str:
    """A time, rounded for people."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"  # noqa: PLR2004 - rounding
