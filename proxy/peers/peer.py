"""Another kvpin, as this one sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from typing_extensions import override

from engine_adapter.types import Usage
from proxy.core.peers.follower import Follower, LocalEngine
from proxy.core.peers.messages import ToldEngine, ToldPin
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.fleet.engine import Engine
from proxy.fleet.lease import PeerRequest
from proxy.fleet.pool import Pool
from proxy.peers.owners import ToldClaim


@dataclass(frozen=True, slots=True)
class PooledEngine(LocalEngine):
    """An engine of this kvpin on which requests of another one run.

    Attributes:
        hashes_alike: the other kvpin hashes its prompts as this one does. If not, only load is shared.
    """

    pool: Pool
    target: Engine
    hashes_alike: bool

    @property
    @override
    def engine(self) -> str:
        return self.target.id

    @property
    @override
    def placer(self) -> Placer:
        return self.pool.placer

    @property
    @override
    def tokens_per_block(self) -> int | None:
        return self.pool.tokens_per_block if self.hashes_alike else None

    @override
    def begun(self, placed: PlacedRequest) -> None:
        self.target.of_peers[placed.ticket] = PeerRequest(placed)
        self.target.from_peers += 1

    @override
    def answered(self, placed: PlacedRequest) -> None:
        self._forget(placed, has_answer=True)

    @override
    def end(self, placed: PlacedRequest, computed: int | None, report: Usage | None) -> None:
        self._forget(placed, has_answer=computed is not None)
        self.pool.end(self.target, placed, computed, report)

    def _forget(self, placed: PlacedRequest, *, has_answer: bool) -> None:
        """Nobody waits for the answer to a request any more."""
        if (request := self.target.of_peers.pop(placed.ticket, None)) is not None:
            request.ends(has_answer=has_answer)


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


@dataclass(slots=True)
class Peer:
    """Another kvpin, its engines, and how far this one follows it.

    Attributes:
        follower: replays its requests.
        name: for people; None before it told its name.
        engines: its engines.
        pins: the pins that it holds.
        socket: serves HTTP to this kvpin; None if this kvpin cannot reach it.
        here: its id of an engine → the id here, and whether both make the same block hashes.
        asked: when it was asked for what was missed last.
        is_doubted: keys or orders that it told last do not count here.
    """

    follower: Follower
    name: str | None = None
    engines: list[ToldEngine] = field(default_factory=list)
    pins: list[ToldPin] = field(default_factory=list)
    socket: str | None = None
    here: dict[str, tuple[str, bool]] = field(default_factory=dict)
    asked: float = float("-inf")
    is_doubted: bool = False

    @property
    def label(self) -> str:
        """Its name, or the number that it drew."""
        return self.name or f"{self.follower.owner:016x}"

    def match(self, now: float, engines: Sequence[ToldEngine]) -> list[str]:
        """Finds its engines among those of this kvpin. Returns what the operator has to change."""
        found = [(told, match(told, engines)) for told in self.engines]
        self.here = {told.id: (mine.id, hash_alike(told, mine)) for told, mine in found if mine is not None}
        self.follower.place_late(now)
        problems = (disagreement(told, engines) for told in self.engines)
        return [problem for problem in problems if problem is not None]

    def claims(self) -> Iterator[tuple[str, ToldClaim]]:
        """Its claims to engines that only one kvpin may use, with the ids of the engines here."""
        for told in self.engines:
            if told.claim is not None and told.id in self.here:
                yield self.here[told.id][0], ToldClaim(told.claim, self.label, told.model, self.socket)

    def stats(self, now: float) -> PeerStats:
        """For people."""
        return PeerStats(
            name=self.label,
            engines=len(self.here),
            in_flight=self.follower.in_flight,
            in_step=self.follower.in_step,
            silent_s=round(now - self.follower.heard, 3),
            missed=self.follower.missed,
        )


_COUNTED = re.compile(r"[a-z][a-z0-9_-]*-\d+(-dp\d+)?")


def match(told: ToldEngine, own: Iterable[ToldEngine]) -> ToldEngine | None:
    """The own engine that equals a peer's engine; None without one."""
    named = None
    for each in own:
        if each.address == told.address:
            return each
        if each.id == told.id and not (each.is_local or told.is_local or _COUNTED.fullmatch(told.id)):
            named = each
    return named


def hash_alike(told: ToldEngine, own: ToldEngine) -> bool:
    """True if both kvpins make the same block hashes of a prompt for this engine."""
    return (told.model, told.tokens_per_block) == (own.model, own.tokens_per_block)


def disagreement(told: ToldEngine, own: Iterable[ToldEngine]) -> str | None:
    """One sentence about settings of two kvpins that disagree; None if none do."""
    own = list(own)
    mine = match(told, own)
    if mine is None:
        same = next((each for each in own if each.id == told.id), None)
        if same is None or (same.is_local and told.is_local):
            return None  # single machines reach them: they are two, and a port may just have changed
        return (
            f"engine {told.id!r} is {told.address} there and {same.address} here, so it counts as two; "
            "give both kvpins the same address, or an id of your own"
        )
    if None in (told.model, mine.model) or hash_alike(told, mine):
        return None
    return (
        f"engine {mine.id!r} serves {told.model!r} in blocks of {told.tokens_per_block} tokens there and "
        f"{mine.model!r} in blocks of {mine.tokens_per_block} here: only its load is shared; "
        "give both kvpins the same engines and models"
    )
