"""What keeps a pool's engines from passing KV to each other, serving requests together, or sharing KV."""

from __future__ import annotations

from engine_adapter import Finding, Rendezvous, Role
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool

_KEEPS_NO_KV = (
    "it computed a prompt for another engine and kept no KV for it: until it restarts, it is in no pair"
)


def of_role(engine: Engine, pool: Pool | None) -> tuple[Finding, ...]:
    """The finding about an engine that kept no KV, or whose role has no counterpart in its pool. `pool`: None
    while it is not connected."""
    if pool is None:
        return ()
    transfer = engine.adapter.transfer
    if engine.keeps_no_kv and transfer is not None:
        return (Finding(_KEEPS_NO_KV, transfer.remedy),)
    rendezvous = engine.adapter.rendezvous
    if rendezvous is not None:
        return _of_half(engine, rendezvous, pool)
    there = {each.role for each in pool.engines.values()}
    if engine.role is Role.PREFILL and Role.DECODE not in there:
        use = "only when no other engine can" if Role.BOTH in there else "itself"
        return (_without(Role.DECODE, "prefills", f"it answers {use}"),)
    if engine.role is Role.DECODE and Role.PREFILL not in there:
        return (_without(Role.PREFILL, "decoding", "it computes all prompts"),)
    return ()


def of_sharing(engine: Engine, pool: Pool | None) -> tuple[Finding, ...]:
    """The finding about an engine whose KV tenants may share, beside engines whose KV they may not."""
    if pool is None or not engine.adapter.spec.share_kv or pool.shares_kv:
        return ()
    others = sorted(name for name, each in pool.engines.items() if not each.adapter.spec.share_kv)
    return (
        Finding(
            f"tenants may share its KV, and not that of {', '.join(others)}: all requests of its model have "
            "their tenant's salt",
            "set share_kv=true on all engines of the model, or on none that can keep tenants apart",
        ),
    )


def _without(role: Role, meant_for: str, follows: str) -> Finding:
    """The finding about an engine whose pool has none of the other `role` now."""
    return Finding(
        f"it is meant for {meant_for}, and no engine of its model with role={role} is connected: {follows}",
        f"start one, give another engine of the model role={role}, or take its role away",
    )


def _of_half(engine: Engine, rendezvous: Rendezvous, pool: Pool) -> tuple[Finding, ...]:
    """The finding about an engine that serves half of each request, and that no other one meets."""
    others = {
        each.role
        for each in pool.engines.values()
        if each.adapter.rendezvous is not None and each.adapter.rendezvous.name == rendezvous.name
    }
    if {Role.PREFILL, Role.DECODE} <= others:
        return ()
    other = "decode" if engine.role is Role.PREFILL else "prefill"
    does = f"it does only the {engine.role} half of each request"
    return (
        Finding(
            f"{does}, and no engine of its model the {other} half: it gets no requests", rendezvous.remedy
        ),
    )
