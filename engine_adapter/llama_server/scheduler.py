"""The slots of one server process: requests lease them, and the scheduler learns what each request left.

    turn → (save) → (restore) → request → what the answer left → release

The slot table changes without awaits. The I/O in between runs in the scheduler's own tasks: a client that
leaves never stops a save or restore half-way, and never leaves a slot busy.

Requests get the cheapest idle slot, in the order of their arrival. They wait in kvpin's own queue, which
sends one when a slot is idle. Only one whose slot was taken in that moment waits here, or one whose slot will
be idle in a moment.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine_adapter.errors import EngineError, EngineUnavailable
from engine_adapter.hold import Forecast
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.answer import CompletionOutput, known_tokens, slot_content
from engine_adapter.llama_server.checkpoints import SlotMemory, user_starts
from engine_adapter.llama_server.contents import SlotContents
from engine_adapter.llama_server.plan import Plan, plan
from engine_adapter.llama_server.saved import OwnTasks, Saved
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import NO_TOKENS, Slot, SlotOperation, SlotTable
from engine_adapter.types import TOOL_S, Retention, TokenIds, common_prefix

log = logging.getLogger("kvpin.llama_server")

# Cost of a prefill to each running stream of another slot, which shares its steps.
INTERFERENCE_S = 0.002
# A server does not fall asleep sooner after its last work.
SLEEPS_AFTER_S = 1.0
# Longest wait for the answer whether it sleeps.
PULSE_S = 0.25

_Result = TypeVar("_Result")
_Work = Callable[[Slot], Coroutine[Any, Any, _Result]]


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A prompt that needs a slot."""

    tokens: TokenIds[int] = field(repr=False)  # its ids; empty if they are unknown
    salt: str | None = None  # digest of its cache salt
    reuse: bool = True
    retention: Retention | None = None  # how long to retain what it leaves; None for no retention
    is_chat: bool = False  # the server knows where its messages begin
    session: int | None = None  # digest of its conversation; None if its client names none
    # How the text begins that the server makes its prompt of, as code points; empty if `tokens` are known.
    text: TokenIds[int] = field(default_factory=lambda: NO_TOKENS, repr=False)


@dataclass(slots=True)
class SlotLease:
    """A request's hold on a slot."""

    slot: int
    ask: SlotRequest
    cached_tokens: int  # prompt tokens the server will report as reused
    firm: bool  # False if the server may report more
    may_reuse: bool  # the request may use KV that lies in the slot
    restored: bool  # the slot's KV came from a file just before
    before: TokenIds[int] = field(repr=False)  # known tokens the slot held, if the request may use them
    length_before: int  # tokens the slot held, known or not
    started: float  # when the request could be sent
    answer: CompletionOutput | None = None  # its content; None until it has ended, or if it never did
    has_begun: bool = False  # the first bytes of the answer have come
    # The answer's text is all that was sampled: nothing is held back, parsed or trimmed.
    shows_text: bool = True
    shared: int = 0  # leading tokens of the prompt that the server takes from the slot
    is_length_sure: bool = False  # `length_before` is no guess
    # The slot's memory as the request finds it.
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
        """Waits for a slot for `ask`; the first operation of its plan has begun there. A caller that is
        cancelled while it waits leaves nothing begun."""
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


