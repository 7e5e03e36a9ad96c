"""One past request: what was predicted, what the engine reported, and why, in one sentence.

Prompt text leaves kvpin here and, if somebody asks, in `prefixes.py`: here the few tokens from the first that
differs, decoded for the operator.
"""

from __future__ import annotations

import msgspec

from engine_adapter.types import TokenIds
from proxy.control.dry_run import CostAnswer, Decision, cost_answer, reasons
from proxy.core.differences import Difference
from proxy.core.first_byte import Part
from proxy.core.misses import Diagnosis, Miss
from proxy.core.placement.decision import Placement
from proxy.core.placement.transfers import TransferResult
from proxy.fleet.fleet import Fleet
from proxy.flow import Flow
from proxy.request.records import RequestFacts, RequestRecord

# Tokens that are shown of each prompt.
_CONTEXT_TOKENS = 16


class RequestSummary(RequestFacts, kw_only=True):
    """One past request, without its prompt. Its times count from its placement.

    Attributes:
        session: the conversation that its client named.
        is_firm: false if the engine may reuse another number of tokens than predicted; null if the prompt is
            not known.
        miss: why no more of the prompt was reused, in one word; null if the request failed or had none.
        is_miss: tokens could have been reused and were not.
        differs_at: the field, message, part and character that differ first from the earlier request.
    """

    session: str | None
    engine: str | None
    n_tokens: int | None
    predicted_tokens: int | None
    is_firm: bool | None
    expected_first_token_s: float | None
    miss: Miss | None
    is_miss: bool
    differs_at: str | None


class DivergenceAnswer(msgspec.Struct, kw_only=True):
    """The first difference of a prompt from the earlier prompt that shares most with it.

    Attributes:
        request_id: the earlier request.
        at: the field, message, part and character that differ first; null where only the tokens are known.
        common_tokens: leading tokens that both share.
        token_ids: this request's tokens, from the first that differs.
        other_token_ids: the earlier request's tokens, from the same position.
        text, other_text: their text.
    """

    request_id: str
    at: Difference | None
    common_tokens: int
    token_ids: list[int]
    other_token_ids: list[int]
    text: str | None
    other_text: str | None


class DecisionAnswer(Decision, kw_only=True):
    """Why a request was placed where it was, with the cost of every engine."""

    costs: list[CostAnswer]


class RequestAnswer(RequestSummary, kw_only=True):
    """One past request, explained: `explanation` is about its cache, `decision` about its engine.

    `decision` is null where no engine was found, `divergence` where no earlier request is known.

    Attributes:
        first_byte_parts: seconds of each part of the time from the request's head to its first byte. They add
            up to it; null without an answer. `engine` is what neither kvpin's steps nor the engine's report
            account for.
    """

    explanation: str
    first_byte_parts: dict[Part, float] | None
    decision: DecisionAnswer | None
    divergence: DivergenceAnswer | None


async def summarize(flow: Flow, record: RequestRecord) -> RequestSummary:
    """A record without its prompt, and why its cache missed."""
    facts = {name: getattr(record, name) for name in RequestFacts.__struct_fields__}
    is_served = record.error is None and record.placement is not None and record.runs_prompt
    diagnosis = await flow.comparison.explain(record) if is_served else None
    return RequestSummary(
        **facts,
        session=record.session.name if record.session is not None else None,
        engine=record.engine,
        n_tokens=record.n_tokens,
        predicted_tokens=record.predicted_tokens,
        is_firm=record.is_firm,
        expected_first_token_s=record.expected_first_token_s,
        miss=diagnosis.miss if diagnosis is not None else None,
        is_miss=diagnosis is not None and diagnosis.miss.is_miss,
        differs_at=str(diagnosis.at) if diagnosis is not None and diagnosis.at is not None else None,
    )


async def explain(flow: Flow, record: RequestRecord) -> RequestAnswer:
    """A record with the reason of its hit or miss, and where it leaves the earlier request most like it."""
    placement, diagnosis = record.placement, await flow.comparison.explain(record)
    is_reusing = flow.ingest is not None
    return RequestAnswer(
        **msgspec.structs.asdict(await summarize(flow, record)),
        explanation=explanation(record, diagnosis),
        first_byte_parts=record.first_byte_parts,
        decision=_decision(record, placement, reuse=is_reusing) if placement is not None else None,
        divergence=_divergence(flow, record, diagnosis),
    )


def explanation(record: RequestRecord, diagnosis: Diagnosis) -> str:
    """Why the request failed, or why the cache missed or hit, in one sentence; that an engine which was to
    compute its prompt gave no KV; and what kvpin changed in the request."""
    without = [f"{engine} {_WITHOUT_KV[result]}" for engine, result in record.legs if result in _WITHOUT_KV]
    changed = [f"kvpin left out or changed {', '.join(record.changed)}"] if record.changed else []
    return "; ".join([_explanation(record, diagnosis), *without, *changed])


