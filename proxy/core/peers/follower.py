"""One peer as seen here: its requests, replayed, and whether all of them are known.

    unknown ──listing, then a heartbeat that agrees──→ in step ──gap, or a heartbeat that disagrees──→ unknown

Messages are replayed in both states: most are right even while some are missing. A batch that arrives after
a later batch is ignored.

While the peer is behind, its load is unknown, so a request counts only after its end: the cached blocks of
an ended request stay true for longer than its load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine_adapter.types import Usage
from proxy.core.peers.messages import (
    AnsweredWhole,
    Batch,
    Begun,
    FirstToken,
    Heard,
    Heartbeat,
    Listing,
    Message,
    Refined,
    RequestOver,
    chain_of,
)
from proxy.core.peers.telling import digest_of
from proxy.core.placement.placer import PlacedRequest, Placer


class LocalEngine(Protocol):
    """An engine of this kvpin on which a peer's requests run."""

    @property
    def engine(self) -> str:
        """Its id here."""

    @property
    def placer(self) -> Placer:
        """The placer of its pool."""

    @property
    def tokens_per_block(self) -> int | None:
        """Of the pool; None if the peer hashes prompts in another way, so that only load is shared."""

    def begun(self, placed: PlacedRequest) -> None:
        """A request was placed on it: those with the same prefix may wait for its answer."""

    def answered(self, placed: PlacedRequest) -> None:
        """The answer to a request has begun."""

    def end(self, placed: PlacedRequest, computed: int | None, report: Usage | None) -> None:
        """A request is over, see `Placer.end`."""


@dataclass(slots=True)
class _Request:
    """A peer's request. It has no site while this kvpin does not have its engine."""

    begun: Begun
    site: LocalEngine | None = None
    placed: PlacedRequest | None = None
    step: int = 0


class Follower:
    """Replays what one peer tells.

    Attributes:
        owner: the number that the peer drew when it started.
        heard: when it was heard last.
        in_step: all its requests are known.
        is_behind: its messages arrive too late to show its load.
        gaps: how often batches of it were lost.
        divergences: how often its own count of requests differed although no batch was lost.
    """

    def __init__(self, owner: int, site_of: Callable[[int, str], LocalEngine | None], now: float) -> None:
        """`site_of` finds the engine that this owner calls by that id; None if it is not here now."""
        self.owner = owner
        self.heard = now
        self.in_step = self.is_behind = False
        self.gaps = self.divergences = 0
        self._site_of = site_of
        self._next: int | None = None
        self._requests: dict[int, _Request] = {}
        self._unlisted: set[int] | None = None  # while a listing comes: requests that it has not named

    @property
    def in_flight(self) -> int:
        """The peer's requests that are known."""
        return len(self._requests)

    def receive(self, now: float, batch: Batch) -> list[Message]:
        """Replays a batch. Returns what else it says."""
        if self._next is not None and batch.number < self._next:
            return []
        self.heard = now
        if batch.number != self._next:
            self.gaps += self.in_step
            self.in_step, self._unlisted = False, None
        self._next = batch.number + 1
        return [message for message in batch.messages if not self._replay(now, message)]

    def _replay(self, now: float, message: Message) -> bool:
        """Replays a message; False if it is about something else than requests."""
        match message:
            case Begun():
                self._begin(now, message)
            case Refined():
                request = self._requests.get(message.id)
                if request is not None and request.site is not None and request.placed is not None:
                    request.site.placer.refine(request.placed, message.work)
            case FirstToken() | AnsweredWhole():
                self._step(now, message.id, 1 if isinstance(message, FirstToken) else 2)
            case RequestOver():
                self._end(now, message)
            case Listing():
                self._unlisted = set(self._requests)
            case Heartbeat():
                self._compare(message)
            case _:
                return False
        return True

    def _begin(self, now: float, begun: Begun) -> None:
        if self._unlisted is not None:
            self._unlisted.discard(begun.id)
        if begun.id not in self._requests:
            request = self._requests[begun.id] = _Request(begun)
            if not self.is_behind:
                self._place(now, request)
        if begun.step:
            self._step(now, begun.id, begun.step)

    def _place(self, now: float, request: _Request, *, is_new: bool = True) -> bool:
        """Places the request, if its engine is here. Of a request that is not new, the times are unknown."""
        begun = request.begun
        site = request.site = self._site_of(self.owner, begun.engine)
        if site is None:
            return False
        size = site.tokens_per_block
        request.placed = site.placer.begin(
            now,
            site.engine,
            begun.work,
            chain_of(begun, size) if size is not None else None,
            streams=begun.streams,
            known=begun.known and is_new,
            session=begun.session if is_new else None,
            part=begun.part,
        )
        site.begun(request.placed)
        if not is_new and begun.session is not None:
            site.placer.note_earlier(begun.session, site.engine)
        return True

    def _step(self, now: float, number: int, step: int) -> None:
        request = self._requests.get(number)
        if request is None or request.step:
            return
        request.step = step
        if request.site is None or request.placed is None:
            return
        if step == 1:
            request.site.placer.first_token(now, request.placed)
        else:
            request.site.placer.answered(now, request.placed)
        request.site.answered(request.placed)

    def _end(self, now: float, ended: RequestOver) -> None:
        request = self._requests.pop(ended.id, None)
        if request is None:
            return
        if self.is_behind and ended.computed is not None:
            self._place(now, request, is_new=False)
        _count_out(request, ended.computed, ended.report)

    def _compare(self, heartbeat: Heartbeat) -> None:
        if self._unlisted is not None:
            for number in self._unlisted & self._requests.keys():
                _count_out(self._requests.pop(number))
            self._unlisted, self.in_step = None, True
        told = (heartbeat.in_flight, heartbeat.digest)
        if self.in_step and told != (len(self._requests), digest_of(self._requests)):
            self.divergences += 1
            self.in_step = False

    def place_late(self, now: float) -> None:
        """Places requests whose engine was not here when they began."""
        if self.is_behind:
            return
        for request in self._requests.values():
            if request.site is None and self._place(now, request, is_new=False) and request.step:
                step, request.step = request.step, 0
                self._step(now, request.begun.id, step)

    def note_behind(self, now: float, *, is_behind: bool) -> None:
        """The peer falls behind, or has caught up."""
        self.is_behind = is_behind
        if is_behind:
            for request in self._requests.values():
                _count_out(request)
        else:
            self.place_late(now)

    def lose(self) -> None:
        """The peer is gone: all its requests are over."""
        for request in self._requests.values():
            _count_out(request)
        self._requests.clear()
        self.in_step = False


