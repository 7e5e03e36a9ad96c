"""Who gets which slot: requests get the cheapest idle slot, in the order of their arrival.

Requests wait in kvpin's own queue, which sends one when a slot is idle. Only one whose slot was taken in that
moment waits here, or one whose slot will be idle in a moment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine_adapter.llama_server.answer import CompletionOutput
from engine_adapter.llama_server.checkpoints import SlotMemory
from engine_adapter.llama_server.plan import Plan
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import NO_TOKENS, Slot, SlotOperation, SlotTable
from engine_adapter.types import Retention, TokenIds


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A prompt that needs a slot.

    Attributes:
        tokens: its ids; empty if they are unknown.
        salt: digest of its cache salt.
        retention: how long to retain what it leaves; None for no retention.
        is_chat: the server knows where its messages begin.
        session: digest of its conversation; None if its client names none.
        text: how the text begins that the server makes its prompt of, as code points; empty if `tokens` are
            known.
    """

    tokens: TokenIds[int] = field(repr=False)
    salt: str | None = None
    reuse: bool = True
    retention: Retention | None = None
    is_chat: bool = False
    session: int | None = None
    text: TokenIds[int] = field(default_factory=lambda: NO_TOKENS, repr=False)


@dataclass(slots=True)
class SlotLease:
    """A request's hold on a slot.

    Attributes:
        cached_tokens: prompt tokens the server will report as reused.
        firm: False if the server may report more.
        may_reuse: the request may use KV that lies in the slot.
        restored: the slot's KV came from a file just before.
        before: known tokens the slot held, if the request may use them.
        length_before: tokens the slot held, known or not; `is_length_sure`: it is no guess.
        started: when the request could be sent.
        answer: its content; None until it has ended, or if it never did.
        has_begun: the first bytes of the answer have come.
        shows_text: the answer's text is all that was sampled: nothing is held back, parsed or trimmed.
        shared: leading tokens of the prompt that the server takes from the slot.
        memory: the slot's memory as the request finds it.
    """

    slot: int
    ask: SlotRequest
    cached_tokens: int
    firm: bool
    may_reuse: bool
    restored: bool
    before: TokenIds[int] = field(repr=False)
    length_before: int
    started: float
    answer: CompletionOutput | None = None
    has_begun: bool = False
    shows_text: bool = True
    shared: int = 0
    is_length_sure: bool = False
    memory: SlotMemory = field(default_factory=SlotMemory, repr=False)

    @property
    def is_exact(self) -> bool:
        """True if it uses no KV that was computed elsewhere and moved."""
        return self.memory.exact == math.inf

    @property
    def leaves_own(self) -> bool:
        """True if all KV in the slot is now its own client's, although the prompt's tokens are not known."""
        answer, ask = self.answer, self.ask
        is_done = answer is not None and answer.is_complete and answer.error is None
        return is_done and not ask.tokens and ask.salt != UNKNOWN_OWNER


Decide = Callable[[SlotRequest, Iterable[Slot]], Plan]
# What a slot does after a request: it is idle again in a moment, and still holds its conversation.
_SHORT = (SlotOperation.SETTLE, SlotOperation.SAVE)


class Turns:
    """The requests that wait for a slot. `decide` gives the best plan for one over some slots."""

    def __init__(self, table: SlotTable, decide: Decide, clock: Callable[[], float]) -> None:
        self._table = table
        self._decide = decide
        self._clock = clock
        self._queue: dict[asyncio.Future[Plan], SlotRequest] = {}

    async def turn(self, ask: SlotRequest) -> Plan:
        """Waits for a slot for `ask`; the first operation of its plan has begun there.

        A caller that is cancelled while it waits leaves nothing begun.
        """
        turn: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self._queue[turn] = ask
        self._dispatch()
        try:
            return await turn
        except asyncio.CancelledError:
            is_told = self._queue.pop(turn, None) is None and not turn.cancelled()
            if is_told and turn.exception() is None:  # its turn has just come
                self.release(turn.result().slot)
            raise

    def release(self, slot_id: int) -> None:
        """Ends the operation on a slot, and starts waiting requests."""
        self._table.end(slot_id, self._clock())
        self._dispatch()

    def fail(self, error: Exception) -> None:
        """Raises `error` in every waiting request."""
        for turn in self._queue:
            if not turn.done():
                turn.set_exception(error)
        self._queue.clear()

    def _dispatch(self) -> None:
        """Starts every waiting request that can start now."""
        for turn, ask in tuple(self._queue.items()):
            if self._table.in_flight == len(self._table):
                return
            if not turn.done():  # it has not left
                soon = [slot for slot in self._table if slot.is_idle or slot.operation in _SHORT]
                plan = self._decide(ask, soon)
                if self._table[plan.slot].is_idle:
                    self._table.begin(plan.slot, first_operation(plan), self._clock())
                    del self._queue[turn]
                    turn.set_result(plan)


def first_operation(plan: Plan) -> SlotOperation:
    """The first operation of a plan on its slot."""
    if plan.save_first:
        return SlotOperation.SAVE
    return SlotOperation.REQUEST if plan.restore is None else SlotOperation.RESTORE
