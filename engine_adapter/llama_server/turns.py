"""Whose turn it is: requests wait for a slot in the order they came, and each gets the one that suits it.

A request may prefer to wait for a busy slot that holds its conversation; those behind it then take the idle
ones. It waits no longer than its best idle slot would have cost it. A request that cannot be pinned runs
alone: it waits until every slot is idle, and nobody behind it starts before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine_adapter.llama_server.plan import Plan
from engine_adapter.llama_server.saved import Saved
from engine_adapter.llama_server.slots import Operation, Slot, SlotTable
from engine_adapter.types import Retention, TokenIds

SlotPlan = Plan[Saved]


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt that wants a slot.

    Attributes:
        tokens: its ids; empty where they are not known.
        salt: the cache salt it runs under.
        reuse: whether KV may be reused for it at all.
        retention: how long what it leaves is to be kept; None for no longer than others.
    """

    tokens: TokenIds[int] = field(repr=False)
    salt: str | None = None
    reuse: bool = True
    retention: Retention | None = None


Decide = Callable[[Ask, Iterable[Slot]], SlotPlan]


@dataclass(slots=True, eq=False)
class _Waiter:
    """One request in the queue; `ask` is None for one that runs alone."""

    ask: Ask | None
    since: float
    turn: asyncio.Future[SlotPlan | None]


class Turns:
    """The queue in front of the slots. What it grants has begun on the slot table already.

    Args:
        table: the slots.
        decide: the best plan for a prompt over some slots.
        clock: seconds.
    """

    def __init__(self, table: SlotTable, decide: Decide, clock: Callable[[], float]) -> None:
        self._table = table
        self._decide = decide
        self._clock = clock
        self._queue: list[_Waiter] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def slot(self, ask: Ask) -> SlotPlan:
        """A slot for `ask`; the first operation of its plan has begun there.

        Whoever is cancelled while waiting leaves nothing begun.
        """
        plan = await self._turn(ask)
        if plan is None:
            raise RuntimeError("a turn for one slot came without its plan")
        return plan

    async def all(self) -> None:
        """Every slot at once, begun as FOREIGN."""
        await self._turn(None)

    def release(self, slot_id: int) -> None:
        """What ran on a slot is over; the next in the queue may start."""
        self._table.end(slot_id, self._clock())
        self.dispatch()

    def release_all(self) -> None:
        """The end of a turn of `all`."""
        self._table.end_all(self._clock())
        self.dispatch()

    def fail(self, error: Exception) -> None:
        """Nobody gets a slot any more."""
        queue, self._queue = self._queue, []
        for waiter in queue:
            if not waiter.turn.done():
                waiter.turn.set_exception(error)

    def dispatch(self) -> None:
        """Starts whoever can start now."""
        self._cancel_timer()
        soonest = math.inf
        for waiter in tuple(self._queue):
            if self._table.in_flight == len(self._table):
                break  # whoever waits, waits: no plan need be made for each of a long queue
            if waiter.turn.done():
                continue
            if waiter.ask is None:
                if self._table.in_flight:
                    break
                self._table.begin_all(Operation.FOREIGN, self._clock())
                self._grant(waiter, None)
                continue
            plan, patience_s = self._plan(waiter, waiter.ask)
            if plan is not None:
                self._table.begin(plan.slot, first_operation(plan), self._clock())
                self._grant(waiter, plan)
            else:
                soonest = min(soonest, patience_s)
        if soonest < math.inf:
            self._timer = asyncio.get_running_loop().call_later(soonest, self.dispatch)

    async def _turn(self, ask: Ask | None) -> SlotPlan | None:
        waiter = _Waiter(ask, self._clock(), asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self.dispatch()
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            self._give_back(waiter)
            raise

    def _plan(self, waiter: _Waiter, ask: Ask) -> tuple[SlotPlan | None, float]:
        """(the plan to start now, or None; seconds after which an idle slot is taken instead of waiting)."""
        best = self._decide(ask, self._table)
        if best.is_ready:
            return best, 0.0
        # As long as the alternative would have cost: at worst twice the best that could have been done.
        alternative = self._decide(ask, self._table.idle())
        left_s = alternative.total_s - (self._clock() - waiter.since)
        return (alternative, 0.0) if left_s <= 0 else (None, left_s)

    def _grant(self, waiter: _Waiter, plan: SlotPlan | None) -> None:
        self._queue.remove(waiter)
        waiter.turn.set_result(plan)

    def _give_back(self, waiter: _Waiter) -> None:
        """Its request was cancelled, perhaps in the very moment its turn came."""
        if waiter in self._queue:
            self._queue.remove(waiter)
            self.dispatch()
        elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            plan = waiter.turn.result()
            if plan is None:
                self.release_all()
            else:
                self.release(plan.slot)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def first_operation(plan: SlotPlan) -> Operation:
    """What a plan does on its slot first."""
    if plan.save_first:
        return Operation.SAVE
    return Operation.REQUEST if plan.restore is None else Operation.RESTORE