_WITHOUT_KV = {
    TransferResult.FAILED: "was to compute the prompt, but no KV came from it",
    TransferResult.LATE: "computed the prompt, but no answer began in time to use its KV",
}


def _explanation(record: RequestRecord, diagnosis: Diagnosis) -> str:
    placement = record.placement
    if placement is None:
        return f"{record.route} was not placed: {record.error or 'kvpin answered it without an engine'}"
    if record.error is not None:
        return f"{record.route} failed on {placement.engine} with status {record.status}: {record.error}"
    if record.prompt is None or not record.prompt.whole or record.tokens_agree is False:
        return _of_the_unknown(record, placement, diagnosis)
    if record.died:
        return f"{_deaths(record)}; {placement.engine} went on with the answer"
    return _of_the_known(record, placement, diagnosis)


def _of_the_known(record: RequestRecord, placement: Placement, diagnosis: Diagnosis) -> str:
    """The explanation for a prompt that an engine computed whole."""
    predicted, reported, total = placement.predicted_tokens, record.reported_tokens, placement.n_tokens
    engine = _computed_by(placement)
    if reported is None:
        return f"{engine} did not report cached tokens; predicted were {predicted} of {total} tokens"
    if reported > predicted and not placement.firm:
        surplus = f"{reported - predicted} more than a prediction that was not firm"
        return f"{engine} reused {reported} of {total} tokens, {surplus}; {diagnosis.detail}"
    if reported < predicted:
        return f"{engine} reused {reported} of {predicted} predicted tokens; {diagnosis.detail}"
    surplus = f"{reported - predicted} more than predicted" if reported > predicted else "as predicted"
    return f"{engine} reused {reported} of {total} tokens, {surplus}; {diagnosis.detail}"


def _computed_by(placement: Placement) -> str:
    """The engine whose cached tokens count: the one that computed the prompt."""
    if placement.chosen.prefiller is not None:
        return f"{placement.chosen.prefiller}, which computed the prompt for {placement.engine},"
    return placement.engine


def _of_the_unknown(record: RequestRecord, placement: Placement, diagnosis: Diagnosis) -> str:
    """The explanation for a prompt whose tokens are unknown, known in part, or wrong."""
    engine, reported = placement.engine, record.reported_tokens
    if record.tokens_agree is False:
        return f"{engine} tokenised the prompt differently than kvpin, so the prediction does not count"
    if not record.runs_prompt:
        return f"{engine} served it; it had no prompt"
    reused = "did not report cached tokens" if reported is None else f"reused {reported}"
    if record.prompt is None and placement.predicted_tokens:
        return (
            f"{engine} tokenised the prompt: {placement.predicted_tokens} of its tokens were predicted then; "
            f"{engine} {reused}; {diagnosis.detail}"
        )
    if record.prompt is None:
        return f"nothing was predicted: {diagnosis.detail}"
    return (
        "only the part before the first image is known here: "
        f"{placement.predicted_tokens} of its {placement.n_tokens} tokens were predicted; {engine} {reused}; "
        f"{diagnosis.detail}"
    )


def _decision(record: RequestRecord, placement: Placement, *, reuse: bool) -> DecisionAnswer:
    costs = [cost_answer(cost) for cost in placement.costs]
    said = reasons(placement, reuse=reuse)
    if record.died:
        sent = placement.n_tokens - (record.n_tokens or placement.n_tokens)
        beside = f", with {sent:,} tokens of the answer in its prompt" if sent > 0 else ""
        said["why"] = f"{_deaths(record)}; for the rest{beside}, {said['why']}"
    return DecisionAnswer(**said, costs=costs)


def _deaths(record: RequestRecord) -> str:
    return f"{' and '.join(record.died)} died in mid-answer"


def _divergence(flow: Flow, record: RequestRecord, diagnosis: Diagnosis) -> DivergenceAnswer | None:
    """The first tokens that differ from the request that it was compared with, and their text."""
    compared = diagnosis.compared
    other = flow.requests.get(compared.request_id) if compared is not None else None
    if compared is None or record.prompt is None or other is None or other.prompt is None:
        return None
    here = slice(compared.common_tokens, compared.common_tokens + _CONTEXT_TOKENS)
    own, others = record.prompt.token_ids[here], other.prompt.token_ids[here]
    return DivergenceAnswer(
        request_id=other.request_id,
        at=diagnosis.at,
        common_tokens=compared.common_tokens,
        token_ids=list(own),
        other_token_ids=list(others),
        text=_decode(flow.fleet, record, own),
        other_text=_decode(flow.fleet, other, others),
    )


def _decode(fleet: Fleet, record: RequestRecord, token_ids: TokenIds[int]) -> str | None:
    pool = fleet.pools.get(record.served_as) if record.served_as is not None else None
    prompts = pool.prompts if pool is not None else None
    return prompts.decode(token_ids) if prompts is not None else None
