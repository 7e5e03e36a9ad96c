"""Messages to a newcomer beyond requests in flight: how fast engines are, what engines without
events have learned to hold, and which engine conversations were last on."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.core.audit import Trust
from proxy.core.peers.messages import Learned, Message, Sessions, Timed, Told, packed
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool

# Blocks or digests in one message: half a millisecond to read.
PART = 4096
# Conversations whose engine is told, the last placed first.
MAX_SESSIONS = 20_000


def contents(fleet: Fleet, to: int) -> Iterator[Message]:
    """Everything for the newcomer `to`, in parts that each take little time."""
    for pool in list(fleet.pools.values()):
        for engine in list(pool.engines.values()):
            timings = pool.placer.books[engine.id].rates.timings
            if timings is not None:
                yield Timed(to, engine.id, timings)
            if engine.audit.trust is Trust.APPROXIMATE:
                yield from _learned(engine.id, engine.learned.recent(), to)
        yield from _sessions(pool, to)
    yield Told(to)


def _learned(engine: str, stretches: list[tuple[int, ...]], to: int) -> Iterator[Message]:
    part, blocks = list[bytes](), 0
    for stretch in stretches:
        part.append(packed(stretch))
        blocks += len(stretch)
        if blocks >= PART:
            yield Learned(to, engine, part)
            part, blocks = [], 0
    if part:
        yield Learned(to, engine, part)


def _sessions(pool: Pool, to: int) -> Iterator[Message]:
    by_engine: dict[str, list[int]] = {}
    for session, engine in pool.placer.recent_sessions(MAX_SESSIONS):
        if isinstance(session, int):
            by_engine.setdefault(engine, []).append(session)
    for engine, digests in by_engine.items():
        for start in range(0, len(digests), PART):
            yield Sessions(to, engine, packed(digests[start : start + PART]))
