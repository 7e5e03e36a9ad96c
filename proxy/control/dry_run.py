"""A dry run of placement: where a request would go now, and why. It changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_adapter import Headers, JsonBody
from proxy.core.audit import Trust
from proxy.core.placement.decision import Candidate, Cost, Placement
from proxy.errors import BadRequest, NotFound
from proxy.fleet.pool import Pool
from proxy.flow import Flow
from proxy.observe.reasons import Reason, reason_of, tie_of, utilisation_of, why
from proxy.request.calls import Call
from proxy.request.session import session_of

CHAT = "/v1/chat/completions"


class CostAnswer(Cost, frozen=True, kw_only=True):
    """Cost of a request on an engine, term by term, in seconds. The lowest `total_s` wins.

    `first_token_s` is the time that the request itself waits for its first token. It leaves out
    `congestion_s`, `regret_s` and `again_s`, which other requests pay, and `later_s`, which the
    conversation's next turns pay. `regret_s` is null where the engine already cost more without it. Totals
    within a millisecond are equal: `is_last`, `free_blocks` and `turn` then decide.
    """

    first_token_s: float


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
    candidates: list[CandidateAnswer]


async def route(flow: Flow, body: JsonBody) -> RouteAnswer:
    """Places the request in `body`, and sends nothing. Beside the request's own fields, `path` may name its
    route and `tenant` its sender.

    Raises:
        BadRequest, ChatError, PromptTableError: a field is wrong.
        NotFound: no such model or tenant.
        NoEngine: no engine is ready.
    """
    usual = CHAT if "messages" in body or "prompt" not in body else "/v1/completions"
    path, tenant = _text(body, "path") or usual, _text(body, "tenant")
    if tenant is not None and tenant not in flow.tenants.names:
        raise NotFound(f"there is no tenant {tenant!r}", param="tenant")
    _text(body, "model")
    asked = body.replace(path=None, tenant=None)
    session = session_of(tenant, Headers([]), asked)
    ready = await flow.prepare(
        Call("route", "POST", path, Headers([]), asked, tenant=tenant, session=session)
    )
    pool, chain = ready.pool, ready.chain
    candidates = flow.candidates(ready)
    if not candidates:
        raise flow.fleet.none_ready(pool, ready.lora)
    placement = flow.choose(ready, candidates)
    by_engine = {candidate.engine: candidate for candidate in candidates}
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
        **reasons(placement, reuse=flow.ingest is not None),
        candidates=[_candidate(pool, by_engine[cost.engine], cost) for cost in placement.costs],
    )


def reasons(placement: Placement, *, reuse: bool) -> dict[str, Any]:
    """The fields of a `Decision`."""
    return {
        "rule": placement.rule,
        "reason": reason_of(placement),
        "why": why(placement, unknown="the prompt is not known here" if reuse else "reuse is off"),
        "tie": tie_of(placement),
        "utilisation": utilisation_of(placement),
        "strain": placement.strain,
    }


def cost_answer(cost: Cost) -> CostAnswer:
    """A cost as the admin API tells it."""
    return msgspec.convert(cost, CostAnswer, from_attributes=True)


def _candidate(pool: Pool, candidate: Candidate, cost: Cost) -> CandidateAnswer:
    return CandidateAnswer(
        **msgspec.structs.asdict(cost_answer(cost)),
        trust=pool.engines[candidate.engine].audit.trust,
        matched_tokens=candidate.match.tokens(pool.tokens_per_block),
    )


def _text(body: JsonBody, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} must be a string", param=name)
    return value
