"""Which requests wait before they are sent to an engine, and in which order they go.

An engine serves its own queue first come, first served. A request therefore waits here, not at its engine,
once every engine has `HOLD_S` seconds of work before it: enough that no engine runs dry, little enough that
the order is still open. Tenants take turns by deficit round robin (Shreedhar and Varghese, 1995), measured in
tokens. Among the requests of one tenant the lowest priority value goes first, then the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, exp
from typing import Generic, TypeVar

from proxy.core.placement.recent import Rate

# A request waits here if its engine would begin it later than this.
HOLD_S = 1.0
# An engine gets this many unanswered requests whatever they cost: one to compute, and one to compute next.
KEPT_BUSY = 2
# Tokens that a tenant may send in each of its turns.
QUANTUM = 2048
# Requests that are tried, when those before them can only go to engines that are busy.
MAX_LOOKS = 8
# Lowest and highest priority value. 0 is usual; a lower value goes first.
MIN_PRIORITY, MAX_PRIORITY = -8, 8
# The pace of a queue fades by a factor of e in this time. It counts once it was seen for LEAST_S.
PACE_S, LEAST_S = 30.0, 1.0
# A client that is refused is told to come back within this time.
MAX_RETRY_S = 60

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Entry(Generic[Item]):
    """A request that waits.

    Attributes:
        tenant: whose it is; None where there are no tenants.
        priority: the lowest value goes first.
        tokens: what it costs its tenant.
        size: bytes that it holds meanwhile.
        item: the caller's own.
    """

    tenant: str | None
    priority: int
    tokens: int
    size: int
    item: Item


@dataclass(slots=True, eq=False)
class _Share(Generic[Item]):
    """One tenant's share of the queue: its requests, their sums, and its turn."""

    lanes: dict[int, dict[Entry[Item], None]] = field(default_factory=dict)  # by priority, oldest first
    entries: int = 0
    size: int = 0
    tokens: int = 0
    deficit: int = 0  # tokens it may still send in this turn
    served: int = 0  # number of the request that it was served last

    def change(self, entry: Entry[Item], sign: int) -> None:
        self.entries += sign
        self.size += sign * entry.size
        self.tokens += sign * entry.tokens

    @property
    def first(self) -> Entry[Item]:
        return next(iter(self.lanes[min(self.lanes)]))

    def soonest(self, most: int) -> list[Entry[Item]]:
        """Its first requests."""
        return list(islice((entry for at in sorted(self.lanes) for entry in self.lanes[at]), most))

    @property
    def last(self) -> Entry[Item]:
        return next(reversed(self.lanes[max(self.lanes)]))

    @property
    def rounds(self) -> int:
        """Turns it still needs before it may send its first request."""
        return max(ceil((self.first.tokens - self.deficit) / QUANTUM), 0)


class FairQueue(Generic[Item]):
    """A bounded queue in which tenants take turns.

    Attributes:
        max_entries: the most requests in it. A lower value counts when the next one comes.
        max_bytes: the most bytes that they hold.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._shares: dict[str | None, _Share[Item]] = {}
        self._size = 0
        self._entries = 0
        self._served = 0

    def __len__(self) -> int:
        return self._entries

    def ahead(self, tenant: str | None, priority: int, tokens: int) -> int:
        """Tokens that would leave the queue up to the end of a new request, its own included."""
        share, own = self._shares.get(tenant), tokens
        if share is not None:
            lanes = [lane for at, lane in share.lanes.items() if at <= priority]
            own += sum(entry.tokens for lane in lanes for entry in lane)
        others = (each.tokens for name, each in self._shares.items() if name != tenant)
        return own + sum(min(each, own + QUANTUM) for each in others)

    def add(self, entry: Entry[Item]) -> list[Entry[Item]]:
        """Adds a request. Returns those for which there is no room any more: the last ones of the tenant that
        takes the most room, mostly the new one itself."""
        share = self._shares.setdefault(entry.tenant, _Share())
        share.lanes.setdefault(entry.priority, {})[entry] = None
        self._change(share, entry, 1)
        displaced = []
        while self._entries > self.max_entries or self._size > self.max_bytes:
            by_size = self._entries <= self.max_entries
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
        lane = share.lanes.get(entry.priority) if share is not None else None
        if share is None or lane is None or entry not in lane:
            return
        del lane[entry]
        self._change(share, entry, -1)
        if not lane:
            del share.lanes[entry.priority]
        if not share.entries:
            del self._shares[entry.tenant]

    def take(self, may_go: Callable[[Item], bool]) -> Entry[Item] | None:
        """Takes the next request out, of those that `may_go` now; None if there is none.

        `may_go` is asked about a few requests only: the first ones of the first tenants.
        """
        each = max(MAX_LOOKS // len(self._shares), 1) if self._shares else 0
        for tenant in islice(self._turns(), MAX_LOOKS):
            share = self._shares[tenant]
            for entry in share.soonest(each):
                if not may_go(entry.item):
                    continue
                self._credit(share.rounds)
                share.deficit -= entry.tokens
                self._served += 1
                share.served = self._served
                self.remove(entry)
                return entry
        return None

    def _turns(self) -> Iterator[str | None]:
        """The tenants, in the order in which they may send their first requests."""
        shares = self._shares
        # Within a round, a tenant that was passed over goes before those that were served meanwhile.
        return iter(sorted(shares, key=lambda tenant: (shares[tenant].rounds, shares[tenant].served)))

    def _credit(self, rounds: int) -> None:
        """Some rounds have passed. A tenant whose turn was passed over, as its engine is busy, saves no more
        than its first request needs."""
        for share in self._shares.values():
            share.deficit += min(rounds, share.rounds + 1) * QUANTUM

    def _change(self, share: _Share[Item], entry: Entry[Item], sign: int) -> None:
        share.change(entry, sign)
        self._entries += sign
        self._size += sign * entry.size


class Pace:
    """Rate at which requests leave a queue, in tokens, while some wait in it."""

    __slots__ = ("_seconds", "_since", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._seconds = self._since = 0.0

    def begin(self, now: float) -> None:
        """The queue was empty up to now."""
        self._since = now

    def took(self, now: float, tokens: int) -> None:
        """So many tokens have left."""
        seconds, self._since = now - self._since, now
        kept = exp(-seconds / PACE_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    def wait_s(self, now: float, tokens: int) -> float | None:
        """Seconds until so many tokens have left; None while the pace is not known."""
        seconds = self._seconds + now - self._since
        return tokens * seconds / self._tokens if self._tokens and seconds >= LEAST_S else None


class Backlog:
    """Requests that an engine reports to wait there, for whatever reason: for memory, or for others to end.

    Attributes:
        waiting: how many, by now.
    """

    __slots__ = ("_began", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._began = Rate()

    def reported(self, waiting: int) -> None:
        """The engine reports so many."""
        if not self.waiting:
            self._began = Rate()
        self.waiting = waiting

    def placed(self) -> None:
        """A request goes there."""
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
    """Seconds after which a client that was refused should come back: when the wait is within the limit
    again, as far as that is known."""
    return min(max(ceil(wait_s - limit_s), 1), MAX_RETRY_S) if wait_s is not None else 1
