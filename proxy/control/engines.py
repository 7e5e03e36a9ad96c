"""Engines come and go while kvpin runs."""

from __future__ import annotations

from itertools import count
from time import monotonic
from typing import Any

from engine_adapter import EngineSpec
from proxy.control.context import Control
from proxy.errors import Conflict
from proxy.fleet.engine import Engine, EngineState


def add_engine(control: Control, spec: EngineSpec) -> Engine:
    """Takes an engine in and looks after it; without an id it gets the first free `<kind>-<number>`.

    Raises:
        Conflict: an engine of that id exists.
        EngineSpecError: the description cannot be used.
    """
    if spec.id in control.fleet.engines:
        raise Conflict(f"an engine with id {spec.id!r} exists", param="id")
    engine = control.fleet.add(control.make_adapter(spec))
    control.monitor.watch(engine)
    return engine


def free_id(control: Control, kind: str) -> str:
    """The first free `<kind>-<number>`."""
    return next(name for n in count() if (name := f"{kind}-{n}") not in control.fleet.engines)


async def remove_engine(control: Control, engine_id: str) -> None:
    """Drops an engine; its requests in flight end as they would.

    Raises:
        NotFound: there is none of that id.
        Conflict: kvpin runs its process.
    """
    engine = control.fleet.engine(engine_id)
    if engine.process is not None:
        raise Conflict(
            f"kvpin runs {engine_id!r} itself: drain it, or take it out of the settings", param="engine_id"
        )
    control.monitor.forget(engine)
    control.operations.stop_on(engine_id)
    control.fleet.remove(engine_id)
    control.pins.forget_engine(engine_id)
    await engine.adapter.aclose()


def drain_engine(control: Control, engine_id: str, *, undo: bool) -> Engine:
    """No new requests for an engine, or again some. Raises NotFound."""
    engine = control.fleet.engine(engine_id)
    if not undo:
        engine.state = EngineState.DRAINING
    elif engine.state is EngineState.DRAINING:
        connected = control.fleet.pool_of(engine) is not None
        # A connected one is asked before it is trusted; the monitor does so at once.
        engine.state = EngineState.SUSPECT if connected else EngineState.DOWN
        engine.check_now.set()
    return engine


def describe_engine(control: Control, engine: Engine) -> dict[str, Any]:
    """An engine as the admin API shows it, without its key."""
    pool, info, audit = control.fleet.pool_of(engine), engine.info, engine.audit.view()
    load = engine.ledger.view(monotonic())
    seat = pool.placer.seats[engine.id] if pool is not None else None
    return {
        "id": engine.id,
        "kind": engine.adapter.spec.kind,
        "url": engine.adapter.spec.url,
        "state": engine.state.value,
        "process": engine.process.describe() if engine.process is not None else None,
        "model": pool.model if pool is not None else engine.adapter.spec.model,
        "version": info.version if info is not None else "",
        "capabilities": sorted(info.capabilities) if info is not None else [],
        "adapters": sorted(engine.adapters),
        "tokens_per_block": info.tokens_per_block if info is not None else None,
        "max_model_len": info.max_model_len if info is not None else None,
        "trust": audit.trust.value,
        "why": audit.why,
        "in_flight": load.in_flight,
        "decoding": load.decoding,
        "queue_s": load.queue_s,
        "served": engine.ledger.served,
        "prefill_tok_s": seat.rates.prefill_tok_s if seat is not None else None,
        "last_error": engine.last_error,
        "findings": [str(finding) for finding in engine.adapter.findings()],
    }
