"""The requests of one pool that wait for an engine, see `core/admission.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

from proxy.core.admission import MAX_RETRY_S, Entry, FairQueue, Needs, Pace, retry_after_s
from proxy.errors import Overloaded
from proxy.settings import LimitSettings

# Load falls as time passes, and a slot is free once it is saved. A pool with waiting requests is looked at
# this often, and whenever a request ends.
TICK_S = 0.02
# Paces that are remembered: one for each set of engines that requests have waited for.
MAX_PACES = 64


@dataclass(slots=True, eq=False)
class _Waiter:
    may_go: Callable[[], bool]
    turn: asyncio.Future[bool]  # whether it may go; False: there is no room for it any more


class Line:
    """The queue of a pool. It has no task of its own, so an empty queue costs nothing.

    A request waits for the engines that can take it. Requests *compete* if one engine can take both.
    """

    def __init__(
        self,
        engines_for: Callable[[Needs], frozenset[str]],
        is_free: Callable[[str], bool],
        limits: LimitSettings | None = None,
    ) -> None:
        """Asks the pool which engines can take requests with certain needs, and whether an engine is free: it
        would begin a request soon."""
        self._engines_for, self._is_free = engines_for, is_free
        self._limits = limits or LimitSettings()
        self._queue = FairQueue[_Waiter](self._limits.queue_requests, self._limits.queue_bytes)
        self._engines: dict[Needs, frozenset[str]] = {}  # by the needs of those that wait
        self._paces: dict[frozenset[str], Pace] = {}
        self._called: Entry[_Waiter] | None = None  # it goes now, and its engine does not count it yet
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._queue.entries

    def bound(self, limits: LimitSettings) -> None:
        """Changes the bounds. Requests beyond lower bounds are refused when the next request comes."""
        self._limits = limits
        self._queue.max_entries, self._queue.max_bytes = limits.queue_requests, limits.queue_bytes

    def patience_s(self, deadline_s: float | None) -> float:
        """The longest time in which a request may wait for a better engine than one that is free: half of its
        limit."""
        return min(self._limits.queue_s, deadline_s or inf) / 2 if self._limits.queue_requests else 0.0

    def competes(self, needs: Needs) -> bool:
        """True if any waiting request competes with a request with these needs."""
        if not self._queue.entries:
            return False
        engines = self._engines_for(needs)
        return any(not engines.isdisjoint(self._engines_for(each)) for each in self._queue.tokens)

    async def wait(
        self,
        tenant: str | None,
        needs: Needs,
        *,
        priority: int,  # the lowest value goes first
        tokens: int,  # its cost to its tenant
        size: int,  # bytes of its body
        deadline_s: float | None,  # how long its client waits; None if it did not say
        may_go: Callable[[], bool],  # whether placement finds an engine that takes it now
    ) -> None:
        """Returns when it is the request's turn, and an engine `may` take it. It must go there without an
        await in between. Raises Overloaded if the wait is longer than the limit or than its client waits, or
        there is no room."""
        limit_s, whose = min(
            (self._limits.queue_s, "limits.queue_s"), (deadline_s or inf, "its client waits no longer")
        )
        wait_s = self._wait_s(monotonic(), tenant, needs, priority, tokens)
        if wait_s is not None and wait_s > limit_s:
            raise _too_long(wait_s, limit_s, whose)
        waiter = _Waiter(may_go, asyncio.get_running_loop().create_future())
        entry = Entry(tenant, priority, tokens, size, needs, waiter)
        for displaced in self._queue.add(entry):
            if not displaced.item.turn.done():
                displaced.item.turn.set_result(False)
        self.call_next()
        try:
            async with asyncio.timeout(limit_s):
                is_called = await waiter.turn
        except TimeoutError:
            raise _too_long(None, limit_s, whose) from None
        finally:
            self._queue.remove(entry)
            if self._called is entry:
                # After this step of the caller's task: by then its engine counts it.
                asyncio.get_running_loop().call_soon(self._gone)
        if not is_called:
            raise Overloaded(
                "all engines are busy, and too many requests wait for one; try again later",
                retry_after_s=min(max(ceil(wait_s or 0), 1), MAX_RETRY_S),
            )

    def _wait_s(
        self, now: float, tenant: str | None, needs: Needs, priority: int, tokens: int
    ) -> float | None:
        """Seconds until a new request goes to the least awaited of its engines. None if nothing waits, or
        if the pace is unknown: where an engine is free, requests wait for the best of its slots, and the pace
        says nothing of what it can do."""
        self._look()
        waiting = {each: sum(tenants.values()) for each, tenants in self._queue.tokens.items()}
        by_engine = (
            [each for each in waiting if engine in self._engines[each]] for engine in self._engines_for(needs)
        )
        rivals = min(by_engine, key=lambda found: sum(waiting[each] for each in found), default=None)
        if not rivals or any(map(self._is_free, self._engines_for(needs))):
            return None
        paces = [self._paces[engines].per_s(now) for engines in {self._engines[each] for each in rivals}]
        if None in paces:
            return None
        return self._queue.ahead(tenant, priority, tokens, rivals) / sum(filter(None, paces))

    def _look(self) -> None:
        """Looks up which engines can take each waiting request."""
        before = set(self._engines.values())
        self._engines = {needs: self._engines_for(needs) for needs in self._queue.tokens}
        found = set(self._engines.values())
        if len(self._paces) > MAX_PACES:
            self._paces = {engines: self._paces[engines] for engines in before & found}
        for engines in found - before:
            self._paces.setdefault(engines, Pace()).begin(monotonic())

    def call_next(self) -> None:
        """Calls the next request that may go. Only one at a time: each changes the load for the others."""
        if self._called is None and self._queue.entries:
            self._look()
            free = set(filter(self._is_free, frozenset().union(*self._engines.values())))
            # A request that no engine can take any more is called too: its caller then raises the error.
            may_go = {needs for needs, able in self._engines.items() if not able or not able.isdisjoint(free)}
            self._called = self._queue.take(may_go, lambda waiter: waiter.may_go())
            if self._called is not None:
                self._paces[self._engines[self._called.needs]].took(monotonic(), self._called.tokens)
                if not self._called.item.turn.done():
                    self._called.item.turn.set_result(True)
        if self._queue.entries and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _gone(self) -> None:
        self._called = None
        self.call_next()

    def _tick(self) -> None:
        self._timer = None
        self.call_next()


def _too_long(wait_s: float | None, limit_s: float, whose: str) -> Overloaded:
    expected = f"would wait about {wait_s:.0f} s" if wait_s is not None else f"has waited {limit_s:g} s"
    return Overloaded(
        f"all engines are busy: the request {expected} for one; the limit is {limit_s:g} s ({whose})",
        retry_after_s=retry_after_s(wait_s, limit_s),
    )
