"""One kvpin among several: tells the others of its requests, replays theirs, and notices who is lost.

    own requests ──→ Telling ──→ OwnRequests ──batches, 1 ms──→ exchange ──→ the others
    the others ──→ exchange ──→ Follower ──→ Placer, as for own requests

A request never waits for any of it. Everything expires: a kvpin that is silent for `LOST_S` is lost, and its
requests are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import msgspec
import structlog

from engine_adapter import EngineSpec
from proxy.core.peers.follower import Follower
from proxy.core.peers.matching import disagreement, hash_alike, match
from proxy.core.peers.messages import (
    Ask,
    Batch,
    Learned,
    Left,
    Message,
    Sessions,
    State,
    Timed,
    Times,
    Told,
    ToldEngine,
    Used,
    batch_of,
    frame_of,
    owner_of,
    unpacked,
)
from proxy.core.peers.round_trip import RoundTrip
from proxy.core.peers.telling import OwnRequests
from proxy.core.placement.answers import Report
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.fleet.engine import Engine, this_kvpin
from proxy.fleet.fleet import Fleet
from proxy.fleet.lease import PeerRequest
from proxy.fleet.pool import Pool
from proxy.peers.contents import contents
from proxy.peers.exchange import Ears, Exchange
from proxy.peers.owners import Owners, ToldClaim
from proxy.request.tenants import Tenants
from proxy.tasks import Supervisor

log = structlog.get_logger(__name__)

# How long messages are collected for one batch.
BATCH_S = 0.001
HEARTBEAT_S = 1.0
LOST_S = 3.0
# A newcomer waits this long for the others before it says that it is ready.
JOIN_S = 2.0
_JOIN_POLL_S = 0.05
# A listing goes out in batches of about this many bytes of hashes.
_PART_BYTES = 256 * 1024


class PeerStats(msgspec.Struct, kw_only=True):
    """Another kvpin, as this one sees it.

    Attributes:
        name: its machine and process.
        engines: engines of it that are engines here, too.
        in_flight: its requests.
        in_step: all of them are known.
        round_trip_s: what a message to it and back takes; None before that was measured.
        behind: that is too long, so its requests count only when they are over.
        silent_s: since it was heard.
        gaps: how often batches of it were lost.
        divergences: how often its requests were other ones than those known here, without a gap.
    """

    name: str
    engines: int
    in_flight: int
    in_step: bool
    round_trip_s: float | None
    behind: bool
    silent_s: float
    gaps: int
    divergences: int


class ExchangeStats(msgspec.Struct, kw_only=True):
    """What this kvpin shares with others.

    Attributes:
        connected: the exchange works.
        peers: the other kvpins.
        dropped: batches that were not sent because a peer had not read enough.
        lost: kvpins that fell silent.
    """

    connected: bool
    peers: list[PeerStats]
    dropped: int
    lost: int


@dataclass(slots=True, eq=False)
class Counts:
    """What was exchanged so far: messages told and heard, listings asked for, kvpins that fell silent, how
    often one fell behind, and gaps and divergences of kvpins that are gone."""

    told: int = 0
    heard: int = 0
    asked: int = 0
    lost: int = 0
    behind: int = 0
    gaps: int = 0
    divergences: int = 0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another kvpin of this machine, which serves HTTP to this one.

    Attributes:
        owner: the number that it drew when it started.
        name: for people.
        socket: the path of its Unix socket.
    """

    owner: int
    name: str
    socket: str


@dataclass(slots=True)
class _Peer:
    """Another kvpin.

    Attributes:
        follower: replays its requests.
        name: for people; None before it told its name.
        engines: its engines.
        socket: where it serves HTTP to peers.
        here: its id of an engine → the id here, and whether both make the same block hashes.
        asked: when it was asked for a listing last.
        trip: the way to it and back.
    """

    follower: Follower
    name: str | None = None
    engines: list[ToldEngine] = field(default_factory=list)
    socket: str | None = None
    here: dict[str, tuple[str, bool]] = field(default_factory=dict)
    asked: float = float("-inf")
    trip: RoundTrip = field(default_factory=RoundTrip)

    @property
    def label(self) -> str:
        """Its name, or the number that it drew."""
        return self.name or f"{self.follower.owner:016x}"


