"""This kvpin's engines as the others are told of them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from engine_adapter import EngineSpec
from proxy.core.peers.claims import Claim
from proxy.core.peers.messages import ToldEngine
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet


def described(fleet: Fleet, claim_of: Callable[[Engine], Claim | None]) -> list[ToldEngine]:
    """All engines as they are now. `claim_of` gives this kvpin's claim to an engine that only one may use."""
    told = list[ToldEngine]()
    for engine in fleet.engines.values():
        pool = fleet.pool_of(engine)
        address, is_local = address_of(engine.adapter.spec)
        model, tokens_per_block = (pool.model, pool.tokens_per_block) if pool is not None else (None, None)
        told.append(ToldEngine(engine.id, address, is_local, model, tokens_per_block, claim_of(engine)))
    return told


def address_of(spec: EngineSpec) -> tuple[str, bool]:
    """An engine's address as peers are told it, with its rank, and whether only this machine can reach it."""
    return (f"{socket.gethostname()} {spec.address}", True) if spec.is_local else (spec.address, False)
