"""One kvpin among several: tells of its requests, listens to the others, and notices who is lost.

    own requests ──→ Telling ──→ OwnRequests ──frames, 1 ms──→ bus ──→ the others
    the others ──→ bus ──→ Peer ──→ Placer, as for own requests

A kvpin that asks is told of all requests in flight; a newcomer, what engines hold, too. A request never waits
for the exchange. A kvpin that is silent for `LOST_S` is lost, and its requests end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic, time

import structlog

from engine_adapter import UNREADABLE
from proxy.core.books import MAX_SKEW_S, EngineMark, decode_marks, encode_marks, signed, verified
from proxy.core.peers.messages import (
    Ask,
    Contents,
    KvpinState,
    Leaving,
    Message,
    OwnRequests,
    RequestState,
    ToldEngine,
    ToldPin,
    UseReport,
    frame_of,
    messages_of,
    owner_of,
    unpacked,
)
from proxy.fleet.fleet import Fleet
from proxy.peers.bus import NEEDS_KEY, Bus, BusCallbacks, proven_marks, sealed_marks, secret_of
from proxy.peers.owners import Owners, ToldClaim
from proxy.peers.peer import ExchangeCounts, ExchangeStats, Peer, contents, described, in_parts
from proxy.request.tenants import Tenants
from proxy.runtime import Supervisor, within

log = structlog.get_logger(__name__)

# How long messages are collected for one frame.
BATCH_S = 0.001
# Requests in flight are told in frames of about this many bytes of hashes.
_PART_BYTES = 256 * 1024
# A newcomer waits this long for the others before it says that it is ready.
JOIN_S = 2.0
HEARTBEAT_S = 1.0
LOST_S = 3.0
# A kvpin whose keys or orders do not count here is asked again after this time: by then the operator may have
# given both the same admin key, or their clocks may agree.
AGAIN_S = 30.0
_JOIN_POLL_S = 0.05


class Peers:
    """The other kvpins, and what this one shares with them."""

    def __init__(
        self,
        bus: Bus,
        owner: int,
        fleet: Fleet,
        tenants: Tenants,
        hang_up: Callable[[str, str], None] = lambda _socket, _reason: None,
        admin_key: Callable[[], str | None] = lambda: None,
        may_own: Callable[[], bool] = lambda: True,
    ) -> None:
        """Tells of the pools that `fleet` makes from now on. `owner` is a number that no other kvpin has.
        `hang_up` drops the connections to the socket of a kvpin that is lost, for that reason. `admin_key`
        gives the key that seals orders to add engines, and signs issued keys. `may_own`: this kvpin may
        claim engines that only one kvpin may use."""
        self.counts, self._hang_up, self._admin_key = ExchangeCounts(), hang_up, admin_key
        self._may_own = may_own
        self.name, self.bus, self.owners = fleet.name, bus, Owners(owner, fleet)
        self._owner, self._fleet, self._tenants = owner, fleet, tenants
        # It knows what the others know, or has waited long enough; it was told what engines hold.
        self.is_ready = self._is_told = False
        self._missed = set[int]()  # kvpins that were lost: they may hold more when they are back
        self._join_until: float | None = None
        self._own = fleet.told = OwnRequests(self._flush_soon)
        self._flush_at: asyncio.TimerHandle | None = None
        self._engines = list[ToldEngine]()  # as they were told last
        self._asked: dict[int, bool] = {}  # who waits for requests in flight → with contents
        self._somebody_asked = asyncio.Event()
        self._is_over = False
        self._peers: dict[int, Peer] = {}
        self._has_bid = asyncio.Event()
        self._complained = set[str]()

    # --- life --------------------------------------------------------------------------------------

    def start(self, tasks: Supervisor) -> None:
        """Begins to exchange."""
        callbacks = BusCallbacks(self._receive, self._join, self._lose, self._remember)
        self._fleet.book.listeners.append(self._tell_marks)
        self._fleet.pins.listeners.append(self._tell_state)
        self._tenants.listeners.append(self._tell_state)
        tasks.keep("exchange", lambda: self.bus.run(callbacks))
        tasks.keep("exchange watch", self._watch)
        tasks.keep("exchange answers", self._answer)

    async def aclose(self) -> None:
        """Tells the others that all requests here are over. Nothing follows."""
        self._own.tell(Leaving())
        self._flush()
        self._is_over = True
        await self.bus.aclose()

    def sockets(self) -> list[str]:
        """The sockets on which the other kvpins of this machine serve HTTP to this one."""
        return [peer.socket for peer in self._peers.values() if peer.socket is not None]

    def pins(self) -> list[tuple[str, ToldPin]]:
        """The pins that other kvpins hold, each with its kvpin."""
        return [(peer.label, pin) for peer in self._peers.values() for pin in peer.pins]

    def stats(self) -> ExchangeStats:
        """For people."""
        now = monotonic()
        return ExchangeStats(
            connected=self.bus.is_connected,
            peers=[peer.stats(now) for peer in self._peers.values()],
            dropped=self.bus.dropped,
            lost=self.counts.lost,
        )

    # --- telling -----------------------------------------------------------------------------------

    def _say(self, messages: Sequence[Message]) -> None:
        if self._is_over:
            return
        self.counts.told += len(messages)
        self.bus.publish(frame_of(self._owner, messages))

    def _flush(self, *, anew: bool = False) -> None:
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        messages = self._own.take()
        messages += [UseReport(tenant, use) for tenant, use in self._tenants.take_used(anew=anew)]
        if messages:
            self._say(messages)

    def _introduce(self) -> None:
        self._engines = described(self._fleet, self.owners.claim_of)
        self._tell_state()
        self._own.tell(self._own.heartbeat(monotonic()))
        self._flush(anew=True)

    def _join(self) -> None:
        """The exchange works, or works again: what was told meanwhile is lost, at Redis both ways."""
        for owner in () if self.bus.is_private else self._peers:  # over sockets, the other one joins as well
            self._own.tell(Ask(owner, contents=self._wants_contents(owner)))
        self._introduce()

    def _tell_state(self) -> None:
        """Tells again who this kvpin is, with its engines, pins, what operators have ordered, and issued
        keys."""
        self._own.tell(self._state())

    async def _answer(self) -> None:
        """Answers the kvpins that ask, for ever. Long answers go out in parts, between requests."""
        while True:
            await self._somebody_asked.wait()
            self._somebody_asked.clear()
            asked, self._asked = self._asked, {}
            for to in (owner for owner, with_contents in asked.items() if with_contents):
                for message in contents(self._fleet, to):
                    self._say([message])
                    await asyncio.sleep(0)
            self._tell_state()
            self._flush(anew=True)
            for part in in_parts(self._own.in_flight(monotonic()), _hash_bytes, _PART_BYTES):
                self._say(part)

    def _flush_soon(self) -> None:
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def _state(self) -> KvpinState:
        path = str(self.bus.http_socket) if self.bus.http_socket is not None else None
        ahead_s = time() - monotonic()
        pins = [
            ToldPin(pin.pin_id, list(pin.engine_pins), pin.blocks, pin.expires + ahead_s, pin.label)
            for pin in self._fleet.pins.active(monotonic())
        ]
        marks, keys, secret = self._told_marks(), self._keys(), self._fleet.secret_name
        return KvpinState(self.name, self._engines, path, marks, pins, keys, secret)

    # --- listening ---------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        owner = owner_of(frame)
        if owner == self._owner:
            return
        try:
            messages = messages_of(frame) if owner is not None else None
        except UNREADABLE:
            messages = None
        if owner is None or messages is None:
            self._complain(
                "another kvpin has another version: nothing is shared with it, and load and limits count for "
                "each alone, until both run the same one"
            )
            return
        now, peer = monotonic(), self._peers.get(owner)
        if peer is None:
            peer = self._peers[owner] = Peer(owner, self._fleet, now)
            self._introduce()
        self.counts.heard += len(messages)
        for message in peer.receive(now, messages):
            if owner in self._peers:  # nothing counts after it has left
                self._hear(now, owner, peer, message)
        if owner in self._peers and not peer.in_step:
            self._ask(now, owner, peer)

    def _hear(self, now: float, owner: int, peer: Peer, message: Message) -> None:
        match message:
            case KvpinState():
                self._meet(now, peer, message)
            case UseReport():
                self._tenants.used_elsewhere(now, owner, message.tenant, message.use)
            case Ask() if message.of == self._owner:
                self._asked[owner] = self._asked.get(owner, False) or message.contents
                self._somebody_asked.set()
            case Leaving():
                self._drop(owner)
                log.info("another kvpin has stopped", peer=peer.label)
            case Contents() if message.to == self._owner:
                self._adopt(now, peer, message)

    def _meet(self, now: float, peer: Peer, state: KvpinState) -> None:
        """A peer says who it is, and which engines it has."""
        is_new, path = peer.name is None, state.http_socket
        peer.name, peer.engines, peer.pins = state.name, state.engines, state.pins
        peer.socket = path if path is not None and self.bus.reaches(path) else None
        if state.secret not in (b"", self._fleet.secret_name):
            self._complain(
                "another kvpin has other hashes and salts, because Redis was away when one of both started: "
                "restart both, one after the other",
                peer=peer.label,
            )
        peer.is_doubted = not all([self._take_marks(state.marks), self._take_keys(state.keys)])
        self._match(now, peer)
        self._decide_owners(now)
        if is_new:
            log.info("another kvpin is here", peer=peer.label, engines_shared=len(peer.here))

    def _secret(self) -> bytes | None:
        """Signs issued keys for the others, and seals orders; None keeps them here. On a private bus, all are
        this user's."""
        return b"" if self.bus.is_private else secret_of(self._admin_key())

    def _keys(self) -> bytes:
        entries, secret = self._tenants.issued.entries(), self._secret()
        if secret is None and entries:
            self._complain(
                "issued keys stay at this kvpin: set the same admin_key at all kvpins of the group, "
                f"{NEEDS_KEY}"
            )
        return signed(entries, secret, time()) if secret is not None and entries else b""

    def _take_keys(self, told: bytes) -> bool:
        """Takes over the issued keys of another kvpin, if it has this one's secret. False if they do not
        count."""
        secret = self._secret()
        now = None if self.bus.is_private else time()
        entries = verified(told, secret, now) if told and secret is not None else None
        if entries is not None:
            self._tenants.issued.merge(entries)
        elif told:
            self._complain(
                "issued keys of another kvpin do not count here: set the same admin_key at all kvpins of the "
                f"group, {NEEDS_KEY}, and clocks that differ by less than {MAX_SKEW_S:g} s"
            )
        return entries is not None or not told

    def _tell_marks(self) -> None:
        self._tell_state()
        self.bus.keep(encode_marks(self._told_marks()))

    def _told_marks(self) -> list[EngineMark]:
        """The operators' orders about engines, as the others are told them."""
        marks = self._fleet.book.marks()
        if self.bus.is_private:
            return marks
        told = sealed_marks(marks, self._secret())
        if len(told) < len(marks):
            self._complain(
                "an engine that was added is not told by Redis, because it has a key or headers, or because "
                f"there is no admin_key: add it on each machine, or set an admin_key: {NEEDS_KEY}"
            )
        return told

    def _take_marks(self, marks: list[EngineMark]) -> bool:
        """Takes over operators' orders that came by the exchange. False if some do not count."""
        heard = marks if self.bus.is_private else proven_marks(marks, self._secret())
        if len(heard) < len(marks):
            self._complain(
                "an engine that was added at another kvpin is not used here: give both the same admin_key, "
                f"{NEEDS_KEY}"
            )
        if not self._fleet.book.merge(heard, now=time()):
            self._complain(
                "an order about an engine does not count here, because its time is in the future: set the "
                f"clocks of all kvpins to the same time; they may differ by {MAX_SKEW_S:g} s"
            )
            return False
        return len(heard) == len(marks)

    def _remember(self, kept: bytes | None) -> None:
        """Takes over the orders that the exchange keeps, and has it keep those that only this kvpin knows."""
        try:
            self._take_marks(decode_marks(kept) if kept is not None else [])
        except UNREADABLE:
            self._complain("the orders that the exchange keeps cannot be read: they are replaced")
        told = self._told_marks()
        if told and (own := encode_marks(told)) != kept:
            self.bus.keep(own)

    def _adopt(self, now: float, peer: Peer, told: Contents) -> None:
        if told.engine is None:
            self._is_told = True
            self._missed.discard(peer.owner)
        elif (site := peer.site(told.engine)) is not None and site.hashes_alike:
            pool, engine = site.pool, site.engine
            if told.timings is not None:
                pool.placer.books[engine.id].rates.adopt(now, told.timings)
            for stretch in told.stretches:
                pool.adopt(engine, unpacked(stretch))
            for digest in unpacked(told.sessions):
                pool.placer.note_earlier(digest, engine.id)

    def _ask(self, now: float, owner: int, peer: Peer) -> None:
        """Asks a kvpin for its requests, unless it was just asked."""
        if now - peer.asked < HEARTBEAT_S:
            return
        peer.asked = now
        self._say([Ask(owner, contents=self._wants_contents(owner))])

    # --- engines -----------------------------------------------------------------------------------

    def _match(self, now: float, peer: Peer) -> None:
        """Finds a peer's engines here. Says what the operator has to change."""
        for problem in peer.match(now, self._engines):
            self._complain("kvpins disagree", peer=peer.label, problem=problem)

    def _decide_owners(self, now: float) -> None:
        """Takes engines that only one kvpin may use, or leaves them to a peer. Tells what changed."""
        others: dict[str, dict[int, ToldClaim]] = {}
        for owner, peer in self._peers.items():
            for url, claim in peer.claims().items():
                others.setdefault(url, {})[owner] = claim
        was_bidding = self.owners.is_bidding
        is_alone = self.bus.is_alone and not self._peers
        self.owners.decide(
            now, others, is_heard=self.bus.is_connected, is_alone=is_alone, may_own=self._may_own()
        )
        if self.owners.is_bidding and not was_bidding:
            self._has_bid.set()
        if (engines := described(self._fleet, self.owners.claim_of)) != self._engines:
            self._engines = engines  # some came, left, or have connected
            self._tell_state()
            for peer in self._peers.values():
                self._match(now, peer)

    def _complain(self, event: str, **context: str) -> None:
        """Warns, once."""
        key = repr((event, context.get("problem")))
        if key not in self._complained:
            self._complained.add(key)
            log.warning(event, **context)

    # --- watching ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Gives signs of life, notices who is lost, and finds out when this kvpin may say it is ready."""
        beat = monotonic()
        while True:
            joins = not (self.is_ready or self._fleet.stands_by)
            is_quiet = not joins and not self.owners.is_bidding
            await within(HEARTBEAT_S if is_quiet else _JOIN_POLL_S, self._has_bid.wait())
            self._has_bid.clear()
            now = monotonic()
            if now - beat > LOST_S:  # this kvpin was stopped: the others may have spoken meanwhile
                for peer in self._peers.values():
                    peer.heard = now
                self.owners.doubt(now)
            self._decide_owners(now)
            if now - beat >= HEARTBEAT_S or joins:
                beat = now
                self._own.tell(self._own.heartbeat(now))
                self._flush()
            for owner, peer in list(self._peers.items()):
                if now - peer.heard > LOST_S:
                    self._lose(owner)
                elif (
                    not peer.in_step
                    or self._wants_contents(owner)
                    or (peer.is_doubted and now - peer.asked > AGAIN_S)
                ):
                    self._ask(now, owner, peer)
            self._look_whether_ready(now)

    def _wants_contents(self, kvpin: int) -> bool:
        """True if a kvpin is to tell what engines hold: it was lost and is back, or this one is new, its
        engines are connected, and nobody has told it."""
        is_new = not self.is_ready and not self._is_told
        return (is_new or kvpin in self._missed) and self._fleet.is_ready()

    def _look_whether_ready(self, now: float) -> None:
        if self.is_ready or not self._fleet.is_ready():
            return
        if self._join_until is None:
            self._join_until = now + JOIN_S
        others = self._peers.values()
        knows_all = self._is_told and all(other.in_step for other in others) if others else self.bus.is_alone
        self.is_ready = knows_all or now > self._join_until
        if self.is_ready and not knows_all:
            log.warning("ready without knowing what other kvpins do: they did not tell in time")

    def _lose(self, owner: int) -> None:
        """A peer that did not say that it stops is gone."""
        if (peer := self._peers.get(owner)) is not None:
            self._drop(owner)
            self._missed.add(owner)
            self.counts.lost += 1
            if peer.socket is not None:  # a kvpin that hangs would never answer requests passed on to it
                self._hang_up(peer.socket, "the kvpin that was to answer was lost")
            log.warning("another kvpin is lost: its requests count no more", peer=peer.label)

    def _drop(self, owner: int) -> None:
        """A peer is gone, and its requests with it."""
        peer = self._peers.pop(owner)
        peer.lose()
        self.counts.missed += peer.missed
        self._tenants.leave_elsewhere(owner)
        self._decide_owners(monotonic())


def _hash_bytes(message: Message) -> int:
    placing = message.placing if isinstance(message, RequestState) else None
    return len(placing.hashes or b"") if placing is not None else 0
