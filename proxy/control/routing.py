"""A dry run of placement: where a request would go now, and why. Changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_adapter import JsonBody
from proxy.control.context import Control
from proxy.core.placement.decision import Candidate, Cost, Placement
from proxy.errors import BadRequest, NotFound
from proxy.fleet.pool import Pool, no_engine_for
from proxy.observe.reasons import first_token_s, reason_of, tie_of, utilisation_of, why
from proxy.request.calls import Call

CHAT = "/v1/chat/completions"


async def route(control: Control, body: JsonBody) -> dict[str, Any]:
    """Where the request of `body` would go. Beside the request's own fields it may hold `path`, the route
    it is meant for, and `tenant`, who would send it.

    Raises:
        BadRequest, ChatError, PromptTableError: a field is wrong.
        NotFound: no such model or tenant.
        NoEngine: no engine is ready.
    """
    path, tenant = _text(body, "path") or _path_of(body), _text(body, "tenant")
    if tenant is not None and tenant not in control.tenants.names:
        raise NotFound(f"there is no tenant {tenant!r}", param="tenant")
    _text(body, "model")
    call = Call("route", "POST", path, {}, body.replace(path=None, tenant=None), tenant)
    ready = await control.flow.prepare(call)
    pool, chain = ready.pool, ready.chain
    candidates = control.flow.candidates(ready)
    if not candidates:
        raise no_engine_for(ready.adapter)
    placement = pool.place(candidates, chain)
    by_engine = {candidate.engine: candidate for candidate in candidates}
    return {
        "model": pool.model,
        "adapter": ready.adapter,
        "path": path,
        "n_tokens": chain.n_tokens if chain is not None else None,
        "blocks": len(chain.hashes) if chain is not None else None,
        "tokens_per_block": pool.tokens_per_block,
        "engine": placement.engine,
        "predicted_tokens": placement.predicted_tokens,
        **describe(placement, reuse=control.flow.ingest is not None),
        "candidates": [_candidate(pool, by_engine[cost.engine], cost) for cost in placement.costs],
    }


def describe(placement: Placement, *, reuse: bool) -> dict[str, Any]:
    """A decision and what it came of, but for the costs."""
    unknown = "the prompt is not known here" if reuse else "reuse is off"
    return {
        "rule": placement.rule,
        "reason": reason_of(placement).value,
        "why": why(placement, unknown=unknown),
        "tie": tie_of(placement),
        "utilisation": utilisation_of(placement),
        "strain": placement.strain,
    }


def describe_cost(cost: Cost) -> dict[str, Any]:
    """A cost as the admin API shows it."""
    return {**msgspec.structs.asdict(cost), "first_token_s": first_token_s(cost)}


def _candidate(pool: Pool, candidate: Candidate, cost: Cost) -> dict[str, Any]:
    engine, match = pool.engines[candidate.engine], candidate.match
    tiers = {"gpu": match.gpu, "host": match.host, "disk": match.disk, "pending": match.pending}
    return {
        **describe_cost(cost),
        "trust": engine.audit.trust.value,
        "matched_tokens": {tier: blocks * pool.tokens_per_block for tier, blocks in tiers.items()},
        "free_blocks": candidate.free_blocks,
    }


def _path_of(body: JsonBody) -> str:
    return CHAT if "messages" in body or "prompt" not in body else "/v1/completions"


def _text(body: JsonBody, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} must be a string", param=name)
    return value
