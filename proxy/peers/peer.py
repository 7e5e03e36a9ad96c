"""Another kvpin, as this one sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from proxy.core.peers.follower import Follower
from proxy.core.peers.matching import disagreement, hash_alike, match
from proxy.core.peers.messages import Heard, Times, ToldEngine
from proxy.core.peers.round_trip import RoundTrip
from proxy.peers.exchange_stats import PeerStats
from proxy.peers.owners import ToldClaim

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Peer:
    """Another kvpin, its engines, and how far this one follows it.

    Attributes:
        follower: replays its requests.
        name: for people; None before it told its name.
        engines: its engines.
        socket: where it serves HTTP to this kvpin; None if this one cannot reach it.
        here: its id of an engine → the id here, and whether both make the same block hashes.
        asked: when it was asked for a listing last.
    """

    follower: Follower
    name: str | None = None
    engines: list[ToldEngine] = field(default_factory=list)
    socket: str | None = None
    here: dict[str, tuple[str, bool]] = field(default_factory=dict)
    asked: float = float("-inf")
    _trip: RoundTrip = field(default_factory=RoundTrip)

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

    def answer(self, now: float, owner: int) -> Heard | None:
        """The answer by which it measures the round trip; None before it told its time."""
        return self._trip.answer(now, owner)

    def time(self, now: float, times: Times, own: int) -> bool:
        """It tells its time. Returns whether it falls behind with that. `own`: this kvpin's number."""
        trip, follower = self._trip, self.follower
        trip.heard(now, times.sent)
        for heard in times.heard:
            if heard.of == own:
                trip.measure(now, heard)
        if trip.is_behind == follower.is_behind:
            return False
        follower.note_behind(now, is_behind=trip.is_behind)
        if not follower.is_behind:
            log.info("another kvpin has caught up", peer=self.label)
            return False
        log.warning(
            "another kvpin is behind: its requests count only when they are over",
            peer=self.label,
            round_trip_s=round(trip.seconds or 0, 2),
        )
        return True

    def stats(self, now: float) -> PeerStats:
        """For people."""
        return PeerStats(
            name=self.label,
            engines=len(self.here),
            in_flight=self.follower.in_flight,
            in_step=self.follower.in_step,
            round_trip_s=self._trip.seconds,
            behind=self.follower.is_behind,
            silent_s=round(now - self.follower.heard, 3),
            gaps=self.follower.gaps,
            divergences=self.follower.divergences,
        )
