"""One peer as seen here: its requests, replayed.

They are soft state: each heartbeat of the peer names those that go on. A request that it does not name is
over: the message about its end was lost. If it names one that is not known here, the peer is asked for all.

While its messages come later than before, its times say nothing: rates that were learned from them would stay
wrong for long. Its requests count as load nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from engine_adapter.types import Usage
from proxy.core.peers.messages import (
    AnswerBegan,
    Begun,
    Heartbeat,
    Message,
    Refined,
    RequestOver,
    chain_of,
    unpacked,
)
from proxy.core.placement.placer import PlacedRequest, Placer

# What a peer has in flight changes in less than that.
LATE_S = 0.5
# From heartbeat to heartbeat, clocks of two machines differ by at most that more.
DRIFT_S = 0.001


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
        in_step: its last heartbeat named no request that is not known here.
        missed: how often one did, after one that did not.
        is_late: its last heartbeat came `LATE_S` later than others did.
    """

    def __init__(self, owner: int, site_of: Callable[[int, str], LocalEngine | None], now: float) -> None:
        """`site_of` finds the engine that this owner calls by that id; None if it is not here now."""
        self.owner = owner
        self.heard = now
        self.in_step = self.is_late = False
        self.missed = 0
        self._least_s = inf  # between the clocks, with the way of a heartbeat
        self._site_of = site_of
        self._requests: dict[int, _Request] = {}

    @property
    def in_flight(self) -> int:
        """The peer's requests that are known."""
        return len(self._requests)

    def receive(self, now: float, messages: Iterable[Message]) -> list[Message]:
        """Replays messages. Returns those that are about something else than requests."""
        self.heard = now
        return [message for message in messages if not self._replay(now, message)]

    def _replay(self, now: float, message: Message) -> bool:
        match message:
            case Begun():
                self._begin(now, message)
            case Refined():
                request = self._requests.get(message.id)
                if request is not None and request.site is not None and request.placed is not None:
                    request.site.placer.refine(request.placed, message.work)
            case AnswerBegan():
                self._step(now, message.id, message.step)
            case RequestOver():
                if (request := self._requests.pop(message.id, None)) is not None:
                    _end(request, message.computed, message.report)
            case Heartbeat():
                self._compare({*unpacked(message.requests)})
                way_s = now - message.sent
                self._least_s = min(way_s, self._least_s + DRIFT_S)
                self.is_late = way_s - self._least_s > LATE_S
            case _:
                return False
        return True

    def _begin(self, now: float, begun: Begun) -> None:
        if begun.id not in self._requests:
            request = self._requests[begun.id] = _Request(begun)
            self._place(now, request)
        if begun.step:
            self._step(now, begun.id, begun.step)

    def _place(self, now: float, request: _Request, *, is_new: bool = True) -> bool:
        """Places the request, if its engine is here. Of a request that is not new, the times are unknown."""
        begun, is_new = request.begun, is_new and not self.is_late
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

    def _compare(self, alive: set[int]) -> None:
        """A heartbeat names the requests that go on."""
        for number in self._requests.keys() - alive:
            _end(self._requests.pop(number))
        was_in_step, self.in_step = self.in_step, alive <= self._requests.keys()
        self.missed += was_in_step and not self.in_step

    def place_late(self, now: float) -> None:
        """Places requests whose engine was not here when they began."""
        for request in self._requests.values():
            if request.site is None and self._place(now, request, is_new=False) and request.step:
                step, request.step = request.step, 0
                self._step(now, request.begun.id, step)

    def lose(self) -> None:
        """The peer is gone: all its requests are over."""
        self._compare(set())
        self.in_step = False


def _end(request: _Request, computed: int | None = None, report: Usage | None = None) -> None:
    """A request is over: its engine has `computed` new tokens, None if that is not known."""
    if request.site is not None and request.placed is not None:
        request.site.end(request.placed, computed, report)
