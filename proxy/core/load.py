"""What each engine is busy with.

The proxy sees its own requests: a ledger of prefills placed and not yet answered, in seconds of the engine's
time, and of streams being decoded. An engine is taken to compute one prompt after the other, which is what
chunked prefill comes to. First tokens correct the ledger, and what the engine says of its load does too, so
that nothing that was lost stays on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

# First tokens this close together come of one step of the engine, which computed several prompts at once.
SAME_STEP_S = 0.005
# A prefill that no first token ends is forgotten: by then the request was given up, whatever became of it.
FORGET_S = 600.0
# What an engine said of its load is believed for so long: a few of its health checks.
REPORT_S = 15.0


class LoadView(msgspec.Struct, frozen=True, gc=False):
    """An engine's load now: requests in flight, seconds of prefill before a new one, streams decoding."""

    in_flight: int = 0
    queue_s: float = 0.0
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of an engine before its first token: tokens to compute, and to bring back."""

    computed: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """An engine's time that some work took, while so many streams were decoding."""

    work: Work
    seconds: float
    decoding: int


@dataclass(slots=True)
class _Prefill:
    work: Work
    expected_s: float
    placed: float
    seen: bool  # its first token will be


class EngineLedger:
    """In-flight work of one engine.

    Attributes:
        served: requests it was given so far.
    """

    def __init__(self) -> None:
        self.served = 0
        self._prefills: dict[int, _Prefill] = {}  # in the order in which they were placed
        self._expected_s = 0.0  # of all of them
        self._decoding: dict[int, float] = {}  # ticket → since when
        self._turn = 0.0  # when the engine turned to the first of the prefills, unless it came later
        self._step: Begun | None = None
        self._foreign, self._foreign_until = 0, 0.0
        self._missing: frozenset[int] = frozenset()

    @property
    def in_flight(self) -> int:
        """Requests placed and not over."""
        return len(self._prefills) + len(self._decoding)

    def begin(self, now: float, expected_s: float, work: Work, *, seen: bool = True) -> int:
        """A request was placed that is expected to take `expected_s` of the engine's time up to its first
        token, which is `seen` when the answer is a stream. Returns its ticket."""
        self.served += 1
        self._prefills[self.served] = _Prefill(work, expected_s, now, seen)
        self._expected_s += expected_s
        return self.served

    def refine(self, ticket: int, expected_s: float, work: Work) -> None:
        """More is known of a request than when it was placed."""
        prefill = self._prefills.get(ticket)
        if prefill is not None:
            self._expected_s += expected_s - prefill.expected_s
            prefill.expected_s, prefill.work = expected_s, work

    def reprice(self, price: Callable[[Work], float]) -> None:
        """Rates turned out to be others than when the requests in flight were placed."""
        for prefill in self._prefills.values():
            prefill.expected_s = price(prefill.work)
        self._expected_s = sum(prefill.expected_s for prefill in self._prefills.values())

    def first_token(self, now: float, ticket: int) -> Begun | None:
        """Its answer has begun. Returns what was learned of the engine's time, if anything: of a prompt that
        overtook others, or was not computed alone, nothing."""
        self._settle(now)
        is_first = next(iter(self._prefills), None) == ticket
        prefill = self._take(ticket)
        if prefill is None:
            return None
        decoding, turn = len(self._decoding), max(self._turn, prefill.placed)
        self._decoding[ticket] = self._turn = now
        if not is_first or now - turn < SAME_STEP_S:
            self._step = None
            return None
        learned, self._step = self._step, Begun(prefill.work, now - turn, decoding)
        if self._prefills:
            return learned  # the next may come of the same step
        learned, self._step = self._step, None
        return learned

    def end(self, now: float, ticket: int) -> None:
        """The request is over, in whatever way."""
        if next(iter(self._prefills), None) == ticket:
            self._turn = now
        self._take(ticket)
        self._decoding.pop(ticket, None)

    def reported(self, now: float, requests: int) -> None:
        """The engine says it has so many requests. Those beyond ours are others'. Ours of which it knows
        nothing, twice in a row, were lost: one that was just placed may be on its way."""
        missing = frozenset() if requests else frozenset((*self._prefills, *self._decoding))
        for ticket in missing & self._missing:
            self._take(ticket)
            self._decoding.pop(ticket, None)
        self._missing = missing
        self._foreign = max(requests - self.in_flight, 0)
        self._foreign_until = now + REPORT_S

    def view(self, now: float) -> LoadView:
        """The load now."""
        if self._prefills:
            self._settle(now)
        in_flight = len(self._prefills) + len(self._decoding)
        foreign = self._foreign if now < self._foreign_until else 0
        if not self._prefills:
            return LoadView(in_flight + foreign, 0.0, len(self._decoding) + foreign)
        first = next(iter(self._prefills.values()))
        worked = now - max(self._turn, first.placed)
        # What is late is taken to be as late again: an engine that hangs does not look idle.
        left = abs(first.expected_s - worked)
        queue_s = max(self._expected_s - first.expected_s, 0.0) + left
        return LoadView(in_flight + foreign, queue_s, len(self._decoding) + foreign)

    def _settle(self, now: float) -> None:
        """Prefills that end unseen end as expected; those that never end are forgotten."""
        while self._prefills:
            ticket, first = next(iter(self._prefills.items()))
            ends = max(self._turn, first.placed) + (FORGET_S if first.seen else first.expected_s)
            if now < ends:
                return
            self._take(ticket)
            self._turn = ends
            if not first.seen:
                self._decoding[ticket] = ends

    def _take(self, ticket: int) -> _Prefill | None:
        prefill = self._prefills.pop(ticket, None)
        if prefill is not None:
            self._expected_s = self._expected_s - prefill.expected_s if self._prefills else 0.0
        return prefill
