"""What lies below an engine's GPU where its events do not tell of it (vLLM with LMCache).

Such tiers are asked, once a request is placed, if they can hold more of its prompt than the GPU does. What
they say is the prediction, to the token. It also goes into the index, as does what a request will have left
there, so that the next placement counts with it; those are hints, and no prediction rests on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine_adapter import BelowGpu, Tier
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.load import Work
from proxy.fleet.engine import Engine
from proxy.fleet.lease import Lease
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt

_LOWER = (Tier.HOST, Tier.DISK)


async def look_below(pool: Pool, lease: Lease, prompt: Prompt | None, chain: Chain | None) -> None:
    """Refines the placement of a leased request by what the engine's lower tiers hold of it now."""
    engine, placement = lease.engine, lease.placement
    whole = _whole_tokens(engine, chain)
    if prompt is None or chain is None or whole <= placement.gpu_tokens:
        return
    is_text = prompt.whole and not prompt.media  # tiers are asked by token ids, which say nothing of images
    below = await engine.adapter.lookup(prompt.kv) if is_text else None
    if below is None:
        lease.placement = replace(placement, predicted_tokens=placement.gpu_tokens, firm=False)
        return
    _note(pool, engine, chain, below)
    cached = max(placement.gpu_tokens, below.cached)
    # What was stored a moment ago may not be told yet: there can only be more.
    firm = placement.firm and below.host + below.disk >= whole
    lease.placement = replace(placement, predicted_tokens=cached, firm=firm)
    host = min(below.host, cached) - placement.gpu_tokens
    disk = cached - placement.gpu_tokens - max(host, 0)
    lease.refine_work(Work(placement.n_tokens - cached, max(host, 0), max(disk, 0)))


def expect_below(pool: Pool, engine: Engine, chain: Chain | None) -> None:
    """The engine has served this chain, and writes it to its lower tiers."""
    blocks = _whole_tokens(engine, chain) // pool.tokens_per_block
    if chain is not None and blocks:
        for each in _sharing(pool, engine):
            _hint(pool, each, Tier.HOST, chain.hashes[:blocks])


def _whole_tokens(engine: Engine, chain: Chain | None) -> int:
    """The most that lower tiers can hold of a prompt, 0 where there are none to ask."""
    unit = engine.info.tokens_per_chunk if engine.info is not None else None
    return chain.n_tokens // unit * unit if unit and chain is not None else 0


def _note(pool: Pool, engine: Engine, chain: Chain, below: BelowGpu) -> None:
    """Writes what was said to the index, for every engine over the same tiers."""
    host = below.host // pool.tokens_per_block
    held = (below.host + below.disk) // pool.tokens_per_block
    for each in _sharing(pool, engine):
        _forget(pool, each, chain.hashes[host:])
        _hint(pool, each, Tier.HOST, chain.hashes[:host])
        _hint(pool, each, Tier.DISK, chain.hashes[host:held])


def _hint(pool: Pool, engine: Engine, tier: Tier, hashes: tuple[BlockHash, ...]) -> None:
    pool.index.store(engine.id, tier, hashes)
    _forget(pool, engine, engine.below.learn(hashes))


def _forget(pool: Pool, engine: Engine, hashes: Iterable[BlockHash]) -> None:
    hashes = tuple(hashes)
    engine.below.forget(hashes)
    for tier in _LOWER:
        pool.index.remove(engine.id, tier, hashes)


def _sharing(pool: Pool, engine: Engine) -> list[Engine]:
    """The engines of the pool over the same lower tiers, the engine itself among them."""
    name = engine.info.shared_tiers if engine.info is not None else None
    return [
        each
        for each in pool.engines.values()
        if each is engine or (name is not None and each.info is not None and each.info.shared_tiers == name)
    ]
