"""What each engine is busy with.

The proxy sees its own requests: a ledger of prefills placed and not yet answered, in seconds of the engine's
time, and of streams being decoded. An engine is taken to compute one prompt after the other, which is what
chunked prefill comes to. First tokens correct the ledger, and what the engine says of its load does too, so
that nothing that was lost stays on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

# A prefill that no first token ends is forgotten: by then the request was given up, whatever became of it.
FORGET_S = 600.0
# What an engine said of its load is believed for so long: a few of its health checks.
REPORT_S = 15.0
# Prompts measured together. Engines mix them in their steps: of so many, what they have begun of the next
# hardly counts.
MANY = 8


class LoadView(msgspec.Struct, frozen=True, gc=False):
    """An engine's load now: requests in flight, seconds of prefill before a new one, streams decoding."""

    in_flight: int = 0
    queue_s: float = 0.0
    decoding: int = 0


IDLE = LoadView()


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of an engine before its first token: tokens to compute, and to bring back."""

    computed: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a prompt took of an engine, on average of several that kept it busy one after the other.

    Attributes:
        work: what it asked for.
        seconds: of the engine's time.
        decoding: streams that were decoded meanwhile.
        blurred: it is no more than that: the engine did other things as well.
    """

    work: Work
    seconds: float
    decoding: float
    blurred: bool = False


class Remaining(NamedTuple):
    """Seconds until a request's first token: what the engine does before it, and what is left of itself.
    That token will be `seen` when its answer is a stream."""

    before_s: float
    own_s: float
    seen: bool


class Spent(NamedTuple):
    """What an engine did from a request to its whole answer.

    Attributes:
        seconds: how long that took.
        computed: prompt tokens it computed meanwhile, of all requests.
        decoding: other streams it decodes at the end.
    """

    seconds: float
    computed: int
    decoding: int


class _Begun(NamedTuple):
    """When a request was placed whose answer comes whole, and what the engine had computed by then."""

    at: float
    computed: int
    unknown: int


@dataclass(slots=True)
class _Prefill:
    work: Work | None  # None where it is not known
    expected_s: float
    placed: float
    seen: bool  # its first token will be


@dataclass(slots=True)
class _Spell:
    """Prefills that ended since the engine turned to the first of them, with no gap between them."""

    since: float
    prompts: int = 0
    computed: int = 0
    host: int = 0
    disk: int = 0
    decoding: int = 0
    blurred: bool = False  # others had the engine do something meanwhile

    def add(self, work: Work, decoding: int, others: int) -> None:
        self.blurred = self.blurred or others > 0
        self.prompts += 1
        self.computed += work.computed
        self.host += work.host
        self.disk += work.disk
        self.decoding += decoding + others

    def sample(self, now: float) -> Sample:
        n = self.prompts
        work = Work(round(self.computed / n), round(self.host / n), round(self.disk / n))
        return Sample(work, (now - self.since) / n, self.decoding / n, self.blurred)