class SlotScheduler:
    """Leases slots to requests, one operation per slot at a time."""

    def __init__(self, contents: SlotContents) -> None:
        self.contents = contents
        self.changed = asyncio.Event()  # set whenever a slot becomes idle
        self.is_closed = False  # its session has ended: the slots may hold anybody's KV
        self.is_lost = False  # the server turned out to be another process
        self.has_worked = False  # something ran since the slots were last read
        self.sleeps = False  # the server was found asleep, and nothing has woken it since
        self.waiting = 0  # requests that came and have no slot yet
        self._control, self._table, self._clock = contents.control, contents.table, contents.clock
        self._turns = Turns(self._table, self._plan, self._clock)
        self._tasks = OwnTasks(f"{contents.engine}: work on its slots", EngineError)
        self._used: set[int] = set()  # slots that ran a request of ours
        self._tasks_at: dict[tuple[int, int], int | None] = {}  # the latest task of (slot, its uses)
        self._worked_at = self._clock()

    # --- requests ---------------------------------------------------------------------------------

    def forecast(self, ask: SlotRequest) -> Forecast:
        """The cost of `ask` now; changes nothing."""
        cost, idle, idle_s = self._plan(ask, self._table).cost, self._table.idle(), None
        queue_s = self.waiting * self.contents.rates.hold_s / len(self._table)
        if self.waiting:  # which slots these get is not known yet
            idle_s = queue_s + self.contents.rates.prefill_s(len(ask.tokens))
        elif not idle:
            idle_s = math.inf
        elif cost.wait_s:
            idle_s = self._plan(ask, idle).cost.total_s
        interference_s = cost.interference_s + INTERFERENCE_S * self.streams
        return replace(cost, wait_s=cost.wait_s + queue_s, interference_s=interference_s, idle_s=idle_s)

    @asynccontextmanager
    async def lease(self, ask: SlotRequest) -> AsyncIterator[SlotLease]:
        """Leases the best slot for a request, after the save and restore that pay."""
        self._check_open()
        self.waiting += 1
        try:
            await self.is_asleep()
            self._check_open()  # nobody releases a slot that is taken from now on
            if self.is_lost:
                raise EngineUnavailable("the server has changed")
            self.sleeps = False  # the request wakes it
            chosen = await self._turns.turn(ask)
        finally:
            self.waiting -= 1
        self._check_open()
        lease = await self._prepared(chosen, ask)
        self._check_open()
        # The slot is going to hold this prompt: the next request of the conversation waits for it.
        memory = lease.memory.after(lease.shared, len(ask.tokens), self.user_starts(ask))
        unknown = int(not ask.tokens)  # an empty slot is nobody's
        self._table.hold(
            lease.slot, ask.tokens, ask.salt, unknown=unknown, memory=memory, text=ask.text, is_sure=False
        )
        self._table.serve(lease.slot, ask.session)
        try:
            yield lease
        except BaseException:
            # The slot may stay busy for a while; the caller does not wait for it.
            self._tasks.start(self._finish(lease))
            raise
        if lease.answer is not None and not self.is_closed:
            self._next(self._table[lease.slot], SlotOperation.SETTLE)
        await asyncio.wait([self._tasks.start(self._finish(lease))])

    @property
    def streams(self) -> int:
        """Requests that run now."""
        return sum(slot.operation is SlotOperation.REQUEST for slot in self._table)

    @property
    def moves_kv(self) -> bool:
        """True if a save or a restore runs. The server answers no question about slots meanwhile."""
        return any(slot.operation in (SlotOperation.SAVE, SlotOperation.RESTORE) for slot in self._table)

    # --- other operations -------------------------------------------------------------------------

    async def take(self, slot_id: int, operation: SlotOperation, work: _Work[_Result]) -> _Result:
        """Runs `work` as the one operation on an idle slot, to its end even if the caller is cancelled.
        Raises what `work` raises."""
        self._check_open()
        self._table.begin(slot_id, operation, self._clock())
        return await _outcome(self._tasks.start(self._taken(slot_id, work)))

    async def bring(self, entry: Saved) -> bool:
        """Restores a saved prefix ahead of its request, into an empty slot or the one idle for longest. Saves
        that slot first. False if every slot is busy or pinned, or if the save or restore fails."""
        now = self._clock()
        idle = [slot for slot in self._table.idle() if slot.pinned_until <= now]
        if not idle:
            return False
        chosen = min(idle, key=lambda slot: (not slot.is_empty, slot.dirty, slot.since))
        save_first = chosen.dirty

        async def work(slot: Slot) -> bool:
            async with self.contents.keeping(entry) as kept:
                if save_first:
                    if not await self.contents.save(slot):
                        return False  # keep what the slot holds: no request waits for this restore
                    self._next(slot, SlotOperation.RESTORE)
                return kept is not None and await self.contents.restore(slot, kept)

        return await self.take(chosen.id, SlotOperation.SAVE if save_first else SlotOperation.RESTORE, work)

    # --- the server's own word --------------------------------------------------------------------

    def adopt(self, states: Iterable[slot_io.SlotState], *, may_try: bool = True) -> None:
        """Takes over the slots. Whose content lies there is unknown. Without `may_try`, it changes none."""
        for state in states:
            slot, count = self._table[state.id], state.n_tokens or 0
            if count or state.is_processing:
                self.contents.mark_unknown(slot, max(count, 1))
            else:
                self._table.hold(slot.id, NO_TOKENS, None)
            if state.is_processing and may_try:
                self._watch_foreign(slot)

    async def reconcile(self) -> None:
        """Compares the mirror with `/slots`. A slot that somebody else changed becomes unknown. Raises
        EngineUnavailable if the server is another process, as its slots are new, or makes other KV by now."""
        if self.contents.has_other_adapters:
            self.is_lost = True
            raise EngineUnavailable("its LoRA adapters have changed")
        uses = [slot.uses for slot in self._table]
        self.has_worked = False
        states = await slot_io.read_slots(self._control)
        before, self._tasks_at = self._tasks_at, {}
        for state in states:
            slot = self._table[state.id]
            if not slot.is_idle or slot.uses != uses[slot.id]:
                continue
            if state.n_tokens is None and slot.id in self._used:
                self.is_lost = True
                raise EngineUnavailable("the server was restarted: its slots are new")
            if state.n_tokens == 0 and slot.length == 1 and not state.is_processing:
                self._table.hold(slot.id, NO_TOKENS, None)  # nothing is there after all
            elif (
                state.is_processing
                or state.n_tokens not in (None, slot.length)
                or before.get((slot.id, slot.uses), state.id_task) != state.id_task
            ):
                self.contents.mark_changed(slot, state.n_tokens or int(state.is_processing))
                self._watch_foreign(slot)
            else:
                self._tasks_at[slot.id, slot.uses] = state.id_task

    async def look(self) -> bool:
        """True if the server sleeps. The question does not wake it. A server that sleeps has lost all KV.
        Raises EngineUnavailable if another process answers."""
        pulse = await slot_io.read_pulse(self._control)
        if pulse.instance != self.contents.facts.instance:
            self.is_lost = True
            raise EngineUnavailable("the server was restarted")
        if pulse.is_sleeping and not self.sleeps:  # when it wakes, its slots look new
            self._used.clear()
            self._table.wipe()
            self.contents.facts = replace(self.contents.facts, is_sleeping=True)
        self.sleeps = pulse.is_sleeping
        return self.sleeps

    async def is_asleep(self) -> bool:
        """True if the server sleeps. Only an idle one is asked; without a quick answer, it is awake."""
        if not self._table.in_flight and self._clock() - self._worked_at >= SLEEPS_AFTER_S:
            with suppress(TimeoutError, EngineError):
                async with asyncio.timeout(PULSE_S):
                    return await self.look()
        return False

    async def settled(self) -> None:
        """Waits until all of the scheduler's own tasks are over."""
        await self._tasks.settled()

    async def aclose(self) -> None:
        """Ends all work. Requests that wait for a slot get EngineUnavailable."""
        self.is_closed = True
        self._turns.fail(EngineUnavailable("the engine was lost before it could start"))
        await self._tasks.cancel()

    # --- inside -----------------------------------------------------------------------------------

    def _plan(self, ask: SlotRequest, slots: Iterable[Slot]) -> Plan:
        contents = self.contents
        return plan(
            ask.tokens if ask.reuse else NO_TOKENS,
            ask.salt,
            slots,
            contents.entries(),
            contents.rates,
            self._clock(),
            can_save=contents.can_save,
            can_restore=contents.can_restore,
            rules=contents.rules,
            text=ask.text,
        )

    async def _prepared(self, chosen: Plan, ask: SlotRequest) -> SlotLease:
        """Carries out a plan. If the request leaves meanwhile, the slot is released afterwards."""
        if first_operation(chosen) is SlotOperation.REQUEST:
            return self._leased(self._table[chosen.slot], ask, restored=False)
        task = self._tasks.start(self._prepare(chosen, ask))

        def abandon(done: asyncio.Task[SlotLease]) -> None:
            if not done.cancelled() and done.exception() is None:  # else it has released the slot itself
                self._release(chosen.slot)

        try:
            return await _outcome(task)
        except asyncio.CancelledError:
            task.add_done_callback(abandon)
            raise

    async def _prepare(self, chosen: Plan, ask: SlotRequest) -> SlotLease:
        """Saves and restores as planned, and begins the request on the slot."""
        slot, is_restored = self._table[chosen.slot], False
        try:
            async with self.contents.keeping(chosen.restore) as entry:
                if chosen.save_first:
                    await self.contents.save(slot)
                    self._next(slot, first_operation(replace(chosen, save_first=False)))
                if entry is not None:
                    is_restored = await self.contents.restore(slot, entry)
                    self._next(slot, SlotOperation.REQUEST)
        except BaseException:
            self.contents.mark_unknown(slot, None)
            self._release(slot.id)
            raise
        return self._leased(slot, ask, restored=is_restored)

    def _leased(self, slot: Slot, ask: SlotRequest, *, restored: bool) -> SlotLease:
        shared = slot.shared(ask.tokens, ask.salt) if ask.reuse else 0
        kept = slot.reusable(ask.tokens, ask.salt) if ask.reuse else 0
        is_own = slot.is_empty or slot.salt == ask.salt
        may_share_more = slot.unknown > 0 and kept == len(slot.tokens)
        is_sound = slot.memory.is_sound(kept, len(ask.tokens), more=may_share_more)
        may_reuse = ask.reuse and is_own and is_sound
        is_unclear = slot.unknown > 0 or (not ask.tokens and not slot.is_empty)
        moves = may_reuse and slot.memory.rules.chunk > 0 and (kept > shared or is_unclear)
        return SlotLease(
            slot=slot.id,
            ask=ask,
            shared=kept if may_reuse else 0,
            cached_tokens=slot.memory.reused(kept, len(ask.tokens)),
            firm=(self.contents.reuses_any_prefix or kept == slot.length)
            and slot.is_firm(kept, len(ask.tokens), ask.salt, grows=False),
            may_reuse=may_reuse,
            restored=restored,
            before=slot.tokens if may_reuse else NO_TOKENS,
            memory=slot.memory.used_by(shared if may_reuse else 0, moves=moves),
            length_before=slot.length,
            is_length_sure=slot.salt != UNKNOWN_OWNER,
            started=self._clock(),
        )

    def _next(self, slot: Slot, operation: SlotOperation) -> None:
        """Ends one operation and begins the next; nothing can begin in between."""
        now = self._clock()
        self._table.end(slot.id, now)
        self._table.begin(slot.id, operation, now)

    async def _finish(self, lease: SlotLease) -> None:
        """Finds out what the slot holds after a request, and releases it."""
        if self.is_closed:
            return  # another scheduler may have the slots by now
        slot = self._table[lease.slot]
        known, is_own = NO_TOKENS, False
        unknown = len(lease.ask.tokens) or 1  # an empty slot is nobody's
        try:
            known, unknown, is_own = await self._left_by(lease)
        except EngineError as error:
            text = "%s: content of slot %d is unknown after a request: %s"
            log.warning(text, self.contents.engine, slot.id, error)
        finally:
            if is_own:
                memory, ask = self._memory_after(lease).grown(len(known) + unknown), lease.ask
                self._table.hold(slot.id, known, ask.salt, unknown=unknown, memory=memory, text=ask.text)
                self.contents.note_files([slot])
                self.contents.keep(slot, ask.retention)
                if lease.answer is not None and lease.answer.finish_reason == "tool_calls":
                    slot.due_until = self._clock() + TOOL_S  # the tool's result is expected
            else:
                self.contents.mark_unknown(slot, unknown)
            self._release(slot.id)

    def _memory_after(self, lease: SlotLease) -> SlotMemory:
        """The memory of a slot after a request, without the answer."""
        ask, answer = lease.ask, lease.answer
        told = answer.cached_tokens if answer is not None and answer.is_complete else None
        rules = self.contents.rules
        if told is None or not ask.tokens or lease.memory.rules != rules:  # they may have changed meanwhile
            return rules.lost(max(len(ask.tokens), 1))
        return lease.memory.after(lease.shared, len(ask.tokens), self.user_starts(ask), told=told)

    def user_starts(self, ask: SlotRequest) -> tuple[int, ...]:
        """The positions where the user messages of a chat begin; none where they do not matter."""
        is_needed = ask.is_chat and not self.contents.rules.is_plain
        return user_starts(ask.tokens, self.contents.facts.user_mark) if is_needed else ()

    async def _left_by(self, lease: SlotLease) -> tuple[TokenIds[int], int, bool]:
        """(known tokens, number of unknown ones, whether all are its owner's) in the slot after a request."""
        answer, prompt = lease.answer, lease.ask.tokens
        if answer is not None and answer.is_complete and (prompt or lease.leaves_own):
            self._used.add(lease.slot)
            self._learn(lease, answer)
            sampled = answer.token_ids
            if sampled is None:
                sampled = await known_tokens(self._control, answer) if lease.shows_text else NO_TOKENS
            known, unknown = slot_content(prompt, answer, sampled)
            return known, unknown, bool(known) or lease.leaves_own
        await slot_io.until_all_arrived(self._control)
        count = await self._count_when_idle(lease.slot)
        # The request was cut short. The slot holds part of the prompt and maybe of an answer. Or the request
        # never started and the slot has its old content: if the count does not tell, only the common prefix
        # of both is certain.
        if count is None:
            return NO_TOKENS, max(lease.length_before, 1), False
        has_started = lease.has_begun or (lease.is_length_sure and count != lease.length_before)
        known = (prompt if has_started else prompt[: common_prefix(prompt, lease.before)])[:count]
        return known, count - len(known), bool(known) or (has_started and lease.leaves_own)

    async def _count_when_idle(self, slot_id: int) -> int | None:
        """Waits until a slot is idle; returns its tokens. None: it had no request, perhaps a restore."""
        count = (await slot_io.when_idle(self._control, slot_id)).n_tokens
        if count is not None:
            self._used.add(slot_id)
        return count

    def _learn(self, lease: SlotLease, answer: CompletionOutput) -> None:
        cached = answer.cached_tokens
        self.contents.rates.held(self._clock() - lease.started)
        if cached is not None and lease.firm and lease.ask.reuse:
            self.contents.note_prediction(is_right=cached == lease.cached_tokens)
        if cached is not None and lease.restored and lease.may_reuse:
            self.contents.note_restored(in_vain=cached < lease.cached_tokens / 2)

    def _watch_foreign(self, slot: Slot) -> None:
        self._table.begin(slot.id, SlotOperation.FOREIGN, self._clock())
        self._tasks.start(self._until_foreign_ends(slot))

    async def _until_foreign_ends(self, slot: Slot) -> None:
        try:
            await self._count_when_idle(slot.id)
            await slot_io.end_copies(self._control, slot.id)
            self.contents.mark_unknown(slot, await self._count_when_idle(slot.id))
        except EngineError as error:
            log.warning("%s: slot %d: %s", self.contents.engine, slot.id, error)
        finally:
            self._release(slot.id)

    async def _taken(self, slot_id: int, work: _Work[_Result]) -> _Result:
        slot = self._table[slot_id]
        try:
            return await work(slot)
        except EngineUnavailable:
            self.contents.mark_unknown(slot, None)
            raise
        finally:
            self._release(slot.id)

    def _release(self, slot_id: int) -> None:
        self._turns.release(slot_id)
        self.has_worked, self._worked_at = True, self._clock()
        self.sleeps = False  # the operation has woken it
        self.changed.set()

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineUnavailable("the engine was lost before it could start")


async def _outcome(task: asyncio.Task[_Result]) -> _Result:
    """The result of `task`, which goes on if the caller is cancelled. EngineUnavailable if it was."""
    await asyncio.wait([task])
    if task.cancelled():
        raise EngineUnavailable("the engine was lost meanwhile")
    return task.result()
