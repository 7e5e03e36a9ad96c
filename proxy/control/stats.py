"""Statistics: content of pools and engines, kvpin's trust in its view of it, and quality of predictions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import msgspec

from engine_adapter import EngineError, Tier
from proxy.control.engines import EngineAnswer, describe_engine
from proxy.control.pinning import PinAnswer
from proxy.core.audit import AuditView, Unchecked
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.peers.peer import ExchangeStats
from proxy.peers.peers import Peers
from proxy.prompt import Exactness

ASK_TIMEOUT_S = 2.0


class EngineStats(EngineAnswer, kw_only=True):
    """An engine with its audit, what was restored ahead of need, and its KV.

    `blocks` are those the index knows of, by tier. `kv` holds the engine's own statistics, `kv_error` why it
    did not tell them.
    """

    audit: AuditView
    restored_ahead: AheadCounts
    blocks: dict[str, int]
    kv: dict[str, Any]
    kv_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenisation(Exactness):
    """State of a pool's tokenisation: who tokenises, and whether kvpin's tokens are known to be the engine's.

    `agreed` and `differed` count served prompts for which an engine reported the same tokens, or others.
    """

    agreed: int
    differed: int


class PoolStats(msgspec.Struct, kw_only=True):
    """Engines that serve one model and its LoRA adapters, and the number of blocks in their index."""

    model: str
    loras: list[str]
    tokens_per_block: int
    index_entries: int
    tokenisation: Tokenisation | None
    engines: list[EngineStats]


class Totals(msgspec.Struct, kw_only=True):
    """Sums over all engines. `elsewhere` counts those that another kvpin uses for this one.
    `predicted_cached_tokens` and `reported_cached_tokens` are those of checked predictions, `cached_tokens`
    all that engines reported."""

    engines: int
    ready: int
    elsewhere: int
    in_flight: int
    served: int
    failed: int
    index_entries: int
    predictions_checked: int
    predictions_exact: int
    predictions_unchecked: dict[Unchecked, int]
    predicted_cached_tokens: int
    reported_cached_tokens: int
    cached_tokens: int


class Stats(msgspec.Struct, kw_only=True):
    """Everything kvpin knows now. `reuse` is false when it only balances load, `exchange` is null for one
    kvpin. `passed_on` counts the requests that other kvpins answered for this one, by their names."""

    reuse: bool
    pools: list[PoolStats]
    unconnected: list[EngineAnswer]
    pins: list[PinAnswer]
    totals: Totals
    exchange: ExchangeStats | None
    passed_on: dict[str, int]


async def stats(fleet: Fleet, pins: list[PinAnswer], peers: Peers | None = None, *, reuse: bool) -> Stats:
    """The statistics. Each engine is asked for its own; without an answer in time it is shown without."""
    own: dict[str, dict[str, Any]] = {}
    async with anyio.create_task_group() as group:
        for pool in fleet.pools.values():
            for engine in pool.engines.values():
                group.start_soon(_ask, engine, own)
    pools = [_pool(fleet, pool, own) for pool in fleet.pools.values()]
    unconnected = [engine for engine in fleet.engines.values() if fleet.pool_of(engine) is None]
    return Stats(
        reuse=reuse,
        pools=pools,
        unconnected=[describe_engine(engine, None) for engine in unconnected],
        pins=[*pins, *(_pins_elsewhere(pins, peers) if peers is not None else ())],
        totals=_totals(fleet),
        exchange=peers.stats() if peers is not None else None,
        passed_on=dict(fleet.passed_on),
    )


def _pins_elsewhere(own: list[PinAnswer], peers: Peers) -> Iterator[PinAnswer]:
    known = {pin.pin_id for pin in own}  # kvpins that follow each other may share a state_dir
    for kvpin, pin in peers.pins():
        left_s = pin.expires - time.time()
        if left_s > 0 and pin.pin_id not in known:
            yield PinAnswer(
                pin_id=pin.pin_id,
                target=pin.label,
                engines=pin.engines,
                blocks=pin.blocks,
                expires_in_s=left_s,
                kvpin=kvpin,
            )


async def _ask(engine: Engine, own: dict[str, dict[str, Any]]) -> None:
    try:
        with anyio.fail_after(ASK_TIMEOUT_S):
            own[engine.id] = await engine.adapter.stats()
    except (EngineError, TimeoutError) as error:
        own[engine.id] = {"error": str(error) or "the engine did not answer in time"}


def _pool(fleet: Fleet, pool: Pool, own: dict[str, dict[str, Any]]) -> PoolStats:
    prompts = pool.prompts
    return PoolStats(
        model=pool.model,
        loras=sorted(pool.loras),
        tokens_per_block=pool.tokens_per_block,
        index_entries=len(pool.index),
        tokenisation=Tokenisation(
            **asdict(prompts.exactness), agreed=prompts.agreed, differed=prompts.differed
        )
        if prompts is not None
        else None,
        engines=[_engine(pool, engine, own.get(engine.id, {})) for engine in fleet.engines_of(pool)],
    )


def _engine(pool: Pool, engine: Engine, own: dict[str, Any]) -> EngineStats:
    return EngineStats(
        **msgspec.structs.asdict(describe_engine(engine, pool)),
        audit=engine.audit.view(),
        restored_ahead=engine.ahead,
        blocks={tier.value: pool.index.held(engine.id, tier) for tier in Tier},
        kv={} if "error" in own else own,
        kv_error=own.get("error"),
    )


def _totals(fleet: Fleet) -> Totals:
    engines = list(fleet.engines.values())
    audits = [engine.audit.view() for engine in engines]
    return Totals(
        engines=len(engines),
        ready=sum(engine.state is EngineState.READY for engine in engines),
        elsewhere=sum(engine.is_served_there for engine in engines),
        in_flight=sum(engine.in_flight for engine in engines),
        served=sum(engine.served for engine in engines),
        failed=sum(engine.failed for engine in engines),
        index_entries=sum(len(pool.index) for pool in fleet.pools.values()),
        predictions_checked=sum(audit.checked for audit in audits),
        predictions_exact=sum(audit.exact for audit in audits),
        predictions_unchecked=dict(sum((Counter(audit.unchecked) for audit in audits), Counter())),
        predicted_cached_tokens=sum(audit.predicted_tokens for audit in audits),
        reported_cached_tokens=sum(audit.reported_tokens for audit in audits),
        cached_tokens=sum(audit.cached_tokens for audit in audits),
    )
