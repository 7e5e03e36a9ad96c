"""Where a request goes, and why: one that is not sent (`route`), and past ones (`summarize`, `explain`).

A dry run changes nothing. Of a past request, one sentence tells what was predicted, what the engine reported,
and why. The reasons in it come from `core/reasons.py`.

Prompt text leaves kvpin here and, if somebody asks, in `prefixes.py`: here the few tokens from the first that
differs, decoded for the operator.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine_adapter import Headers, JsonBody
from engine_adapter.types import TokenIds
from proxy.core.audit import Trust
from proxy.core.differences import Difference
from proxy.core.misses import Diagnosis, Miss, detail_of
from proxy.core.placement.decision import Cost, Placement
from proxy.core.placement.pairs import TransferResult
from proxy.core.reasons import Reason, TtfbPart, reason_of, tie_of, utilisation_of, why
from proxy.errors import NotFound
from proxy.fleet.fleet import Fleet
from proxy.flow import Flow
from proxy.request.calls import Call, session_of
from proxy.request.records import RequestFacts, RequestRecord
from proxy.request.translate import CHAT_PATH

_NO_TENANT = (
    "no tenant is named, and each tenant's KV is kept apart: none of it counts here; tenant (--tenant NAME) "
    "says whose KV counts"
)
# Tokens that are shown of each prompt.
_CONTEXT_TOKENS = 16


class CostAnswer(Cost, frozen=True, kw_only=True):
    """Cost of a request on an engine, term by term, in seconds. The lowest `total_s` wins.

    `first_token_s` is the time that the request itself waits for its first token. It leaves out `stall_s`,
    `congestion_s`, `regret_s` and `again_s`, which other requests pay, and `later_s`, which the
    conversation's next turns pay. `regret_s` is null where the engine already cost more without it. Totals
    within a millisecond are equal: `is_last`, `free_blocks` and `turn` then decide.
    """

    first_token_s: float
    total_s: float


class CandidateAnswer(CostAnswer, frozen=True, kw_only=True):
    """A cost with what it follows from: how much the view is trusted, and prompt tokens held on each tier."""

    trust: Trust
    matched_tokens: dict[str, int]


class Decision(msgspec.Struct, kw_only=True):
    """A placement and its reasons. `tie` is null where costs decided.

    At this `utilisation` of the engines, a second of prefill counts as `strain` seconds.
    """

    rule: str
    reason: Reason
    why: str
    tie: str | None
    utilisation: float
    strain: float


class RouteAnswer(Decision, kw_only=True):
    """The placement that a request would get, and why.

    `n_tokens` and `blocks` are null when the prompt is not known here, `lora` when the request names no
    LoRA adapter.

    Attributes:
        is_firm: false if the engine may reuse another number of tokens than predicted; null when the prompt
            is not known here.
        note: what the answer leaves out; null for nothing.
    """

    model: str
    lora: str | None
    path: str
    n_tokens: int | None
    blocks: int | None
    tokens_per_block: int
    engine: str
    predicted_tokens: int
    is_firm: bool | None
    note: str | None
    candidates: list[CandidateAnswer]


class RequestShown(RequestFacts, kw_only=True):
    """A request with what was predicted of it.

    Attributes:
        session: the conversation that its client named.
        is_firm: false if the engine may reuse another number of tokens than predicted; null if the prompt is
            not known.
    """

    session: str | None
    engine: str | None
    n_tokens: int | None
    predicted_tokens: int | None
    is_firm: bool | None
    expected_first_token_s: float | None


class RequestSummary(RequestShown, kw_only=True):
    """One past request, without its prompt. Its times count from its placement.

    Attributes:
        miss: why no more of the prompt was reused, in one word; null if the request failed or had none.
        is_miss: tokens could have been reused and were not.
        differs_at: the field, message, part and character that differ first from the earlier request.
    """

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
    first_byte_parts: dict[TtfbPart, float] | None
    decision: DecisionAnswer | None
    divergence: DivergenceAnswer | None


def facts_of(record: RequestRecord) -> dict[str, Any]:
    """The fields of a `RequestShown`."""
    said = {name: getattr(record, name) for name in RequestShown.__struct_fields__}
    return {**said, "session": record.session.name if record.session is not None else None}


async def route(
    flow: Flow, body: JsonBody, path: str | None = None, tenant: str | None = None
) -> RouteAnswer:
    """Places the request in `body`, and sends nothing. `path` is its route [by its fields], `tenant` its
    sender; the body has these two beside the request's own fields.

    Raises:
        BadRequest, ChatError, PromptTableError: a field is wrong.
        NotFound: no such model or tenant.
        NoEngine: no engine is ready.
    """
    if tenant is not None and tenant not in flow.tenants.names:
        raise NotFound(f"there is no tenant {tenant!r}", param="tenant")
    path = path or (CHAT_PATH if "messages" in body or "prompt" not in body else "/v1/completions")
    asked = body.replace(path=None, tenant=None)
    session = session_of(tenant, Headers([]), asked)
    ready = await flow.preparation.prepare(
        Call("route", "POST", path, Headers([]), asked, tenant=tenant, session=session)
    )
    pool, chain = ready.pool, ready.chain
    candidates = flow.candidates(ready)
    if not candidates:
        raise flow.fleet.none_ready(pool, ready.lora)
    placement = flow.choose(ready, candidates)
    matches = {candidate.engine: candidate.match for candidate in candidates}
    return RouteAnswer(
        model=pool.model,
        lora=ready.lora,
        path=path,
        n_tokens=chain.n_tokens if chain is not None else None,
        blocks=len(chain.hashes) if chain is not None else None,
        tokens_per_block=pool.tokens_per_block,
        engine=placement.engine,
        predicted_tokens=placement.predicted_tokens,
        is_firm=placement.firm if chain is not None else None,
        note=_NO_TENANT if tenant is None and flow.tenants.isolated else None,
        **_decided(placement, flow),
        candidates=[
            CandidateAnswer(
                **msgspec.structs.asdict(cost),
                first_token_s=cost.first_token_s,
                total_s=cost.total_s,
                trust=pool.engines[cost.engine].audit.trust,
                matched_tokens=matches[cost.engine].tokens(pool.tokens_per_block),
            )
            for cost in placement.costs
        ],
    )


def _decided(placement: Placement, flow: Flow) -> dict[str, Any]:
    """The fields of a `Decision`."""
    return {
        "rule": placement.rule,
        "reason": reason_of(placement),
        "why": why(placement, is_reusing=flow.attempts.ingest is not None),
        "tie": tie_of(placement),
        "utilisation": utilisation_of(placement),
        "strain": placement.strain,
    }


async def summarize(flow: Flow, record: RequestRecord) -> RequestSummary:
    """A record without its prompt, and why its cache missed."""
    is_served = record.error is None and record.placement is not None and record.runs_prompt
    diagnosis = await flow.comparison.explain(record) if is_served else None
    return RequestSummary(
        **facts_of(record),
        miss=diagnosis.miss if diagnosis is not None else None,
        is_miss=diagnosis is not None and diagnosis.miss.is_miss,
        differs_at=str(diagnosis.at) if diagnosis is not None and diagnosis.at is not None else None,
    )


async def explain(flow: Flow, record: RequestRecord) -> RequestAnswer:
    """A record with the reason of its hit or miss, and where it leaves the earlier request most like it."""
    placement, diagnosis = record.placement, await flow.comparison.explain(record)
    return RequestAnswer(
        **msgspec.structs.asdict(await summarize(flow, record)),
        explanation=explanation(record, diagnosis),
        first_byte_parts=record.first_byte_parts,
        decision=_decision(flow, record, placement) if placement is not None else None,
        divergence=_divergence(flow, record, diagnosis),
    )


def explanation(record: RequestRecord, diagnosis: Diagnosis) -> str:
    """Why the request failed, or why the cache missed or hit, in one sentence; that an engine which was to
    compute its prompt gave no KV; and what kvpin changed in the request."""
    placement = record.placement
    if placement is None:
        said = f"{record.route} was not placed: {record.error or 'kvpin answered it without an engine'}"
    elif record.error is not None:
        said = f"{record.route} failed on {placement.engine} with status {record.status}: {record.error}"
    elif record.tokens_agree is False or record.prompt is None or not record.prompt.whole:
        said = _of_the_unknown(record, placement, diagnosis)
    elif record.died:
        said = f"{_deaths(record)}; {placement.engine} went on with the answer"
    else:
        said = _of_the_known(record, placement, diagnosis)
    without = [f"{engine} {_WITHOUT_KV[result]}" for engine, result in record.legs if result in _WITHOUT_KV]
    changed = [f"kvpin left out or changed {', '.join(record.changed)}"] if record.changed else []
    return "; ".join([said, *without, *changed])


_WITHOUT_KV = {
    TransferResult.FAILED: "was to compute the prompt, but no KV came from it",
    TransferResult.LATE: "computed the prompt, but no answer began in time to use its KV",
}


def _of_the_known(record: RequestRecord, placement: Placement, diagnosis: Diagnosis) -> str:
    """The explanation for a prompt that an engine computed whole."""
    engine, predicted, total = placement.engine, placement.predicted_tokens, placement.n_tokens
    if placement.chosen.prefiller is not None:
        engine = f"{placement.chosen.prefiller}, which computed the prompt for {engine},"
    if (reported := record.reported_tokens) is None:
        return f"{engine} did not report cached tokens; predicted were {predicted} of {total} tokens"
    if reported < predicted:
        return f"{engine} reused {reported} of {predicted} predicted tokens; {detail_of(diagnosis)}"
    expected = "predicted" if placement.firm else "a prediction that was not firm"
    surplus = f"{reported - predicted} more than {expected}" if reported > predicted else "as predicted"
    return f"{engine} reused {reported} of {total} tokens, {surplus}; {detail_of(diagnosis)}"


def _of_the_unknown(record: RequestRecord, placement: Placement, diagnosis: Diagnosis) -> str:
    """The explanation for a prompt whose tokens are unknown, known in part, or wrong."""
    engine, predicted, reported = placement.engine, placement.predicted_tokens, record.reported_tokens
    if record.tokens_agree is False:
        return f"{engine} tokenised the prompt differently than kvpin, so the prediction does not count"
    if not record.runs_prompt:
        return f"{engine} served it; it had no prompt"
    if record.prompt is not None:
        known = "only the part before the first image is known here: "
        said = f"{known}{predicted} of its {placement.n_tokens} tokens were predicted"
    elif predicted:
        said = f"{engine} tokenised the prompt: {predicted} of its tokens were predicted then"
    else:
        return f"nothing was predicted: {detail_of(diagnosis)}"
    reused = "did not report cached tokens" if reported is None else f"reused {reported}"
    return f"{said}; {engine} {reused}; {detail_of(diagnosis)}"


def _decision(flow: Flow, record: RequestRecord, placement: Placement) -> DecisionAnswer:
    costs = [
        CostAnswer(**msgspec.structs.asdict(cost), first_token_s=cost.first_token_s, total_s=cost.total_s)
        for cost in placement.costs
    ]
    said = _decided(placement, flow)
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