def _count_out(request: _Request, computed: int | None = None, report: Usage | None = None) -> None:
    """Takes the request out of the load. If it is over, its engine has `computed` new tokens; otherwise it
    may be placed again."""
    if request.site is not None and request.placed is not None:
        request.site.end(request.placed, computed, report)
    request.site = request.placed = None


# What a peer has in flight changes in less than that.
BEHIND_S = 0.5
# One long trip is a busy moment. Several in succession are a delay.
_TRIPS = 2


class RoundTrip:
    """The time from this kvpin to a peer and back, without the time that the peer held the message.

        here ──sent──→ peer ──sent, held_s──→ here: round trip = now - sent - held_s

    The clocks of two machines differ, so a message does not show its age. The round trip is an upper bound.
    """

    def __init__(self) -> None:
        self._heard: tuple[float, float] | None = (
            None  # when the peer sent its times last, and when they came
        )
        self._trips: deque[float] = deque(maxlen=_TRIPS)

    def heard(self, now: float, sent: float) -> None:
        """The peer told its time: `sent` by its own clock."""
        self._heard = sent, now

    def answer(self, now: float, peer: int) -> Heard | None:
        """The answer by which the peer measures the round trip; None before it told its time."""
        if self._heard is None:
            return None
        sent, came = self._heard
        return Heard(peer, sent, now - came)

    def measure(self, now: float, heard: Heard) -> None:
        """The peer answered."""
        self._trips.append(now - heard.sent - heard.held_s)

    @property
    def seconds(self) -> float | None:
        """The shortest of the last trips; None before there are enough of them."""
        return min(self._trips) if len(self._trips) == _TRIPS else None

    @property
    def is_behind(self) -> bool:
        """True if the peer's messages are too old to show its load."""
        return self.seconds is not None and self.seconds > BEHIND_S
