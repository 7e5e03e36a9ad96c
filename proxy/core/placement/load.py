"""The work in flight on each engine.

A ledger holds the prefills that were placed and not yet answered, in seconds of the engine's time, and the
streams being decoded. It assumes that an engine computes one prompt after the other, which chunked prefill
amounts to. A request stays until it ends, or the engine reports that it has none. `TimeoutSettings` says when
a request is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from proxy.core.admission import Backlog

REPORT_S = 15.0  # an engine's reported load counts for this time: a few health checks
# Prompts that are measured together. Engines mix prompts in their steps; with this many, the part of the next
# prompt that has begun hardly counts.
MANY = 8


class LoadView(msgspec.Struct, frozen=True, gc=False):
    """An engine's load now: requests in flight, seconds of prefill before a new one, streams decoding."""

    in_flight: int = 0
    queue_s: float = 0.0
    decoding: int = 0


IDLE = LoadView()


class Work(msgspec.Struct, frozen=True, gc=False):
    """The work of a request before its first token: tokens to compute, and tokens to restore by tier."""

    computed: int
    host: int = 0
    disk: int = 0


class LoadSample(msgspec.Struct, frozen=True, gc=False):
    """Engine time that one prompt took: a mean over prompts that kept the engine busy without a gap."""

    work: Work  # of the prompt
    seconds: float  # of the engine's time
    decoding: float  # streams that were decoded meanwhile
    blurred: bool = False  # the engine also worked for clients that kvpin does not see


class Remaining(NamedTuple):
    """Seconds until a request's first token: other work before it, and the rest of its own. The first token
    will be `seen` if the answer is a stream."""

    before_s: float
    own_s: float
    seen: bool


class Spent(NamedTuple):
    """An engine's work between a request and its whole answer."""

    seconds: float  # time between the two
    computed: int  # prompt tokens it computed meanwhile, of all requests
    decoding: int  # other streams it decodes at the end


class _Begun(NamedTuple):
    """When a request was placed whose answer does not stream, and what the engine had computed by then."""

    at: float
    computed: int
    unknown: int


class _Prefill(Struct):
    ticket: int
    work: Work | None  # None if it is not known
    expected_s: float
    placed: float
    seen: bool  # its first token will be


class _BusyPeriod(Struct):
    """Prefills that ended one after the other, without a gap, since the engine began the first of them."""

    since: float
    prompts: int = 0
    computed: int = 0
    host: int = 0
    disk: int = 0
    decoding: int = 0
    blurred: bool = False  # the engine also worked for clients that kvpin does not see

    def add(self, work: Work, decoding: int, others: int) -> None:
        self.blurred = self.blurred or others > 0
        self.prompts += 1
        self.computed += work.computed
        self.host += work.host
        self.disk += work.disk
        self.decoding += decoding + others

    def sample(self, now: float) -> LoadSample:
        n = self.prompts
        work = Work(round(self.computed / n), round(self.host / n), round(self.disk / n))
        return LoadSample(work, (now - self.since) / n, self.decoding / n, self.blurred)