class EngineLedger:
    """In-flight work of one engine.

    Attributes:
        served: requests it was given so far.
    """

    def __init__(self) -> None:
        self.served = 0
        self._prefills: dict[int, _Prefill] = {}  # in the order in which they were placed
        self._expected_s = 0.0  # of all of them
        self._decoding = set[int]()
        self._turn = 0.0  # when the engine turned to the first of the prefills
        self._spell: _Spell | None = None  # None while the engine does what is not seen to end
        self._whole: dict[int, _Begun] = {}  # requests whose answers come whole
        self._computed = 0  # prompt tokens so far
        self._unknown = 0  # prompts of which it is not known what was computed
        self._foreign, self._foreign_until = 0, 0.0
        self._missing = frozenset[int]()

    @property
    def in_flight(self) -> int:
        """Requests placed and not over."""
        return len(self._prefills) + len(self._decoding)

    def begin(self, now: float, expected_s: float, work: Work | None, *, seen: bool = True) -> int:
        """A request was placed that is expected to take `expected_s` of the engine's time up to its first
        token, which is `seen` when the answer is a stream; its `work` is None where it is not known. Returns
        its ticket."""
        if self._settle(now) is None:
            self._turn, self._spell = now, _Spell(now)
        self.served += 1
        if not seen:
            self._spell = None
            self._whole[self.served] = _Begun(now, self._computed, self._unknown)
        self._prefills[self.served] = _Prefill(work, expected_s, now, seen)
        self._expected_s += expected_s
        return self.served

    def refine(self, ticket: int, expected_s: float, work: Work) -> None:
        """More is known of a request than when it was placed."""
        prefill = self._prefills.get(ticket)
        if prefill is not None:
            self._expected_s += expected_s - prefill.expected_s
            prefill.expected_s = expected_s
            if prefill.work is not None:
                prefill.work = work

    def reprice(self, price: Callable[[Work], float]) -> None:
        """Rates turned out to be others than when the requests in flight were placed."""
        for prefill in self._prefills.values():
            if prefill.work is not None:
                prefill.expected_s = price(prefill.work)
        self._expected_s = sum(prefill.expected_s for prefill in self._prefills.values())

    def first_token(self, now: float, ticket: int) -> Sample | None:
        """Its answer has begun. Returns what was learned of the engine's time, if anything."""
        self._settle(now)
        prefill = self._take(ticket, computed=True)
        if prefill is None:
            return None
        self._turn, spell, decoding = now, self._spell, len(self._decoding)
        self._decoding.add(ticket)
        if spell is None or prefill.work is None:
            all_seen = all(prefill.seen for prefill in self._prefills.values())
            self._spell = _Spell(now) if all_seen else None
            return None
        spell.add(prefill.work, decoding, self._others(now))
        if self._prefills and spell.prompts < MANY:
            return None
        self._spell = _Spell(now)
        return spell.sample(now)

    def answered(self, now: float, ticket: int) -> Spent | None:
        """Its answer came whole: the engine is done with it, and has computed the prompts placed before it.
        Returns what the engine did meanwhile, None where that is not known."""
        begun = self._whole.pop(ticket, None)
        if begun is None:
            return None
        self._settle(now)
        for each in [n for n, prefill in self._prefills.items() if n <= ticket and not prefill.seen]:
            if next(iter(self._prefills)) == each:
                self._turn = now
            self._take(each, computed=True)
            self._decoding.add(each)
        self._decoding.discard(ticket)
        if self._unknown != begun.unknown:
            return None
        decoding = len(self._decoding) + self._others(now)
        return Spent(now - begun.at, self._computed - begun.computed, decoding)

    def end(self, now: float, ticket: int) -> None:
        """The request is over, in whatever way."""
        self._whole.pop(ticket, None)
        if next(iter(self._prefills), None) == ticket:
            self._turn = now
        self._drop(ticket)

    def reported(self, now: float, requests: int) -> None:
        """The engine says it has so many requests. Those beyond ours are others'. Ours of which it knows
        nothing, twice in a row, were lost: one that was just placed may be on its way."""
        missing = frozenset() if requests else frozenset((*self._prefills, *self._decoding))
        for ticket in missing & self._missing:
            self.end(now, ticket)
        self._missing = missing
        self._foreign = max(requests - self.in_flight, 0)
        self._foreign_until = now + REPORT_S

    def view(self, now: float) -> LoadView:
        """The load now."""
        first = self._settle(now) if self._prefills else None
        streams = len(self._decoding)
        if self._foreign:
            streams += self._others(now)
        if first is None:
            return LoadView(streams, 0.0, streams) if streams else IDLE
        queue_s = self._expected_s - first.expected_s + self._left_s(now, first)
        return LoadView(len(self._prefills) + streams, queue_s, streams)

    def remaining(self, now: float, ticket: int) -> Remaining | None:
        """How long its first token will take; None once that has come, or the request is over."""
        first, before = self._settle(now), 0.0
        for each, prefill in self._prefills.items():
            own = self._left_s(now, prefill) if prefill is first else prefill.expected_s
            if each == ticket:
                return Remaining(before, own, prefill.seen)
            before += own
        return None

    def _others(self, now: float) -> int:
        """Requests the engine has of others."""
        return self._foreign if now < self._foreign_until else 0

    def _left_s(self, now: float, first: _Prefill) -> float:
        """Of the prefill the engine is at. What is late is taken to be as late again: an engine that hangs
        does not look idle."""
        return abs(self._turn + first.expected_s - now)

    def _settle(self, now: float) -> _Prefill | None:
        """Prefills that end unseen end as expected; those that never end are forgotten. Returns the one that
        the engine is at."""
        while self._prefills:
            ticket = next(iter(self._prefills))
            first = self._prefills[ticket]
            ends = self._turn + (FORGET_S if first.seen else first.expected_s)
            if now < ends:
                return first
            self._drop(ticket, computed=not first.seen)
            following = next(iter(self._prefills.values()), first)
            self._turn = max(ends, following.placed)
            if not first.seen:
                self._decoding.add(ticket)
        return None

    def _drop(self, ticket: int, *, computed: bool = False) -> None:
        """The request is over, or taken to be. When the engine was done with a prefill is not known."""
        self._decoding.discard(ticket)
        if self._take(ticket, computed=computed) is not None:
            self._spell = None

    def _take(self, ticket: int, *, computed: bool) -> _Prefill | None:
        """The prefill leaves the queue, all of it computed or nobody knows how much."""
        prefill = self._prefills.pop(ticket, None)
        if prefill is not None:
            self._expected_s = self._expected_s - prefill.expected_s if self._prefills else 0.0
            if computed and prefill.work is not None:
                self._computed += prefill.work.computed
            else:
                self._unknown += 1
        return prefill
