"""What the admin API says of engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from time import monotonic, time

import msgspec

from engine_adapter import Finding, ModelState, Role
from proxy.core.audit import Trust
from proxy.core.engine_book import EngineBook
from proxy.fleet.destinations import of_role, of_sharing
from proxy.fleet.engine import DrainReason, Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.fleet.tokenisation import of_tokens
from proxy.settings import EngineSettings

# A removed engine that nothing names is listed for this long.
_RECENT_S = 86_400.0


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


def describe_engine(engine: Engine, pool: Pool | None) -> EngineAnswer:
    """An engine, and its pool where it is in one, as the admin API tells it."""
    spec, info, audit = engine.adapter.spec, engine.info, engine.audit.view()
    load = engine.ledger.view(monotonic())
    rates = pool.placer.books[engine.id].rates if pool is not None else None
    return EngineAnswer(
        id=engine.id,
        kind=spec.kind,
        role=engine.role,
        url=spec.url,
        state=engine.state,
        process=engine.process.describe() if engine.process is not None else None,
        model=pool.model if pool is not None else spec.model,
        model_state=engine.adapter.model_state,
        version=info.version if info is not None else "",
        capabilities=sorted(info.capabilities) if info is not None else [],
        loras=sorted(engine.loras),
        tokens_per_block=info.tokens_per_block if info is not None else None,
        max_model_len=info.max_model_len if info is not None else None,
        trust=audit.trust,
        why=audit.why,
        in_flight=engine.in_flight,
        decoding=load.decoding,
        queue_s=load.queue_s,
        served=engine.served,
        prefilled=engine.prefilled,
        failed=engine.failed,
        prefill_tok_s=rates.prefill_tok_s if rates is not None else None,
        last_error=(engine.process.error if engine.process is not None else None) or engine.last_error,
        owner=engine.owner,
        findings=[str(each) for each in _findings_of(engine, pool)],
    )


def _findings_of(engine: Engine, pool: Pool | None) -> tuple[Finding, ...]:
    of_pool = (*of_role(engine, pool), *of_sharing(engine, pool), *of_tokens(engine, pool))
    return (*of_pool, *engine.findings(), *engine.adapter.findings())


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
    described = msgspec.structs.asdict(describe_engine(engine, fleet.pool_of(engine)))
    return DrainedEngine(**described, warning=warning)


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


def removed_engines(book: EngineBook, known: Mapping[str, EngineSettings]) -> list[RemovedEngine]:
    """The engines that operators have removed, the last first: those that settings or sources name, which are
    the `known` ones, and those of the last day."""
    since = time() - _RECENT_S
    return [
        RemovedEngine(
            engine=place_of(mark.engine),
            removed=datetime.fromtimestamp(mark.at, UTC).replace(microsecond=0),
            named=mark.engine in known,
            undo=undo_of(known.get(mark.engine)),
        )
        for mark in book.removals()
        if mark.engine in known or mark.at >= since
    ]


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
