"""One request, explained: why it was placed where it was, and what its time to the first byte was spent on.

 A sentence is made when somebody asks, out of what was known at the decision. The parts of the time are made
of the moments at which the request passed each step:

    read → tokenise → queue → (failed attempts) → place → gather → first leg → hold      measured here
    → prefill, decode                                                                    as the engine reports
    → engine                                                                             the rest

They add up to the measured time: what no step and no report accounts for is the engine's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

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


def why(placement: Placement, *, is_reusing: bool = True) -> str:
    """The term that made the difference, in one sentence."""
    name, chosen, total = placement.engine, placement.chosen, placement.n_tokens
    said, subject = f"{name} holds {_held(chosen, total)}", "it"
    match reason_of(placement):
        case Reason.BALANCED:
            unknown = "the prompt is not known here" if is_reusing else "reuse is off"
            fewest = f"{name} has the fewest requests in flight ({chosen.in_flight})"
            return f"{unknown}: {fewest}{_tie(placement)}"
        case Reason.PAIRED:
            return _of_a_pair(placement)
        case Reason.RELEASED:
            return _of_a_release(placement)
        case Reason.ONLY:
            return _of_the_only(placement)
        case Reason.GATHERED:
            said = f"{name} is computing {chosen.pending_tokens:,} of {total:,} tokens for requests in flight"
        case Reason.SPREAD:
            said, subject = "no engine holds any of the prompt", name
    if tie := _tie(placement):
        return said + tie
    others = _others(placement)
    sooner = min(others, key=lambda cost: cost.first_token_s)
    if sooner.first_token_s + TIE_S < chosen.first_token_s:
        times = f"{_s(sooner.first_token_s)} against {_s(chosen.first_token_s)}"
        against = f"{sooner.engine} would answer sooner, in {times}, but would "
        against += _dearest(_PRICES, sooner, placement)
    else:
        rival = min(others, key=lambda cost: cost.total_s)
        obstacle = _dearest(_OBSTACLES, rival, placement, "")
        against = f"{subject} {_takes(chosen, total)}; on {rival.engine} {obstacle}"
    return f"{said}; {against}"


def _of_the_only(placement: Placement) -> str:
    """The sentence when there was no other engine, or none that makes the same tokens of the request."""
    name, held = placement.engine, _held(placement.chosen, placement.n_tokens)
    if not placement.unlike:
        return f"{name} is the only engine that can take the request; it holds {held}"
    others = (
        f"{' and '.join(placement.unlike)} would not cost less, and cannot go on with an answer of {name}"
    )
    return f"{name} holds {held}; {others}: model files, chat template or tokens differ"


def _of_a_pair(placement: Placement) -> str:
    """The sentence when another engine computes the prompt."""
    chosen, total = placement.chosen, placement.n_tokens
    if placement.pair is not None and placement.pair.together:
        holds = f"{chosen.prefiller} holds {_held(chosen, total)}; it {_takes(chosen, total)}"
        return f"{holds}, and {chosen.engine} answers: neither of them can alone"
    rival = min(_others(placement), key=lambda cost: cost.total_s)
    read = f"{chosen.engine} reads the KV of {chosen.pulled_tokens:,} from it in {_s(chosen.transfer_s)}"
    alone = _dearest(_OBSTACLES, rival, placement)
    return f"{chosen.prefiller} {_takes(chosen, total)}, and {read}; without a pair, {alone}"


def _of_a_release(placement: Placement) -> str:
    """The sentence when another engine holds more of the prompt."""
    chosen, total = placement.chosen, placement.n_tokens
    holder = max(_others(placement), key=lambda cost: (cost.cached_tokens, -cost.total_s))
    verb = "is computing" if holder.pending_tokens == holder.cached_tokens else "holds"
    said = f"{holder.engine} {verb} {_held(holder, total)}"
    if holder in _equals(placement):
        return f"{said}, which saves less than a millisecond{_tie(placement)}"
    obstacle = _dearest(_OBSTACLES, holder, placement, " there")
    return f"{said}, but {obstacle}; {chosen.engine} {_takes(chosen, total)}"


# Term of a cost → what an engine would do to other requests; of equal terms, the first counts.
_PRICES = {
    "regret_s": "evict KV worth {term}",
    "later_s": "make the next turns wait {more} longer, because it is busier",
    "congestion_s": "delay later requests by {term}, at {busy:.0%} utilisation",
    "again_s": "have the next prompt with this beginning compute it again",
}
# Term of a cost → why it costs too much at `place`; likewise.
_OBSTACLES = {
    "later_s": "the next turns would wait {term}{place}",
    "again_s": "the next prompt with this beginning would compute it{place} again: {term}",
    "interference_s": "running streams{place} slow the prompt by {term}",
    "room_s": "running streams{place} leave no memory for it for {term}",
    "restore_s": "restoring {restored}{place} takes {term}",
    "regret_s": "making room{place} evicts KV worth {term}",
    "prefill_s": "computing {computed:,} tokens{place} takes {term}",
    "stall_s": "computing {computed:,} tokens{place} delays other requests by {term} in all",
    "queue_s": "{term} of prefill wait{place}",
}
_STRAINED = ("restore_s", "prefill_s")  # terms that count for other requests, too


def _dearest(words: Mapping[str, str], rival: Cost, placement: Placement, place: str | None = None) -> str:
    """The words for the term that adds most to the rival's cost over the chosen engine's, and the `place`."""

    def more(name: str) -> float:
        added = _term(rival, name) - _term(placement.chosen, name)
        return added * placement.strain if name in _STRAINED else added

    name = max(words, key=more)
    return words[name].format(
        term=_s(_term(rival, name)),
        more=_s(more(name)),
        place=f" on {rival.engine}" if place is None else place,
        busy=utilisation_of(placement),
        restored=_restored(rival),
        computed=placement.n_tokens - rival.cached_tokens,
    )


def _term(cost: Cost, name: str) -> float:
    """A term of a cost; 0 for a regret that was not looked at."""
    return getattr(cost, name) or 0.0


# Term of a cost → what its engine does before the first token.
_STEPS = {
    "queue_s": "is free in {term}",
    "room_s": "has memory {term} later",
    "restore_s": "restores {restored} in {term}",
}


def _takes(cost: Cost, total: int) -> str:
    """The steps of an engine before the first token, as a part of a sentence."""
    terms = ((text, getattr(cost, name)) for name, text in _STEPS.items())
    steps = [text.format(term=_s(term), restored=_restored(cost)) for text, term in terms if term > TIE_S]
    computes = f"computes {total - cost.cached_tokens:,} tokens in {_s(cost.prefill_s)}"
    return f"{', '.join(steps)} and {computes}" if steps else computes


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


# --- the time to the first byte -----------------------------------------------------------------------------


class TtfbPart(StrEnum):
    """A part of the time to the first byte, in the order of the steps."""

    READ = "read"  # receive and parse the body
    TOKENISE = "tokenise"  # render, tokenise, hash
    QUEUE = "queue"  # wait in kvpin because all engines were busy
    FAILED = "failed attempts"  # on engines that failed, and the placements between
    PLACE = "place"  # choose the engine
    GATHER = "gather"  # wait for another request that computes the same prefix
    FIRST_LEG = "first leg"  # another engine computed the prompt, or failed to; a fetch of its KV
    HOLD = "hold"  # the adapter's work: wait for a slot, save, restore
    PREFILL = "prefill"  # by the engine's clock
    DECODE = "decode"  # likewise; only of an answer that came whole
    ENGINE = "engine"  # the rest: the engine's own queue, its other requests, the network


class Moments(msgspec.Struct, kw_only=True):
    """When a request passed each step, in monotonic seconds, and what its engine reports."""

    came: float  # its head was read
    arrived: float  # its body was read
    prepared: float  # its prompt was tokenised
    placed: float  # it was placed on the engine that answered
    gathered: float  # no other request computes its prefix any more
    sent: float  # it was sent to the engine
    began: float  # the first byte of the answer came
    queued_s: float = 0.0  # seconds that it waited for busy engines after it was prepared
    # Seconds that another engine took to compute its prompt, or to fail, after it was gathered; and its own
    # engine, to fetch the KV before it got the request.
    legs_s: float = 0.0
    has_failed: bool = False  # other engines had failed before
    is_whole: bool = False  # the answer is no stream: its first byte came last
    prefill_s: float | None = None  # the engine's own timing; None where it reports none
    decode_s: float | None = None  # likewise


def parts_of(moments: Moments) -> dict[TtfbPart, float]:
    """Seconds of each part, which add up to `began - came`. Parts that took no time are left out."""
    between = TtfbPart.FAILED if moments.has_failed else TtfbPart.PLACE
    decode_s = moments.decode_s if moments.is_whole else None
    measured = {
        TtfbPart.READ: moments.arrived - moments.came,
        TtfbPart.TOKENISE: moments.prepared - moments.arrived,
        TtfbPart.QUEUE: moments.queued_s,
        between: moments.placed - moments.prepared - moments.queued_s,
        TtfbPart.GATHER: moments.gathered - moments.placed,
        TtfbPart.FIRST_LEG: moments.legs_s,
        TtfbPart.HOLD: moments.sent - moments.gathered - moments.legs_s,
        TtfbPart.PREFILL: moments.prefill_s or 0.0,
        TtfbPart.DECODE: decode_s or 0.0,
    }
    left = moments.began - moments.came
    parts = {}
    for part, seconds in measured.items():
        # The engine has another clock: its report may exceed what was measured here.
        taken = min(max(seconds, 0.0), left)
        if taken > 0:
            parts[part] = taken
            left -= taken
    if left > 0:
        parts[TtfbPart.ENGINE] = left
    return parts
