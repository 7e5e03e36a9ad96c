"""Another kvpin, as this one sees it: its engines, and its requests, replayed.

The requests are soft state: each heartbeat of the peer names those that go on. A request that it does not
name is over: the message about its end was lost. If it names one that is not known here, the peer is asked
for all.

While its messages come later than before, its times say nothing: rates that were learned from them would stay
wrong for long. Its requests count as load nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from engine_adapter.types import Usage
from proxy.core.audit import Trust
from proxy.core.peers.messages import (
    AnswerBegan,
    Begun,
    Claim,
    Contents,
    Heartbeat,
    Message,
    Refined,
    RequestOver,
    ToldEngine,
    ToldPin,
    chain_of,
    disagreement,
    hash_alike,
    match,
    packed,
    unpacked,
)
from proxy.core.placement.placer import PlacedRequest
from proxy.fleet.engine import Engine, address_of
from proxy.fleet.fleet import Fleet
from proxy.fleet.lease import PeerRequest
from proxy.fleet.pool import Pool
from proxy.peers.owners import ToldClaim

# --- what a kvpin tells the others of its engines -------------------------------------------------------

# Blocks or digests in one message: half a millisecond to read.
PART = 4096
# Conversations whose engine is told, the last placed first.
MAX_SESSIONS = 20_000
_Item = TypeVar("_Item")


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
                for part in in_parts(engine.learned.recent(), len, PART):
                    yield Contents(to, engine.id, stretches=[packed(stretch) for stretch in part])
        for engine_id, digests in by_engine.items():
            for start in range(0, len(digests), PART):
                yield Contents(to, engine_id, sessions=packed(digests[start : start + PART]))
    yield Contents(to)


def in_parts(items: Iterable[_Item], size_of: Callable[[_Item], int], most: int) -> Iterator[list[_Item]]:
    """The items in lists of about this size together."""
    part, size = list[_Item](), 0
    for item in items:
        part.append(item)
        size += size_of(item)
        if size >= most:
            yield part
            part, size = [], 0
    if part:
        yield part


# --- peer -----------------------------------------------------------------------------------------------

# What a peer has in flight changes in less than that.
LATE_S = 0.5
# From heartbeat to heartbeat, clocks of two machines differ by at most that more.
DRIFT_S = 0.001


class Site(NamedTuple):
    """An engine of this kvpin on which requests of another one run.

    Attributes:
        hashes_alike: the other kvpin hashes its prompts as this one does. If not, only load is shared.
    """

    pool: Pool
    engine: Engine
    hashes_alike: bool


@dataclass(slots=True)
class _Request:
    """A peer's request. It has no site while this kvpin does not have its engine."""

    begun: Begun
    site: Site | None = None
    placed: PlacedRequest | None = None
    step: int = 0

    def answered(self, *, has_answer: bool = True) -> None:
        """Nobody waits for its answer any more: it begins, or never will."""
        if self.site is not None and self.placed is not None:
            waited = self.site.engine.of_peers.pop(self.placed.ticket, None)
            if waited is not None:
                waited.ends(has_answer=has_answer)

    def end(self, computed: int | None = None, report: Usage | None = None) -> None:
        """It is over: its engine has `computed` new tokens, None if that is not known."""
        self.answered(has_answer=computed is not None)
        if self.site is not None and self.placed is not None:
            self.site.pool.end(self.site.engine, self.placed, computed, report)


class PeerStats(msgspec.Struct, kw_only=True):
    """Another kvpin, as this one sees it.

    Attributes:
        name: its machine and process.
        engines: engines of it that are engines here, too.
        in_flight: its requests.
        in_step: all of them are known.
        silent_s: since it was heard.
        missed: how often the beginnings of requests were lost.
    """

    name: str
    engines: int
    in_flight: int
    in_step: bool
    silent_s: float
    missed: int


class ExchangeStats(msgspec.Struct, kw_only=True):
    """The exchange of this kvpin with others.

    Attributes:
        connected: the exchange works.
        peers: the other kvpins.
        dropped: frames that were not sent because a peer had not read enough.
        lost: kvpins that fell silent.
    """

    connected: bool
    peers: list[PeerStats]
    dropped: int
    lost: int


@dataclass(slots=True, eq=False)
class ExchangeCounts:
    """Counts of the exchange so far: messages told and heard, kvpins that fell silent, and how often requests
    of kvpins that are gone were missed."""

    told: int = 0
    heard: int = 0
    lost: int = 0
    missed: int = 0


