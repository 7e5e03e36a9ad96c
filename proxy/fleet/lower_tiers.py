"""Asks host and disk tiers for their blocks, where the engine's events do not report these.

After placement, kvpin asks such tiers if they may hold more of the prompt than the GPU. Their answer is the
prediction, exact to the token. The index keeps the answer, and the blocks that the request will store there,
as hints: later placements use hints, predictions do not.
"""

from __future__ import annotations

from msgspec.structs import replace

from engine_adapter import BelowGpu, Tier
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.load import Work
from proxy.fleet.engine import Engine
from proxy.fleet.lease import Lease
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt

_LOWER = (Tier.HOST, Tier.DISK)


async def look_below(
    pool: Pool, engine: Engine, lease: Lease, prompt: Prompt | None, chain: Chain | None
) -> None:
    """Refines the placement of a leased request with what the engine's lower tiers hold of it now."""
    placement = lease.placement
    whole = _whole_tokens(engine, chain)
    if prompt is None or chain is None or whole <= placement.gpu_tokens:
        return
    is_text = prompt.whole and not prompt.media  # tiers are asked by token ids, which do not identify images
    below = await engine.adapter.lookup(prompt.kv) if is_text else None
    if below is None:
        lease.placement = replace(placement, predicted_tokens=placement.gpu_tokens, firm=False)
        return
    _note(pool, engine, chain, below)
    cached = max(placement.gpu_tokens, below.cached)
    # A tier may not yet report what was just stored: the true number can only be higher.
    firm = placement.firm and below.host + below.disk >= whole
    lease.placement = replace(placement, predicted_tokens=cached, firm=firm)
    host = min(below.host, cached) - placement.gpu_tokens
    disk = cached - placement.gpu_tokens - max(host, 0)
    lease.refine_work(Work(placement.n_tokens - cached, max(host, 0), max(disk, 0)))


def expect_below(pool: Pool, engine: Engine, chain: Chain | None) -> None:
    """Notes that the engine served this chain and writes it to its lower tiers."""
    blocks = _whole_tokens(engine, chain) // pool.tokens_per_block
    if chain is not None and blocks:
        for each in _sharing(pool, engine):
            _hint(pool, each, chain.hashes, blocks, blocks)


def _whole_tokens(engine: Engine, chain: Chain | None) -> int:
    """The most tokens of a prompt that lower tiers can hold; 0 where there are none to ask."""
    unit = engine.info.tokens_per_chunk if engine.info is not None else None
    return chain.n_tokens // unit * unit if unit and chain is not None else 0


def _note(pool: Pool, engine: Engine, chain: Chain, below: BelowGpu) -> None:
    """Writes the answer to the index, for every engine that shares the tiers."""
    host = below.host // pool.tokens_per_block
    held = (below.host + below.disk) // pool.tokens_per_block
    for each in _sharing(pool, engine):
        each.below.forget(chain.hashes, host)
        _remove(pool, each, chain.hashes[host:])
        _hint(pool, each, chain.hashes, host, held)


def _hint(pool: Pool, engine: Engine, hashes: tuple[BlockHash, ...], host: int, held: int) -> None:
    """The first blocks of a chain, `host` of them, lie on the host tier, those up to `held` on disk."""
    pool.index.store(engine.id, Tier.HOST, hashes[:host])
    pool.index.store(engine.id, Tier.DISK, hashes[host:held])
    _remove(pool, engine, engine.below.learn(hashes[:held]))


def _remove(pool: Pool, engine: Engine, hashes: tuple[BlockHash, ...]) -> None:
    for tier in _LOWER:
        pool.index.remove(engine.id, tier, hashes)


def _sharing(pool: Pool, engine: Engine) -> list[Engine]:
    """The engines of the pool that share the engine's lower tiers, itself included."""
    name = engine.info.shared_tiers if engine.info is not None else None
    return [
        each
        for each in pool.engines.values()
        if each is engine or (name is not None and each.info is not None and each.info.shared_tiers == name)
    ]
