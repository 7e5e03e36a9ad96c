"""What every pool and engine holds, believes and has predicted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import anyio

from engine_adapter import EngineError, Tier
from proxy.control.context import Control
from proxy.control.engines import describe_engine
from proxy.control.pinning import active_pins
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.pool import Pool
from proxy.prompt import PromptBuilder

ASK_TIMEOUT_S = 2.0


async def stats(control: Control) -> dict[str, Any]:
    """All of it; engines that do not answer in time are shown with what is known here."""
    own: dict[str, dict[str, Any]] = {}
    async with anyio.create_task_group() as group:
        for pool in control.fleet.pools.values():
            for engine in pool.engines.values():
                group.start_soon(_ask, engine, own)
    pools = [_pool(control, pool, own) for pool in control.fleet.pools.values()]
    lost = [e for e in control.fleet.engines.values() if control.fleet.pool_of(e) is None]
    return {
        "reuse": control.flow.ingest is not None,
        "pools": pools,
        "unconnected": [describe_engine(control, engine) for engine in lost],
        "pins": active_pins(control),
        "totals": _totals(control),
    }


async def _ask(engine: Engine, own: dict[str, dict[str, Any]]) -> None:
    try:
        with anyio.fail_after(ASK_TIMEOUT_S):
            own[engine.id] = await engine.adapter.stats()
    except (EngineError, TimeoutError) as error:
        own[engine.id] = {"error": str(error) or "no answer in time"}


def _pool(control: Control, pool: Pool, own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": pool.model,
        "tokens_per_block": pool.tokens_per_block,
        "index_entries": len(pool.index),
        "adapters": sorted(pool.adapters),
        "tokenisation": _tokenisation(pool.prompts) if pool.prompts is not None else None,
        "engines": [_engine(control, pool, engine, own) for engine in pool.engines.values()],
    }


def _tokenisation(prompts: PromptBuilder) -> dict[str, Any]:
    """How prompts become tokens, and whether the engines make the same of them."""
    return {**asdict(prompts.exactness), "agreed": prompts.agreed, "differed": prompts.differed}


def _engine(control: Control, pool: Pool, engine: Engine, own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    audit = engine.audit.view()
    answer = own.get(engine.id, {})
    return {
        **describe_engine(control, engine),
        "audit": {
            "checked": audit.checked,
            "exact": audit.exact,
            "predicted_tokens": audit.predicted_tokens,
            "reported_tokens": audit.reported_tokens,
            "recent_miss_share": audit.recent_miss_share,
        },
        "restored_ahead": asdict(engine.ahead),
        "blocks": {tier.value: pool.index.held(engine.id, tier) for tier in Tier},
        "kv": {} if "error" in answer else answer,
        "kv_error": answer.get("error"),
    }


def _totals(control: Control) -> dict[str, int]:
    engines = list(control.fleet.engines.values())
    audits = [engine.audit.view() for engine in engines]
    return {
        "engines": len(engines),
        "ready": sum(engine.state is EngineState.READY for engine in engines),
        "in_flight": sum(engine.ledger.in_flight for engine in engines),
        "served": sum(engine.ledger.served for engine in engines),
        "index_entries": sum(len(pool.index) for pool in control.fleet.pools.values()),
        "predictions_checked": sum(audit.checked for audit in audits),
        "predictions_exact": sum(audit.exact for audit in audits),
        "predicted_cached_tokens": sum(audit.predicted_tokens for audit in audits),
        "reported_cached_tokens": sum(audit.reported_tokens for audit in audits),
    }