@dataclass(frozen=True, slots=True)
class _Here:
    """An engine on which a peer's requests run."""

    pool: Pool
    target: Engine
    hashes_alike: bool

    @property
    def engine(self) -> str:
        return self.target.id

    @property
    def placer(self) -> Placer:
        return self.pool.placer

    @property
    def tokens_per_block(self) -> int | None:
        return self.pool.tokens_per_block if self.hashes_alike else None

    def begun(self, placed: PlacedRequest) -> None:
        self.target.of_peers[placed.ticket] = PeerRequest(placed)
        self.target.from_peers += 1

    def answered(self, placed: PlacedRequest) -> None:
        self._forget(placed, has_answer=True)

    def end(self, placed: PlacedRequest, computed: int | None, report: Report | None) -> None:
        self._forget(placed, has_answer=computed is not None)
        self.pool.end(self.target, placed, computed, report)

    def _forget(self, placed: PlacedRequest, *, has_answer: bool) -> None:
        """Nobody waits for the answer to a request any more."""
        if (request := self.target.of_peers.pop(placed.ticket, None)) is not None:
            request.ends(has_answer=has_answer)


class Peers:
    """See the module.

    Attributes:
        counts: what was exchanged.
    """

    def __init__(
        self,
        exchange: Exchange,
        owner: int,
        fleet: Fleet,
        tenants: Tenants,
        hang_up: Callable[[str, str], None] = lambda _socket, _reason: None,
    ) -> None:
        """Tells of the pools that `fleet` makes from now on. `owner` is a number that no other kvpin has.
        `hang_up` drops the connections to the socket of a kvpin that is lost, for that reason."""
        self.counts, self._hang_up = Counts(), hang_up
        self._exchange, self._owner, self._fleet, self._tenants = exchange, owner, fleet, tenants
        self._owners = Owners(owner, fleet)
        self._name = this_kvpin()
        self._own = fleet.told = OwnRequests(self._flush_soon)
        self._engines = list[ToldEngine]()
        self._peers: dict[int, _Peer] = {}
        self._number = 0
        self._flush_at: asyncio.TimerHandle | None = None
        self._asked: dict[int, bool] = {}  # who waits for a listing → with contents
        self._missed = set[
            int
        ]()  # kvpins that were lost, and whose contents are asked for when they are back
        self._somebody_asked, self._has_bid = asyncio.Event(), asyncio.Event()
        self._is_ready = self._is_told = self._is_over = False
        self._ready_by: float | None = None
        self._complained = set[str]()

    # --- life --------------------------------------------------------------------------------------

    def start(self, tasks: Supervisor) -> None:
        """Begins to exchange."""
        ears = Ears(self._receive, self._introduce, self._lose)
        tasks.keep("exchange", lambda: self._exchange.run(ears))
        tasks.keep("exchange watch", self._watch)
        tasks.keep("exchange answers", self._answer)

    async def aclose(self) -> None:
        """Tells the others that all requests here are over."""
        self._own.tell(Left())
        self._flush()
        self._is_over = True
        await self._exchange.aclose()

    @property
    def is_ready(self) -> bool:
        """Whether this kvpin knows what the others know, or has waited long enough."""
        return self._is_ready

    @property
    def is_connected(self) -> bool:
        """Whether the exchange works."""
        return self._exchange.is_connected

    @property
    def http_socket(self) -> Path | None:
        """Where this kvpin serves HTTP to the others; None if they cannot reach its sockets."""
        return self._exchange.http_socket

    @property
    def owner(self) -> int:
        """The number that this kvpin drew when it started."""
        return self._owner

    @property
    def claims_engines(self) -> bool:
        """Whether there are engines that only one kvpin may use."""
        return self._owners.has_claimed

    @property
    def elsewhere(self) -> Mapping[str, ToldClaim]:
        """Engines that only one kvpin may use, and the one that does in place of this one."""
        return self._owners.elsewhere

    def neighbours(self) -> list[Neighbour]:
        """The other kvpins that serve HTTP to this one. A path that comes from elsewhere is not trusted."""
        if self.http_socket is None:
            return []
        return [
            Neighbour(owner, peer.label, peer.socket)
            for owner, peer in self._peers.items()
            if peer.socket is not None
        ]

    def stats(self) -> ExchangeStats:
        """For people."""
        now = monotonic()
        peers = [
            PeerStats(
                name=peer.label,
                engines=len(peer.here),
                in_flight=peer.follower.in_flight,
                in_step=peer.follower.in_step,
                round_trip_s=peer.trip.seconds,
                behind=peer.follower.is_behind,
                silent_s=round(now - peer.follower.heard, 3),
                gaps=peer.follower.gaps,
                divergences=peer.follower.divergences,
            )
            for peer in self._peers.values()
        ]
        return ExchangeStats(
            connected=self.is_connected, peers=peers, dropped=self._exchange.dropped, lost=self.counts.lost
        )

    # --- telling -----------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def _flush(self) -> None:
        """Sends what is to be told."""
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        messages = self._own.take()
        messages += [Used(tenant, use) for tenant, use in self._tenants.take_used()]
        if messages:
            self._send(messages)

    def _send(self, messages: list[Message]) -> None:
        if self._is_over:
            return
        self._number += 1
        self.counts.told += len(messages)
        self._exchange.publish(frame_of(self._owner, Batch(self._number, messages)))

    def _introduce(self) -> None:
        """Says who this is, to those who do not know it."""
        self._engines = self._described()
        self._own.tell(self._state())
        self._own.tell(self._own.heartbeat())
        self._flush()

    def _state(self) -> State:
        path = self.http_socket
        return State(self._name, self._engines, str(path) if path is not None else None)

    async def _answer(self) -> None:
        """Tells those who asked. What takes longer is told between requests."""
        while True:
            await self._somebody_asked.wait()
            self._somebody_asked.clear()
            asked, self._asked = self._asked, {}
            for to in (owner for owner, with_contents in asked.items() if with_contents):
                for message in contents(self._fleet, to):
                    self._send([message])
                    await asyncio.sleep(0)
            self._flush()
            uses = self._tenants.take_used(anew=True)
            self._send([self._state(), *(Used(tenant, use) for tenant, use in uses)])
            for part in self._listing():
                self._send(part)

    def _listing(self) -> Iterator[list[Message]]:
        part, size = list[Message](), 0
        for message in self._own.listing():
            part.append(message)
            size += len(getattr(message, "hashes", None) or b"")
            if size > _PART_BYTES:
                yield part
                part, size = [], 0
        yield part

    # --- listening ---------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        owner = owner_of(frame)
        if owner == self._owner:
            return
        try:
            batch = batch_of(frame) if owner is not None else None
        except msgspec.MsgspecError:
            batch = None
        if owner is None or batch is None:
            self._complain("another kvpin has another version: nothing is shared with it")
            return
        now, peer = monotonic(), self._peers.get(owner)
        if peer is None:
            peer = self._peers[owner] = _Peer(Follower(owner, self._site_of, now))
            self._introduce()
        self.counts.heard += len(batch.messages)
        for message in peer.follower.receive(now, batch):
            if owner in self._peers:  # nothing counts after it has left
                self._hear(owner, peer, message)
        if owner in self._peers and not peer.follower.in_step:
            self._ask(now, owner, peer)

    def _hear(self, owner: int, peer: _Peer, message: Message) -> None:
        match message:
            case State():
                is_new = peer.name is None
                peer.name, peer.engines, peer.socket = message.name, message.engines, message.http_socket
                self._match(peer)
                self._decide_owners(monotonic())
                if is_new:
                    log.info("another kvpin is here", peer=peer.label, engines_shared=len(peer.here))
            case Times():
                self._time(peer, message)
            case Used():
                self._tenants.used_elsewhere(monotonic(), owner, message.tenant, message.use)
            case Ask() if message.of == self._owner:
                self._asked[owner] = self._asked.get(owner, False) or message.contents
                self._somebody_asked.set()
            case Left():
                self._drop(owner)
                log.info("another kvpin has stopped", peer=peer.label)
            case Learned() | Sessions() | Timed() | Told() if message.to == self._owner:
                self._adopt(owner, message)
            case _:
                pass

    def _adopt(self, owner: int, message: Learned | Sessions | Timed | Told) -> None:
        if isinstance(message, Told):
            self._is_told = True
            self._missed.discard(owner)
            return
        site = self._site_of(owner, message.engine)
        if site is None or not site.hashes_alike:
            return
        if isinstance(message, Timed):
            site.placer.books[site.engine].rates.adopt(monotonic(), message.timings)
        elif isinstance(message, Learned):
            for stretch in message.stretches:
                site.pool.adopt(site.target, unpacked(stretch))
        else:
            for digest in unpacked(message.digests):
                site.placer.note_earlier(digest, site.engine)

    def _time(self, peer: _Peer, times: Times) -> None:
        """Measures how far a peer is behind."""
        now, trip, follower = monotonic(), peer.trip, peer.follower
        trip.heard(now, times.sent)
        for heard in times.heard:
            if heard.of == self._owner:
                trip.measure(now, heard)
        if trip.is_behind == follower.is_behind:
            return
        follower.note_behind(now, is_behind=trip.is_behind)
        if follower.is_behind:
            self.counts.behind += 1
            log.warning(
                "another kvpin is behind: its requests count only when they are over",
                peer=peer.label,
                round_trip_s=round(trip.seconds or 0, 2),
            )
        else:
            log.info("another kvpin has caught up", peer=peer.label)

    def _ask(self, now: float, owner: int, peer: _Peer) -> None:
        """Asks a kvpin for its requests, unless it was just asked."""
        if now - peer.asked < HEARTBEAT_S:
            return
        peer.asked = now
        self.counts.asked += 1
        self._send([Ask(owner, contents=self._wants_contents(owner))])

    def _wants_contents(self, owner: int) -> bool:
        """Whether the kvpin `owner` is to tell what engines hold: it was lost and is back, or this one is
        new, its engines are connected, and nobody has told it."""
        is_new = not self._is_ready and not self._is_told
        return (is_new or owner in self._missed) and self._fleet.is_ready()

    # --- engines -----------------------------------------------------------------------------------

    def _described(self) -> list[ToldEngine]:
        return [self._describe(engine) for engine in self._fleet.engines.values()]

    def _describe(self, engine: Engine) -> ToldEngine:
        pool = self._fleet.pool_of(engine)
        address, is_local = address_of(engine.adapter.spec)
        model, tokens_per_block = (pool.model, pool.tokens_per_block) if pool is not None else (None, None)
        claim = self._owners.claim_of(engine)
        return ToldEngine(engine.id, address, is_local, model, tokens_per_block, claim)

    def _match(self, peer: _Peer) -> None:
        """Finds a peer's engines here. Says what the operator has to change."""
        peer.here = {}
        for told in peer.engines:
            if (mine := match(told, self._engines)) is not None:
                peer.here[told.id] = mine.id, hash_alike(told, mine)
            if (problem := disagreement(told, self._engines)) is not None:
                self._complain("kvpins disagree", peer=peer.label, problem=problem)
        peer.follower.place_late(monotonic())

    def _site_of(self, owner: int, engine_id: str) -> _Here | None:
        peer = self._peers.get(owner)
        found = peer.here.get(engine_id) if peer is not None else None
        if found is None:
            return None
        engine = self._fleet.engines.get(found[0])
        pool = self._fleet.pool_of(engine) if engine is not None else None
        return _Here(pool, engine, found[1]) if engine is not None and pool is not None else None

    def _decide_owners(self, now: float) -> None:
        """Takes engines that only one kvpin may use, or leaves them to a peer. Tells what changed."""
        others: dict[str, dict[int, ToldClaim]] = {}
        for owner, peer in self._peers.items():
            reached = peer.socket if self.http_socket is not None else None
            for told in peer.engines:
                if told.claim is not None and told.id in peer.here:
                    claim = ToldClaim(told.claim, peer.label, told.model, reached)
                    others.setdefault(peer.here[told.id][0], {})[owner] = claim
        was_bidding = self._owners.is_bidding
        self._owners.decide(
            now,
            others,
            is_heard=self.is_connected,
            is_alone=self._exchange.is_alone and not self._peers,
        )
        if self._owners.is_bidding and not was_bidding:
            self._has_bid.set()
        self._update_engines()

    def _complain(self, event: str, **context: str) -> None:
        """Logs a warning, once."""
        key = repr((event, context.get("problem")))
        if key not in self._complained:
            self._complained.add(key)
            log.warning(event, **context)

    # --- watching ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Sends heartbeats, notices who is lost, and finds out when this kvpin may say that it is ready."""
        beat = monotonic()
        while True:
            joins = not (self._is_ready or self._fleet.stands_by)
            is_quiet = not joins and not self._owners.is_bidding
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S if is_quiet else _JOIN_POLL_S):
                    await self._has_bid.wait()
            self._has_bid.clear()
            now = monotonic()
            if now - beat > LOST_S:  # this kvpin was stopped: the others may have spoken meanwhile
                for peer in self._peers.values():
                    peer.follower.heard = now
                self._owners.doubt(now)
            self._decide_owners(now)
            if now - beat >= HEARTBEAT_S or joins:
                beat = now
                self._own.tell(self._own.heartbeat())
                self._own.tell(self._times(now))
                self._flush()
            for owner, peer in list(self._peers.items()):
                if now - peer.follower.heard > LOST_S:
                    self._lose(owner)
                elif not peer.follower.in_step or self._wants_contents(owner):
                    self._ask(now, owner, peer)
            if not self._is_ready:
                self._join(now)

    def _times(self, now: float) -> Times:
        answers = (peer.trip.answer(now, owner) for owner, peer in self._peers.items())
        return Times(now, [answer for answer in answers if answer is not None])

    def _update_engines(self) -> None:
        """Engines came, left, or have connected."""
        engines = self._described()
        if engines == self._engines:
            return
        self._engines = engines
        self._own.tell(self._state())
        for peer in self._peers.values():
            self._match(peer)

    def _join(self, now: float) -> None:
        if not self._fleet.is_ready():
            return
        if self._ready_by is None:
            self._ready_by = now + JOIN_S
        peers = self._peers.values()
        knows_all = bool(peers) and self._is_told and all(peer.follower.in_step for peer in peers)
        is_alone = not peers and self._exchange.is_alone
        if knows_all or is_alone or now > self._ready_by:
            self._is_ready = True
            if not (knows_all or is_alone):
                log.warning("ready without knowing what other kvpins do: they did not tell in time")

    def _lose(self, owner: int) -> None:
        """A peer that did not say that it stops is gone."""
        if (peer := self._peers.get(owner)) is not None:
            self._drop(owner)
            self._missed.add(owner)
            self.counts.lost += 1
            if peer.socket is not None:  # one that hangs would never answer what was passed on to it
                self._hang_up(peer.socket, "the kvpin that was to answer was lost")
            log.warning("another kvpin is lost: its requests count no more", peer=peer.label)

    def _drop(self, owner: int) -> None:
        """A peer is gone, and its requests with it."""
        peer = self._peers.pop(owner)
        peer.follower.lose()
        self.counts.gaps += peer.follower.gaps
        self.counts.divergences += peer.follower.divergences
        self._tenants.leave_elsewhere(owner)
        self._decide_owners(monotonic())


def address_of(spec: EngineSpec) -> tuple[str, bool]:
    """An engine's address as peers are told it, with its rank, and whether only this machine can reach it."""
    return (f"{socket.gethostname()} {spec.address}", True) if spec.is_local else (spec.address, False)
