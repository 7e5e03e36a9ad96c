"""Tells the other kvpins of this one's requests, engines, and tenants' use of their limits.

    own requests ──→ Telling ──→ OwnRequests ──frames, 1 ms──→ bus ──→ the others

A kvpin that asks is told of all requests in flight. A newcomer is also told the contents of engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from proxy.core.audit import Trust
from proxy.core.engine_book import EngineMark
from proxy.core.peers.claims import Claim
from proxy.core.peers.messages import (
    Contents,
    KvpinState,
    Leaving,
    Message,
    ToldEngine,
    ToldPin,
    Used,
    frame_of,
    packed,
)
from proxy.core.peers.telling import OwnRequests
from proxy.fleet.engine import Engine, address_of
from proxy.fleet.fleet import Fleet
from proxy.peers.bus import Bus
from proxy.peers.peer import ExchangeCounts
from proxy.request.tenants import Tenants

# How long messages are collected for one frame.
BATCH_S = 0.001
# Requests in flight are told in frames of about this many bytes of hashes.
_PART_BYTES = 256 * 1024
# Blocks or digests in one message: half a millisecond to read.
PART = 4096
# Conversations whose engine is told, the last placed first.
MAX_SESSIONS = 20_000


class Announcer:
    """Tells the other kvpins of this one.

    Attributes:
        engines: as they were told last.
        name: this kvpin, for people.
    """

    def __init__(
        self,
        bus: Bus,
        owner: int,
        fleet: Fleet,
        tenants: Tenants,
        claim_of: Callable[[Engine], Claim | None],
        marks: Callable[[], list[EngineMark]],
        counts: ExchangeCounts,
        keys: Callable[[], bytes],
    ) -> None:
        """Tells of the pools that `fleet` makes from now on, the operators' orders of `marks`, and the signed
        `keys`. Counts what it tells in `counts`."""
        self.engines = list[ToldEngine]()
        self.name = fleet.name
        self._bus, self._owner, self._fleet, self._tenants = bus, owner, fleet, tenants
        self._claim_of, self._marks, self._counts, self._keys = claim_of, marks, counts, keys
        self._own = fleet.told = OwnRequests(self._flush_soon)
        self._flush_at: asyncio.TimerHandle | None = None
        self._asked: dict[int, bool] = {}  # who waits for requests in flight → with contents
        self._somebody_asked = asyncio.Event()
        self._is_over = False

    def say(self, messages: Sequence[Message]) -> None:
        """Sends messages at once."""
        if self._is_over:
            return
        self._counts.told += len(messages)
        self._bus.publish(frame_of(self._owner, messages))

    def flush(self) -> None:
        """Sends the collected messages."""
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        messages = self._own.take()
        messages += [Used(tenant, use) for tenant, use in self._tenants.take_used()]
        if messages:
            self.say(messages)

    def introduce(self) -> None:
        """Introduces this kvpin to the others."""
        self.engines = described(self._fleet, self._claim_of)
        self._own.tell(self._state())
        self._own.tell(self._own.heartbeat(monotonic()))
        self.flush()

    def follow_engines(self) -> bool:
        """Tells of engines that came, left, or have connected. Returns whether any did."""
        engines = described(self._fleet, self._claim_of)
        if engines == self.engines:
            return False
        self.engines = engines
        self._own.tell(self._state())
        return True

    def tell_state(self) -> None:
        """Tells again who this kvpin is, with its engines, pins, what operators have ordered, and issued
        keys."""
        self._own.tell(self._state())

    def beat(self) -> None:
        """Gives a sign of life."""
        self._own.tell(self._own.heartbeat(monotonic()))
        self.flush()

    def leave(self) -> None:
        """Says that all requests here are over. Nothing follows."""
        self._own.tell(Leaving())
        self.flush()
        self._is_over = True

    def is_asked(self, by: int, *, with_contents: bool) -> None:
        """Notes that another kvpin asks for requests in flight, and perhaps for the contents of engines."""
        self._asked[by] = self._asked.get(by, False) or with_contents
        self._somebody_asked.set()

    async def answer(self) -> None:
        """Answers the kvpins that ask, for ever. Long answers go out in parts, between requests."""
        while True:
            await self._somebody_asked.wait()
            self._somebody_asked.clear()
            asked, self._asked = self._asked, {}
            for to in (owner for owner, with_contents in asked.items() if with_contents):
                for message in contents(self._fleet, to):
                    self.say([message])
                    await asyncio.sleep(0)
            self.flush()
            uses = self._tenants.take_used(anew=True)
            self.say([self._state(), *(Used(tenant, use) for tenant, use in uses)])
            for part in self._in_flight():
                self.say(part)

    def _flush_soon(self) -> None:
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def _state(self) -> KvpinState:
        path = self._bus.http_socket
        socket_path = str(path) if path is not None else None
        ahead_s = time.time() - monotonic()
        pins = [
            ToldPin(pin.pin_id, list(pin.engine_pins), pin.blocks, pin.expires + ahead_s, pin.label)
            for pin in self._fleet.pins.active(monotonic())
        ]
        marks, keys, secret = self._marks(), self._keys(), self._fleet.secret_name
        return KvpinState(self.name, self.engines, socket_path, marks, pins, keys, secret)

    def _in_flight(self) -> Iterator[list[Message]]:
        part, size = list[Message](), 0
        for message in self._own.in_flight(monotonic()):
            part.append(message)
            size += len(getattr(message, "hashes", None) or b"")
            if size > _PART_BYTES:
                yield part
                part, size = [], 0
        yield part


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
