"""The queue before the engines: which requests wait, and the order in which they go.

An engine serves its own queue first come, first served. A request therefore waits here, not at its engine,
once every engine that can take it has `HOLD_S` seconds of work before it: enough that no engine runs dry,
little enough that the order is still open. Tenants take turns by deficit round robin (Shreedhar and Varghese,
1995), measured in tokens. Among the requests of one tenant the lowest priority value goes first, then the
oldest. A request whose engines are all busy does not hold up the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, zip_longest
from math import ceil, exp
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

from proxy.core.placement.demand import Rate

HOLD_S = 1.0  # a request waits here if its engine would begin it later than this
# An engine gets this many unanswered requests whatever they cost: one to compute, and one to compute next.
KEPT_BUSY = 2
QUANTUM = 2048  # tokens that a tenant may send in each of its turns
# Requests that one look offers to placement, which may refuse one for lack of memory although an engine is
# free. Half of them are the first in order, half were not refused lately.
MAX_LOOKS = 8
MIN_PRIORITY, MAX_PRIORITY = -8, 8  # Lowest and highest priority value. 0 is usual; a lower value goes first.
# The pace of a queue fades by a factor of e in this time. It counts once it was seen for LEAST_S and in so
# many requests, or for PACE_S: the first one may be slow, and who is refused for it would have been served.
PACE_S, LEAST_S, LEAST_LEFT = 30.0, 1.0, 8
MAX_RETRY_S = 60  # a client that is refused is told to come back within this time

Item = TypeVar("Item")
_order = attrgetter("order")


class Needs(msgspec.Struct, frozen=True, cache_hash=True):
    """The needs of a request. The same engines can take all requests with equal needs."""

    lora: str | None = None  # the LoRA adapter it runs with; None for the model itself
    native: str | None = None  # the route, if only engines that declare it have it
    # The route, if some engines may lack it. Engines that lacked it before come last.
    route: str | None = None
    home: str | None = None  # the only engine that can take it; None for any
    kind: str | None = None  # the only kind of engine that can take it; None for any
    # What made its prompt: engines of another builder cannot take that; None for any.
    prompts: Hashable = None
    context: int = 0  # the least context of an engine that can take its prompt, in tokens; 0 for any
    shares: bool = False  # its KV is for all tenants: only engines whose KV tenants may share can take it


@dataclass(slots=True, eq=False)
class Entry(Generic[Item]):
    """A request that waits."""

    tenant: str | None
    priority: int  # the lowest value goes first
    tokens: int  # its cost to its tenant
    size: int  # bytes that it holds meanwhile
    needs: Needs  # says which engines can take it
    item: Item
    order: tuple[int, int] = (0, 0)  # Its place among its tenant's requests. The queue sets it.


@dataclass(slots=True, eq=False)
class _Share(Generic[Item]):
    """One tenant's share of the queue: its requests, their sums, and its turn."""

    head: Entry[Item]  # the first of all
    lanes: dict[Needs, list[Entry[Item]]] = field(default_factory=dict)  # in order
    entries: int = 0
    size: int = 0
    deficit: int = 0  # tokens it may still send in this turn
    served: int = 0  # number of the request that it was served last

    def first(self, needs: Container[Needs]) -> Entry[Item] | None:
        """Its first request that has one of these needs."""
        if self.head.needs in needs:
            return self.head
        return min([lane[0] for each, lane in self.lanes.items() if each in needs], key=_order, default=None)

    def in_order(self, needs: Container[Needs]) -> Iterator[Entry[Item]]:
        return merge(*(lane for each, lane in self.lanes.items() if each in needs), key=_order)

    @property
    def last(self) -> Entry[Item]:
        return max((lane[-1] for lane in self.lanes.values()), key=_order)

    def rounds(self, entry: Entry[Item]) -> int:
        """Turns it still needs before it may send the request."""
        return max(ceil((entry.tokens - self.deficit) / QUANTUM), 0)