class Peer:
    """Another kvpin.

    Attributes:
        owner: the number that it drew when it started.
        name: for people; None before it told its name.
        engines: its engines.
        pins: the pins that it holds.
        socket: serves HTTP to this kvpin; None if this kvpin cannot reach it.
        here: its id of an engine → the id here, and whether both make the same block hashes.
        asked: when it was asked for what was missed last.
        is_doubted: keys or orders that it told last do not count here.
        heard: when it was heard last.
        in_step: its last heartbeat named no request that is not known here.
        missed: how often one did, after one that did not.
        is_late: its last heartbeat came `LATE_S` later than others did.
    """

    def __init__(self, owner: int, fleet: Fleet, now: float) -> None:
        self.owner, self.heard, self.asked = owner, now, -inf
        self.name: str | None = None
        self.engines, self.pins = list[ToldEngine](), list[ToldPin]()
        self.socket: str | None = None
        self.here = dict[str, tuple[str, bool]]()
        self.is_doubted = self.in_step = self.is_late = False
        self.missed = 0
        self._fleet = fleet
        self._least_s = inf  # between the clocks, with the way of a heartbeat
        self._requests: dict[int, _Request] = {}

    @property
    def label(self) -> str:
        """Its name, or the number that it drew."""
        return self.name or f"{self.owner:016x}"

    # --- engines -----------------------------------------------------------------------------------

    def match(self, now: float, engines: Sequence[ToldEngine]) -> list[str]:
        """Finds its engines among those of this kvpin. Returns what the operator has to change."""
        found = [(told, match(told, engines)) for told in self.engines]
        self.here = {told.id: (mine.id, hash_alike(told, mine)) for told, mine in found if mine is not None}
        for request in self._requests.values():  # those whose engine was not here when they began
            if request.site is None and self._place(now, request, is_new=False) and request.step:
                step, request.step = request.step, 0
                self._answer_began(now, request, step)
        problems = (disagreement(told, engines) for told in self.engines)
        return [problem for problem in problems if problem is not None]

    def claims(self) -> Iterator[tuple[str, ToldClaim]]:
        """Its claims to engines that only one kvpin may use, with the ids of the engines here."""
        for told in self.engines:
            if told.claim is not None and told.id in self.here:
                yield self.here[told.id][0], ToldClaim(told.claim, self.label, told.model, self.socket)

    def site(self, engine_id: str) -> Site | None:
        """The engine here that it calls by that id; None if there is none now."""
        engine_here, hashes_alike = self.here.get(engine_id, ("", False))
        engine = self._fleet.engines.get(engine_here)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        return Site(pool, engine, hashes_alike) if engine is not None and pool is not None else None

    # --- requests ----------------------------------------------------------------------------------

    def receive(self, now: float, messages: Iterable[Message]) -> list[Message]:
        """Replays messages. Returns those that are about something else than requests."""
        self.heard = now
        return [message for message in messages if not self._replay(now, message)]

    def _replay(self, now: float, message: Message) -> bool:
        match message:
            case Begun():
                if (request := self._requests.get(message.id)) is None:
                    request = self._requests[message.id] = _Request(message)
                    self._place(now, request)
                if message.step:
                    self._answer_began(now, request, message.step)
            case Refined() | AnswerBegan() | RequestOver():
                if (request := self._requests.get(message.id)) is not None:
                    self._go_on(now, request, message)
            case Heartbeat():
                self._compare({*unpacked(message.requests)}, now - message.sent)
            case _:
                return False
        return True

    def _go_on(self, now: float, request: _Request, message: Refined | AnswerBegan | RequestOver) -> None:
        match message:
            case Refined() if request.site is not None and request.placed is not None:
                request.site.pool.placer.refine(request.placed, message.work)
            case AnswerBegan():
                self._answer_began(now, request, message.step)
            case RequestOver():
                del self._requests[message.id]
                request.end(message.computed, message.report)
            case _:
                pass

    def _place(self, now: float, request: _Request, *, is_new: bool = True) -> bool:
        """Places the request, if its engine is here. Of a request that is not new, the times are unknown."""
        begun, is_new = request.begun, is_new and not self.is_late
        site = request.site = self.site(begun.engine)
        if site is None:
            return False
        placer, engine = site.pool.placer, site.engine
        request.placed = placer.begin(
            now,
            engine.id,
            begun.work,
            chain_of(begun, site.pool.tokens_per_block) if site.hashes_alike else None,
            streams=begun.streams,
            known=begun.known and is_new,
            session=begun.session if is_new else None,
            part=begun.part,
        )
        engine.of_peers[request.placed.ticket] = PeerRequest(request.placed)
        if not is_new and begun.session is not None:
            placer.note_earlier(begun.session, engine.id)
        return True

    def _answer_began(self, now: float, request: _Request, step: int) -> None:
        if request.step:
            return
        request.step = step
        if request.site is not None and request.placed is not None:
            placer = request.site.pool.placer
            (placer.first_token if step == 1 else placer.answered)(now, request.placed)
            request.answered()

    def _compare(self, alive: set[int], way_s: float = inf) -> None:
        """A heartbeat names the requests that go on, and came in `way_s` by the clocks of both."""
        self._least_s = min(way_s, self._least_s + DRIFT_S)
        self.is_late = way_s - self._least_s > LATE_S
        for number in self._requests.keys() - alive:
            self._requests.pop(number).end()
        was_in_step, self.in_step = self.in_step, alive <= self._requests.keys()
        self.missed += was_in_step and not self.in_step

    def lose(self) -> None:
        """It is gone: all its requests are over."""
        self._compare(set())
        self.in_step = False

    def stats(self, now: float) -> PeerStats:
        """For people."""
        return PeerStats(
            name=self.label,
            engines=len(self.here),
            in_flight=len(self._requests),
            in_step=self.in_step,
            silent_s=round(now - self.heard, 3),
            missed=self.missed,
        )
