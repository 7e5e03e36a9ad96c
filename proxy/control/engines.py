"""What the admin API says of engines and pools: their state, their content, and the quality of
predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from time import monotonic, time
from typing import Any, TypeVar

import anyio
import msgspec

from engine_adapter import EngineError, ModelState, Role, Tier
from proxy.control.kv import PinAnswer
from proxy.core.audit import AuditView, Trust, Unchecked
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.destinations import of_role, of_sharing
from proxy.fleet.engine import DrainReason, Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.fleet.tokenisation import of_tokens
from proxy.peers.peer import ExchangeStats
from proxy.peers.peers import Peers
from proxy.prompt import Exactness
from proxy.settings import EngineSettings

# --- what the admin API says of engines -----------------------------------------------------------------


class EngineAnswer(msgspec.Struct, kw_only=True):
    """One engine as kvpin sees it, without its key.

    `role` is the part of requests that it is meant for. `process` is null for an engine that kvpin does not
    run itself. `trust` is `precise` while its KV events are healthy, and `why` says why. `model_state` is
    null, but for an engine that loads and unloads its model: `loaded`, `loading`, `sleeping`, `unloaded`,
    `downloading` or `failed`. `served`, `prefilled` and `failed` count requests of this kvpin that are over:
    `prefilled` those whose prompt it computed for another engine, `failed` those whose answer was an error,
    or that got none. `in_flight` counts those of all kvpins.
    `owner` is the kvpin that uses the engine, if only one may; if it is another one that answers this one's
    requests, there is no `last_error`. Each of `findings` names something that keeps kvpin from using the
    engine fully, and the remedy.
    """

    id: str
    kind: str
    role: Role
    url: str
    state: EngineState
    process: dict[str, str | int | None] | None
    model: str | None
    model_state: ModelState | None
    version: str
    capabilities: list[str]
    loras: list[str]
    tokens_per_block: int | None
    max_model_len: int | None
    trust: Trust
    why: str
    in_flight: int
    decoding: int
    queue_s: float
    served: int
    prefilled: int
    failed: int
    prefill_tok_s: float | None
    last_error: str | None
    owner: str | None
    findings: list[str]


class RemovalAnswer(msgspec.Struct, kw_only=True):
    """An engine that an operator has removed. `warning` says which models have no engine now, and whether
    other kvpins do not hear of the order; null if there is nothing to warn of."""

    id: str
    warning: str | None


class DrainedEngine(EngineAnswer, kw_only=True):
    """An engine that an operator drains, or lets take requests again. `warning` says which models have no
    engine now, and whether other kvpins do not hear of the order; null if there is nothing to warn of."""

    warning: str | None


class RemovedEngine(msgspec.Struct, kw_only=True):
    """An engine that an operator has removed.

    `engine` is its address, what tells it from others there, and the machine, where only that one reaches the
    address. `named`: settings or sources name it, so it would be used. `undo` is the command that brings it
    back.
    """

    engine: str
    removed: datetime
    named: bool
    undo: str


_Answer = TypeVar("_Answer", bound=EngineAnswer)
# What an `Engine` calls by the same name.
_ALIKE = ("id", "role", "state", "in_flight", "served", "prefilled", "failed", "owner")


def describe_engine(
    engine: Engine,
    pool: Pool | None,
    as_a: type[_Answer] = EngineAnswer,  # type: ignore[assignment]  # the default of a type variable
    **more: Any,  # noqa: ANN401 - they are of several types
) -> _Answer:
    """An engine, and its pool where it is in one, as the admin API tells it. `more` are the fields that
    `as_a` has beyond those of an `EngineAnswer`."""
    spec, info = engine.adapter.spec, engine.info
    load = engine.ledger.view(monotonic())
    rates = pool.placer.books[engine.id].rates if pool is not None else None
    findings = (*of_role(engine, pool), *of_sharing(engine, pool), *of_tokens(engine, pool))
    findings = (*findings, *engine.findings(), *engine.adapter.findings())
    return as_a(
        **{name: getattr(engine, name) for name in _ALIKE},
        kind=spec.kind,
        url=spec.url,
        process=engine.process.describe() if engine.process is not None else None,
        model=pool.model if pool is not None else spec.model,
        model_state=engine.adapter.model_state,
        version=info.version if info is not None else "",
        capabilities=sorted(info.capabilities) if info is not None else [],
        loras=sorted(engine.loras),
        tokens_per_block=info.tokens_per_block if info is not None else None,
        max_model_len=info.max_model_len if info is not None else None,
        trust=engine.audit.trust,
        why=engine.audit.why,
        decoding=load.decoding,
        queue_s=load.queue_s,
        prefill_tok_s=rates.prefill_tok_s if rates is not None else None,
        last_error=(engine.process.error if engine.process is not None else None) or engine.last_error,
        findings=[str(each) for each in findings],
        **more,
    )


def describe_drained(engine: Engine, fleet: Fleet, *, is_told: bool) -> DrainedEngine:
    """An engine that was just drained, or is no longer, and what that means for its models.

    `is_told`: other kvpins, if there are any, hear of it now."""
    names = names_served(engine, fleet) if engine.state is EngineState.DRAINING else ()
    others = "; ".join(sorted(engine.drains - {DrainReason.ORDERED}))
    undo = "they get 503 no_engine"
    if not others:
        undo += f"; kvpin engines drain {engine.id} --undo ends that"
    warning = warning_of(fleet, names, undo, is_told=is_told)
    if others:
        warning = "; ".join(filter(None, (f"{engine.id} drains whatever is ordered: {others}", warning)))
    return describe_engine(engine, fleet.pool_of(engine), DrainedEngine, warning=warning)


def names_served(engine: Engine, fleet: Fleet) -> frozenset[str]:
    """The model and the LoRA adapters of an engine; none while it is not connected."""
    pool = fleet.pool_of(engine)
    return frozenset({pool.model, *engine.loras}) if pool is not None else frozenset()


def warning_of(fleet: Fleet, names: Collection[str], undo: str, *, is_told: bool) -> str | None:
    """What an operator should know after an order about an engine that served `names`; None if nothing.
    `undo` says what their requests get, and the command that undoes the order."""
    warnings = list[str]()
    if lost := sorted(set(names).intersection(fleet.unserved(names))):
        warnings.append(f"no engine takes requests for {', '.join(lost)} now: {undo}")
    if not is_told:
        warnings.append("the exchange is gone: other kvpins follow this order when it is back")
    return "; ".join(warnings) or None


def place_of(order: str) -> str:
    """The name of an engine in operators' orders, for people: where only one machine reaches the address, it
    begins with the machine."""
    machine, _, address = order.partition(" ")
    return order if "://" in machine else f"{address} on {machine}, the machine of its kvpin"


def undo_of(entry: EngineSettings | None) -> str:
    """The command that brings a removed engine back: what tells it from others, without secrets."""
    if entry is None:
        return "kvpin engines add KIND=URL"
    spec = entry.spec()
    more = {"model": spec.model, "dp_rank": spec.options.rank, "headers": "…" if spec.headers else None}
    parts = (f",{name}={value}" for name, value in more.items() if value is not None)
    return f"kvpin engines add {spec.kind}={spec.url}{''.join(parts)}"


# --- stats ----------------------------------------------------------------------------------------------
# Statistics: content of pools and engines, kvpin's trust in its view of it, and quality of predictions.

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
        left_s = pin.expires - time()
        if left_s > 0 and pin.pin_id not in known:
            yield PinAnswer(pin.pin_id, pin.label, pin.engines, pin.blocks, left_s, kvpin)


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
    return describe_engine(
        engine,
        pool,
        EngineStats,
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
