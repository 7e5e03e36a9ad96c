"""One past request: what was predicted, what the engine reported, and why, in one sentence.

This is the only place where prompt text leaves kvpin: the few tokens from the first that differs, decoded for
the operator.
"""

from __future__ import annotations

from array import array

import msgspec

from proxy.control.routing import CostAnswer, Decision, cost_answer, reasons
from proxy.core.placement.decision import Placement
from proxy.fleet.engine import TOKENS_PER_BLOCK
from proxy.fleet.fleet import Fleet
from proxy.flow import Flow
from proxy.request.records import Divergence, RequestFacts, RequestRecord


class RequestSummary(RequestFacts, kw_only=True):
    """One past request, without its prompt. Its times count from its placement."""

    engine: str | None
    n_tokens: int | None
    predicted_tokens: int | None
    expected_first_token_s: float | None


class DivergenceAnswer(Divergence, frozen=True, kw_only=True):
    """The first tokens that differ from the earlier request most like this one, and their text."""

    text: str | None
    other_text: str | None


class DecisionAnswer(Decision, kw_only=True):
    """Why a request was placed where it was, with the cost of every engine."""

    costs: list[CostAnswer]


class RequestAnswer(RequestSummary, kw_only=True):
    """One past request, explained: `explanation` is about its cache, `decision` about its engine.

    `decision` is null where no engine was found, `divergence` where no earlier request is known.
    """

    explanation: str
    decision: DecisionAnswer | None
    divergence: DivergenceAnswer | None


def summarize(record: RequestRecord) -> RequestSummary:
    """A record without its prompt."""
    return msgspec.convert(record, RequestSummary, from_attributes=True)


def explain(flow: Flow, record: RequestRecord) -> RequestAnswer:
    """A record with the reason of its hit or miss, and where it leaves the earlier request most like it."""
    divergence, placement = flow.requests.divergence(record), record.placement
    is_reusing = flow.ingest is not None
    return RequestAnswer(
        **msgspec.structs.asdict(summarize(record)),
        explanation=explanation(record, divergence, _tokens_per_block(flow.fleet, record)),
        decision=_decision(placement, reuse=is_reusing) if placement is not None else None,
        divergence=_with_text(flow.fleet, record, divergence) if divergence is not None else None,
    )


def explanation(record: RequestRecord, divergence: Divergence | None, tokens_per_block: int) -> str:
    """Why the cache missed or hit, in one sentence."""
    placement = record.placement
    if placement is None:
        return f"not placed: {record.error or 'the request is still being read'}"
    if record.prompt is None or not record.prompt.whole or record.tokens_agree is False:
        return _of_the_unknown(record, placement)
    predicted, reported, total = placement.predicted_tokens, record.reported_tokens, placement.n_tokens
    engine = placement.engine
    if reported is None:
        return f"{engine} did not report cached tokens; predicted were {predicted} of {total} tokens"
    if reported < predicted:
        return (
            f"{engine} reused {reported} of {predicted} predicted tokens: it evicted the others before it "
            "computed the prompt"
        )
    surplus = f"{reported - predicted} more than predicted" if reported > predicted else "as predicted"
    rest = _of_the_rest(record, placement, divergence, tokens_per_block)
    return f"{engine} reused {reported} of {total} tokens, {surplus}; {rest}"


def _of_the_unknown(record: RequestRecord, placement: Placement) -> str:
    """What can be said of a prompt whose tokens are unknown, known in part, or wrong."""
    engine, reported = placement.engine, record.reported_tokens
    if record.tokens_agree is False:
        return f"{engine} tokenised the prompt differently than kvpin, so the prediction does not count"
    if record.prompt is None:
        return "the prompt is not known here, so nothing was predicted: reuse is off, or it is not text"
    reused = "did not report cached tokens" if reported is None else f"reused {reported}"
    return (
        "only the part before the first image is known here: "
        f"{placement.predicted_tokens} of its {placement.n_tokens} tokens were predicted; {engine} {reused}"
    )


def _of_the_rest(
    record: RequestRecord, placement: Placement, divergence: Divergence | None, block: int
) -> str:
    """Why no more tokens were reused."""
    reused = record.reported_tokens or 0
    common = divergence.common_tokens if divergence is not None else 0
    elsewhere = max(placement.costs, key=lambda cost: cost.cached_tokens)
    if elsewhere.cached_tokens > reused:
        return (
            f"{elsewhere.engine} held {elsewhere.cached_tokens}, but {placement.engine} cost less: "
            f"{placement.chosen.total_s * 1000:.1f} ms against {elsewhere.total_s * 1000:.1f} ms"
        )
    if reused >= (placement.n_tokens - 1) // block * block:
        return "these are all its full blocks; the last token is always computed"
    if divergence is None or common == 0:
        return "no recent request begins like it"
    shared = common // block * block
    if shared <= reused:
        note = "" if common >= block else f", within the first block of {block}"
        return f"it differs from request {divergence.request_id} from token {common} on{note}"
    return (
        f"it shares {shared} tokens of full blocks with request {divergence.request_id}, but they were "
        "evicted or flushed before this request came"
    )


def _decision(placement: Placement, *, reuse: bool) -> DecisionAnswer:
    costs = [cost_answer(cost) for cost in placement.costs]
    return DecisionAnswer(**reasons(placement, reuse=reuse), costs=costs)


def _with_text(fleet: Fleet, record: RequestRecord, divergence: Divergence) -> DivergenceAnswer:
    return DivergenceAnswer(
        **msgspec.structs.asdict(divergence),
        text=_decode(fleet, record, divergence.token_ids),
        other_text=_decode(fleet, record, divergence.other_token_ids),
    )


def _decode(fleet: Fleet, record: RequestRecord, token_ids: tuple[int, ...]) -> str | None:
    pool = fleet.pools.get(record.served_as) if record.served_as is not None else None
    prompts = pool.prompts if pool is not None else None
    return prompts.decode(array("i", token_ids)) if prompts is not None else None


def _tokens_per_block(fleet: Fleet, record: RequestRecord) -> int:
    """The block size of the engine that served the request: only full blocks are reused."""
    engine = fleet.engines.get(record.engine) if record.engine is not None else None
    own = engine.info.tokens_per_block if engine is not None and engine.info is not None else None
    return own or TOKENS_PER_BLOCK
