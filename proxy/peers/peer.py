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
from msgspec.structs import replace

from proxy.core.audit import Trust
from proxy.core.peers.messages import (
    Claim,
    Contents,
    Heartbeat,
    Message,
    Placing,
    RequestState,
    Step,
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
            if (book := pool.placer.books.get(engine.id)) is None:
                continue  # it has left since
            yield Contents(to, engine.id, book.rates.timings)
            if engine.audit.trust is Trust.APPROXIMATE:
                for part in in_parts(engine.learned.stretches()[::-1], len, PART):
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
    """An engine of this kvpin on which requests of another one run."""

    pool: Pool
    engine: Engine
    hashes_alike: bool  # the other kvpin hashes its prompts as this one does. If not, only load is shared.


@dataclass(slots=True)
class _Request:
    """A peer's request. It has no site while this kvpin does not have its engine."""

    placing: Placing
    told: RequestState
    site: Site | None = None
    placed: PlacedRequest | None = None

    def follow(self, now: float, before: RequestState) -> None:
        """Applies what has changed since `before`."""
        told, placed = self.told, self.placed
        if self.site is None or placed is None:
            return
        pool, engine, _ = self.site
        if told.work != before.work:
            pool.placer.refine(placed, told.work)
        if told.step > before.step:
            if (awaited := engine.of_peers.pop(placed.ticket, None)) is not None:
                awaited.has_answer = told.step < Step.OVER or told.computed is not None
                awaited.begun.set()
            if told.step == Step.OVER:
                pool.end(engine, placed, told.computed, told.usage)
            else:
                answers = pool.placer.first_token if told.step == Step.STREAMS else pool.placer.answered
                answers(now, placed)


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
    """Another kvpin."""

    def __init__(self, owner: int, fleet: Fleet, now: float) -> None:
        self.owner = owner  # the number that it drew when it started
        self.heard = now  # last
        self.asked = -inf  # when it was asked for what was missed last
        self.name: str | None = None  # for people; None before it told its name
        self.engines, self.pins = list[ToldEngine](), list[ToldPin]()
        self.socket: str | None = None  # serves HTTP to this kvpin; None if this kvpin cannot reach it
        # Its id of an engine → the id here, and whether both make the same block hashes.
        self.here = dict[str, tuple[str, bool]]()
        self.is_doubted = False  # keys or orders that it told last do not count here
        self.in_step = False  # its last heartbeat named no request that is not known here
        self.missed = 0  # how often one did, after one that did not
        self.is_late = False  # its last heartbeat came `LATE_S` later than others did
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
        for request in self._requests.values():
            if request.site is None:  # its engine was not here when it began
                self._place(now, request, is_new=False)
        problems = (disagreement(told, engines) for told in self.engines)
        return [problem for problem in problems if problem is not None]

    def claims(self) -> dict[str, ToldClaim]:
        """Its claims to engines that only one kvpin may use, by their URLs here: a router may be several."""
        claims: dict[str, ToldClaim] = {}
        for told in self.engines:
            engine = self._fleet.engines.get(self.here.get(told.id, ("", False))[0])
            if told.claim is not None and engine is not None:
                url, models = engine.adapter.spec.url, {told.model} if told.model is not None else set[str]()
                models |= claims[url].models if url in claims else set()
                claims[url] = ToldClaim(told.claim, self.label, frozenset(models), self.socket)
        return claims

    def site(self, engine_id: str) -> Site | None:
        """The engine here that it calls by that id; None if there is none now."""
        engine_here, hashes_alike = self.here.get(engine_id, ("", False))
        engine = self._fleet.engines.get(engine_here)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        return Site(pool, engine, hashes_alike) if engine is not None and pool is not None else None

    # --- requests ----------------------------------------------------------------------------------

    def receive(self, now: float, messages: Iterable[Message]) -> list[Message]:
        """Replays messages. Returns those that are about something else than requests."""
        self.heard, others = now, list[Message]()
        for message in messages:
            match message:
                case RequestState():
                    self._upsert(message)
                case Heartbeat():
                    self._compare({*unpacked(message.requests)}, now - message.sent)
                case _:
                    others.append(message)
        return others

    def _upsert(self, told: RequestState) -> None:
        """A request is now as was told, unless something later was told before. One whose placement was not
        heard stays unknown."""
        now, request = self.heard, self._requests.get(told.id)
        if request is not None and told.step >= request.told.step:
            before, request.told = request.told, told
            if told.step == Step.OVER:
                del self._requests[told.id]
            request.follow(now, before)
        elif request is None and told.placing is not None and told.step < Step.OVER:
            request = self._requests[told.id] = _Request(told.placing, told)
            self._place(now, request, is_new=not self.is_late)

    def _place(self, now: float, request: _Request, *, is_new: bool) -> None:
        """Places the request, if its engine is here. Of a request that is not new, the times are unknown."""
        placing, told, site = request.placing, request.told, self.site(request.placing.engine)
        if site is None:
            return
        placer, engine = site.pool.placer, site.engine
        placed = placer.begin(
            now,
            engine.id,
            told.work,
            chain_of(placing, site.pool.tokens_per_block) if site.hashes_alike else None,
            streams=placing.streams,
            known=placing.known and is_new,
            session=placing.session if is_new else None,
            part=placing.part,
        )
        engine.of_peers[placed.ticket] = PeerRequest(placed)
        if not is_new and placing.session is not None:
            placer.note_earlier(placing.session, engine.id)
        request.site, request.placed = site, placed
        request.follow(now, replace(told, step=Step.PLACED))

    def _compare(self, alive: set[int], way_s: float = inf) -> None:
        """A heartbeat names the requests that go on, and came in `way_s` by the clocks of both."""
        self._least_s = min(way_s, self._least_s + DRIFT_S)
        self.is_late = way_s - self._least_s > LATE_S
        for number in self._requests.keys() - alive:
            self._upsert(replace(self._requests[number].told, step=Step.OVER))
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