class EngineLedger:
    """Work in flight on one engine."""

    def __init__(self) -> None:
        self.placed = 0  # requests that were placed on it so far
        self.backlog = Backlog()  # requests that the engine reports to wait
        self._prefills: dict[int, _Prefill] = {}  # by ticket, in the order they were placed
        self._first: _Prefill | None = None  # of them: the one that the engine is computing
        self._expected_s = 0.0  # of all of them
        self._decoding: set[int] = set()
        self._pulls: set[int] = set()  # requests whose KV another engine has yet to send
        self._turn = 0.0  # when the engine began the first of the prefills
        self._busy: _BusyPeriod | None = None  # None while a prefill is queued whose end is not seen
        self._whole: dict[int, _Begun] = {}  # requests whose answers do not stream
        self._computed = 0  # prompt tokens computed so far
        self._unknown = 0  # prompts whose computed tokens are not known
        self._foreign, self._foreign_until = 0, 0.0
        self._missing: frozenset[int] = frozenset()

    @property
    def in_flight(self) -> int:
        """Requests placed and not over."""
        return len(self._prefills) + len(self._pulls) + len(self._decoding)

    def begin(self, now: float, expected_s: float, work: Work | None, *, seen: bool = True) -> int:
        """A request was placed that takes `expected_s` seconds of the engine's time up to its first token.
        `work`: None if it is not known. `seen`: its first token will be seen, because the answer is a stream.
        Returns its ticket."""
        self.placed += 1
        if self.backlog.waiting:
            self.backlog.placed()
        self._queue(now, _Prefill(self.placed, work, expected_s, now, seen))
        return self.placed

    def begin_pull(self, *, seen: bool = True) -> int:
        """A request was placed whose prompt another engine computes. It waits until its first token, and then
        counts as a stream; from the beginning, if that will not be `seen`. Returns its ticket."""
        self.placed += 1
        self.backlog.placed()
        (self._pulls if seen else self._decoding).add(self.placed)
        return self.placed

    def computes(
        self, now: float, ticket: int, expected_s: float, work: Work | None, *, seen: bool = True
    ) -> None:
        """The engine has to compute the prompt of such a request itself, see `begin`."""
        self._pulls.discard(ticket)
        self._decoding.discard(ticket)
        self._queue(now, _Prefill(ticket, work, expected_s, now, seen))

    def _queue(self, now: float, prefill: _Prefill) -> None:
        if self._first is None or self._settle(now) is None:
            self._turn, self._busy = now, _BusyPeriod(now)
        if not prefill.seen:
            self._busy = None
            self._whole[prefill.ticket] = _Begun(now, self._computed, self._unknown)
        self._prefills[prefill.ticket] = prefill
        if self._first is None:
            self._first = prefill
        self._expected_s += prefill.expected_s

    def refine(self, ticket: int, expected_s: float, work: Work) -> None:
        """Corrects the work of a request that was placed."""
        prefill = self._prefills.get(ticket)
        if prefill is not None:
            self._expected_s += expected_s - prefill.expected_s
            prefill.expected_s = expected_s
            if prefill.work is not None:
                prefill.work = work

    def reprice(self, price: Callable[[Work], float]) -> None:
        """Computes the cost of the requests in flight again, after rates have changed."""
        for prefill in self._prefills.values():
            if prefill.work is not None:
                prefill.expected_s = price(prefill.work)
        self._expected_s = sum(prefill.expected_s for prefill in self._prefills.values())

    def first_token(self, now: float, ticket: int) -> LoadSample | None:
        """Its first token came. Returns a sample of the engine's time, if one is complete."""
        if self.backlog.waiting:
            self.backlog.began(now)
        self._settle(now)
        prefill = self._take(ticket, computed=True)
        if prefill is None:
            if ticket in self._pulls:
                self._pulls.remove(ticket)
                self._decoding.add(ticket)
            return None
        self._turn, busy, decoding = now, self._busy, len(self._decoding)
        self._decoding.add(ticket)
        if busy is None or prefill.work is None:
            all_seen = all(prefill.seen for prefill in self._prefills.values())
            self._busy = _BusyPeriod(now) if all_seen else None
            return None
        busy.add(prefill.work, decoding, self._others(now))
        if self._prefills and busy.prompts < MANY:
            return None
        self._busy = _BusyPeriod(now)
        return busy.sample(now)

    def answered(self, now: float, ticket: int) -> Spent | None:
        """A whole answer came: the engine has finished the request, and the prompts placed before it.
        Returns what the engine did meanwhile; None if that is not known."""
        if self.backlog.waiting:
            self.backlog.began(now)
        begun = self._whole.pop(ticket, None)
        if begun is None:
            return None
        self._settle(now)
        for each in [n for n, prefill in self._prefills.items() if n <= ticket and not prefill.seen]:
            self._turn_of(each, now)
            self._take(each, computed=True)
            self._decoding.add(each)
        self._decoding.discard(ticket)
        if self._unknown != begun.unknown:
            return None
        decoding = len(self._decoding) + self._others(now)
        return Spent(now - begun.at, self._computed - begun.computed, decoding)

    def end(self, now: float, ticket: int) -> None:
        """The request is over: answered, failed or cancelled."""
        self._whole.pop(ticket, None)
        if ticket in self._prefills:
            self._turn_of(ticket, now)
            self._drop(ticket)
        else:
            self._decoding.discard(ticket)
            self._pulls.discard(ticket)

    def reported(self, now: float, requests: int) -> None:
        """The engine reports `requests` running requests. Those beyond ours belong to others. If it reports
        none twice in a row, ours are lost; once is not enough, as a request may be on its way."""
        missing = frozenset() if requests else frozenset((*self._prefills, *self._decoding))
        for ticket in missing & self._missing:
            self.end(now, ticket)
        self._missing = missing
        self._foreign = max(requests - self.in_flight, 0)
        self._foreign_until = now + REPORT_S

    def view(self, now: float) -> LoadView:
        """The load now."""
        first = self._first if self._first is None else self._settle(now)
        streams = len(self._decoding)
        if self._foreign:
            streams += self._others(now)
        in_flight = len(self._prefills) + len(self._pulls) + streams
        if first is None:
            return LoadView(in_flight, 0.0, streams) if in_flight else IDLE
        queue_s = self._expected_s - first.expected_s + self._left_s(now, first)
        return LoadView(in_flight, queue_s, streams)

    def remaining(self, now: float, ticket: int) -> Remaining | None:
        """Time until its first token; None if that has come or the request is over."""
        first, before = self._settle(now), 0.0
        for each, prefill in self._prefills.items():
            own = self._left_s(now, prefill) if prefill is first else prefill.expected_s
            if each == ticket:
                return Remaining(before, own, prefill.seen)
            before += own
        return None

    def _others(self, now: float) -> int:
        """Requests that the engine has from others."""
        return self._foreign if now < self._foreign_until else 0

    def _left_s(self, now: float, first: _Prefill) -> float:
        """Seconds left of the prefill that the engine is computing. A prefill that is late is expected to be
        as late again, so that an engine that hangs does not look idle."""
        return abs(self._turn + first.expected_s - now)

    def _turn_of(self, ticket: int, now: float) -> None:
        """The engine is done with a request. If it was computing that one, it turns to the next."""
        if self._first is not None and self._first.ticket == ticket:
            self._turn = now

    def _settle(self, now: float) -> _Prefill | None:
        """Moves prefills whose end is not seen to the streams when they were expected to end. Returns the
        prefill that the engine is computing."""
        while (first := self._first) is not None:
            ends = self._turn + first.expected_s
            if first.seen or now < ends:
                return first
            self._drop(first.ticket, computed=True)
            self._turn = max(ends, (self._first or first).placed)
            self._decoding.add(first.ticket)
        return None

    def _drop(self, ticket: int, *, computed: bool = False) -> None:
        """Drops a request. When the engine ended its prefill is not known."""
        self._decoding.discard(ticket)
        self._pulls.discard(ticket)
        if self._take(ticket, computed=computed) is not None:
            self._busy = None

    def _take(self, ticket: int, *, computed: bool) -> _Prefill | None:
        """Takes a prefill out of the queue. It counts as computed, or as unknown."""
        prefill = self._prefills.pop(ticket, None)
        if prefill is not None:
            if prefill is self._first:
                self._first = next(iter(self._prefills.values()), None)
            self._expected_s = self._expected_s - prefill.expected_s if self._prefills else 0.0
            if computed and prefill.work is not None:
                self._computed += prefill.work.computed
            else:
                self._unknown += 1
        return prefill
