"""What a kvpin tells the others of its engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from proxy.core.audit import Trust
from proxy.core.peers.claims import Claim
from proxy.core.peers.messages import Contents, ToldEngine, packed
from proxy.fleet.engine import Engine, address_of
from proxy.fleet.fleet import Fleet

# Blocks or digests in one message: half a millisecond to read.
PART = 4096
# Conversations whose engine is told, the last placed first.
MAX_SESSIONS = 20_000


def described(fleet: Fleet, claim_of: Callable[[Engine], Claim | None]) -> list[ToldEngine]:
    """All engines as they are now. `claim_of` gives this kvpin's claim to an engine that only one may use."""
    told = list[ToldEngine]()
    for engine in fleet.engines.values():
        pool = fleet.pool_of(engine)
        address, is_local = address_of(engine.adapter.spec)
        model, tokens_per_block = (pool.model, pool.tokens_per_block) if pool is not None else (None, None)
        told.append(ToldEngine(engine.id, address, is_local, model, tokens_per_block, claim_of(engine)))
    return told


def contents(fleet: Fleet, to: int) -> Iterator[Contents]:
    """Messages for a newcomer, `to`, beyond requests in flight. Each takes little time to read."""
    for pool in list(fleet.pools.values()):
        by_engine: dict[str, list[int]] = {}
        for session, engine_id in pool.placer.recent_sessions(MAX_SESSIONS):
            if isinstance(session, int):
                by_engine.setdefault(engine_id, []).append(session)
        for engine in list(pool.engines.values()):
            yield Contents(to, engine.id, pool.placer.books[engine.id].rates.timings)
            if engine.audit.trust is Trust.APPROXIMATE:
                for stretches in _parts(engine.learned.recent()):
                    yield Contents(to, engine.id, stretches=stretches)
        for engine_id, digests in by_engine.items():
            for start in range(0, len(digests), PART):
                yield Contents(to, engine_id, sessions=packed(digests[start : start + PART]))
    yield Contents(to)


def _parts(stretches: list[tuple[int, ...]]) -> Iterator[list[bytes]]:
    part, blocks = list[bytes](), 0
    for stretch in stretches:
        part.append(packed(stretch))
        blocks += len(stretch)
        if blocks >= PART:
            yield part
            part, blocks = [], 0
    if part:
        yield part