class FairQueue(Generic[Item]):
    """A bounded queue in which tenants take turns."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        # The most requests in it. A lower value counts when the next one comes.
        self.max_entries = max_entries
        self.max_bytes = max_bytes  # the most bytes that they hold
        # Tokens of the requests in it, by their needs and their tenants.
        self.tokens: dict[Needs, dict[str | None, int]] = {}
        self._shares: dict[str | None, _Share[Item]] = {}
        self._refused: set[Entry[Item]] = set()  # by placement, lately
        self._size = 0
        self.entries = 0  # how many there are
        self._added = 0
        self._served = 0

    def ahead(self, tenant: str | None, priority: int, tokens: int, needs: Collection[Needs]) -> int:
        """Tokens that leave the queue before a new request ends, its own included. Only requests with one of
        these `needs` count."""
        others: Counter[str | None] = Counter()
        for each in needs:
            others.update(self.tokens[each])
        if others.pop(tenant, None) is not None:
            lanes = (lane for each, lane in self._shares[tenant].lanes.items() if each in needs)
            tokens += sum(each.tokens for lane in lanes for each in lane if each.priority <= priority)
        return tokens + sum(min(each, tokens + QUANTUM) for each in others.values())

    def add(self, entry: Entry[Item]) -> list[Entry[Item]]:
        """Adds a request. Returns those for which there is no room any more: the last ones of the tenant that
        takes the most room, mostly the new one itself."""
        self._added += 1
        entry.order = entry.priority, self._added
        share = self._shares.setdefault(entry.tenant, _Share(entry))
        insort(share.lanes.setdefault(entry.needs, []), entry, key=_order)
        self._change(share, entry, 1)
        displaced = []
        while self.entries > self.max_entries or self._size > self.max_bytes:
            by_size = self.entries <= self.max_entries
            largest = max(
                self._shares.values(),
                key=lambda each: (each.size if by_size else each.entries, each is share),
            )
            displaced.append(largest.last)
            self.remove(largest.last)
        return displaced

    def remove(self, entry: Entry[Item]) -> None:
        """Removes a request, if it is still there."""
        share = self._shares.get(entry.tenant)
        lane = share.lanes.get(entry.needs, []) if share is not None else []
        at = bisect_left(lane, entry.order, key=_order)
        if share is None or entry not in lane[at : at + 1]:
            return
        del lane[at]
        self._refused.discard(entry)
        if not lane:
            del share.lanes[entry.needs]
        self._change(share, entry, -1)
        if not lane:
            del self.tokens[entry.needs][entry.tenant]
        if not self.tokens[entry.needs]:
            del self.tokens[entry.needs]
        if not share.entries:
            del self._shares[entry.tenant]

    def take(self, free: Container[Needs], may_go: Callable[[Item], bool]) -> Entry[Item] | None:
        """Takes the next request out whose needs are `free`: an engine that meets them is free. None without
        one. `may_go` asks placement whether the request may go. It is called for few requests."""
        asked = 0
        for place, entry in enumerate(self._in_turn(free)):
            if place >= MAX_LOOKS // 2 and entry in self._refused:
                continue
            if asked == MAX_LOOKS:
                return None
            asked += 1
            if may_go(entry.item):
                self._serve(entry, free)
                return entry
            self._refused.add(entry)
        self._refused.clear()
        return None

    def _in_turn(self, free: Container[Needs]) -> Iterator[Entry[Item]]:
        """The requests that may go, in the order of their tenants' turns: of each tenant the first, then of
        each the second, and so on."""
        firsts = ((share, share.first(free)) for share in self._shares.values())
        # Within a round, a tenant that was passed over goes before those that were served meanwhile.
        turns = [
            (share.rounds(first), share.served, place, first)
            for place, (share, first) in enumerate(firsts)
            if first is not None
        ]
        turns.sort()
        yield from (turn[-1] for turn in turns)
        later = (islice(self._shares[turn[-1].tenant].in_order(free), 1, None) for turn in turns)
        for row in zip_longest(*later):
            yield from (entry for entry in row if entry is not None)

    def _serve(self, entry: Entry[Item], free: Container[Needs]) -> None:
        share = self._shares[entry.tenant]
        if rounds := share.rounds(entry):
            for each in self._shares.values():
                # A tenant that was passed over, as its engines are busy, saves no more than it needs.
                each.deficit += min(rounds, each.rounds(each.first(free) or each.head)) * QUANTUM
        share.deficit -= entry.tokens
        self._served += 1
        share.served = self._served
        self.remove(entry)

    def _change(self, share: _Share[Item], entry: Entry[Item], sign: int) -> None:
        tokens = self.tokens.setdefault(entry.needs, {})
        tokens[entry.tenant] = tokens.get(entry.tenant, 0) + sign * entry.tokens
        share.head = min((lane[0] for lane in share.lanes.values()), key=_order, default=entry)
        share.entries += sign
        share.size += sign * entry.size
        self.entries += sign
        self._size += sign * entry.size


class Pace:
    """Rate at which requests for the same engines leave a queue, in tokens, while some of them wait."""

    __slots__ = ("_left", "_seconds", "_since", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._seconds = self._since = 0.0
        self._left = 0

    def begin(self, now: float) -> None:
        """Starts to measure: the first request waits from now on."""
        self._since = now

    def took(self, now: float, tokens: int) -> None:
        """Counts tokens that left the queue."""
        seconds, self._since = now - self._since, now
        kept = exp(-seconds / PACE_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds
        self._left += 1

    def per_s(self, now: float) -> float | None:
        """Tokens that leave per second; None while that is not known."""
        seconds = self._seconds + now - self._since
        is_known = seconds >= (LEAST_S if self._left >= LEAST_LEFT else PACE_S)
        return self._tokens / seconds if self._tokens and is_known else None


class Backlog:
    """Requests that wait inside an engine by its own report, for memory or for other requests."""

    __slots__ = ("_began", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._began = Rate()

    def reported(self, waiting: int) -> None:
        """Notes the count that the engine reports."""
        if not self.waiting:
            self._began = Rate()
        self.waiting = waiting

    def placed(self) -> None:
        """Counts a request that is sent to the engine."""
        if self.waiting:
            self.waiting += 1

    def began(self, now: float) -> None:
        """An answer of the engine began."""
        if self.waiting:
            self.waiting -= 1
            self._began.add(now, 1)

    def wait_s(self, now: float) -> float:
        """Seconds until a new request begins there; 0 if that is not known."""
        rate = self._began.per_s(now) if self.waiting else 0.0
        return self.waiting / rate if rate else 0.0


def retry_after_s(wait_s: float | None, limit_s: float) -> int:
    """Seconds after which a refused client should retry: an estimate of when the wait is within the limit."""
    return min(max(ceil(wait_s - limit_s), 1), MAX_RETRY_S) if wait_s is not None else 1
