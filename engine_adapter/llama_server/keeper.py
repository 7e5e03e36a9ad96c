"""The slots of one server process: leased, filled, written back.

    turn → (save) → (restore) → request → what the answer left → release

State changes on the slot table without awaits; the I/O between them runs in tasks of the keeper's own, so
that a client that leaves never stops a save or a restore half-way, and never leaves a slot begun.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from engine_adapter.errors import EngineError, EngineRejected, EngineUnavailable
from engine_adapter.hold import Forecast
from engine_adapter.llama_server.answer import Answer, generated_tokens, slot_content
from engine_adapter.llama_server.discovery import ServerFacts, SlotState, read_slots
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.plan import plan, worth_saving
from engine_adapter.llama_server.rates import RateBook
from engine_adapter.llama_server.saved import Saved, SavedPrefixes
from engine_adapter.llama_server.slot_io import SlotIo
from engine_adapter.llama_server.slots import Operation, Slot, SlotTable
from engine_adapter.llama_server.state_file import StateFileError
from engine_adapter.llama_server.turns import Ask, SlotPlan, Turns, first_operation
from engine_adapter.openai_http import ControlClient
from engine_adapter.prefixes import common_prefix
from engine_adapter.types import Tier, TokenIds

log = logging.getLogger("kvpin.llama_server")

# The salt of content that nobody here knows: no request ever runs under it.
STRANGE = uuid4().hex
# So often found empty by surprise, slots are not kvpin's alone.
MANY_STRANGERS = 5
# A running stream of another slot shares each step; about this much of a prefill, each.
INTERFERENCE_S = 0.002
# A slot is written back when nothing has used it for this long.
IDLE_S = 0.1
WRITE_BACK_POLL_S = 0.25
# After a failed save, before the next try.
SAVE_PAUSE_S = 15.0
# Restores that brought less than half of what they promised, before restoring is given up.
MAX_VAIN_RESTORES = 2
SETTLE_POLL_S = (0.02, 0.25)
# At shutdown: as long as saving what lies in slots may take.
FAREWELL_S = 20.0

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Counts:
    """What was done on one server since kvpin knows it."""

    saves: int = 0
    write_backs: int = 0
    restores: int = 0
    failed_saves: int = 0
    failed_restores: int = 0
    saved_tokens: int = 0
    restored_tokens: int = 0
    strangers: int = 0  # times a slot was found changed by somebody else


@dataclass(slots=True)
class SlotLease:
    """A request's hold on a slot.

    Attributes:
        slot: the slot's id.
        cached_tokens: prompt tokens the server will report as reused.
        firm: False when it may turn out to be more.
        may_reuse: whether what lies in the slot may be shared with the request.
        answer: what the answer said; None until it is known, or when it never came to its end.
        has_begun: the server has answered something.
        has_stop: the request has stop strings.
    """

    slot: int
    ask: Ask
    cached_tokens: int
    firm: bool
    may_reuse: bool
    restored: bool
    before: TokenIds[int] = field(repr=False)
    started: float
    answer: Answer | None = None
    has_begun: bool = False
    has_stop: bool = False


class SlotKeeper:
    """Everything kvpin does with the slots of one server process.

    Args:
        engine: id of the engine, for logs.
        control: its HTTP routes.
        facts: what it is.
        saved: the registry of saved prefixes; None when nothing can be saved.
        mirror: told what slots and files hold.
        clock: seconds.
    """

    def __init__(
        self,
        engine: str,
        control: ControlClient,
        facts: ServerFacts,
        saved: SavedPrefixes | None,
        mirror: MirrorEvents,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.table = SlotTable(facts.slots)
        self.rates = RateBook()
        self.counts = Counts()
        self.saved = saved
        self.can_restore = saved is not None
        self.findings: list[str] = []
        self.is_lost = False
        self.has_worked = False  # since the slots were last read
        self.io = SlotIo(control)
        self._engine = engine
        self._control = control
        self._mirror = mirror
        self._clock = clock
        self._turns = Turns(self.table, self._plan, clock)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._no_save_before = 0.0
        self._vain_restores = 0
        self._used: set[int] = set()  # slots that ran a request of ours
        self._closed = False

    # --- requests ---------------------------------------------------------------------------------

    def forecast(self, ask: Ask) -> Forecast:
        """What `ask` would cost now; changes nothing."""
        best = self._plan(ask, self.table)
        queue_s = self._turns.waiting * self.rates.view.hold_s / len(self.table)
        return Forecast(
            cached_tokens=best.cached_tokens,
            firm=best.firm,
            wait_s=best.wait_s + queue_s,
            restore_s=best.restore_s,
            prefill_s=best.prefill_s,
            interference_s=best.stall_s + INTERFERENCE_S * self.streams,
            regret_s=best.regret_s,
            why=best.why,
        )

    @asynccontextmanager
    async def lease(self, ask: Ask) -> AsyncIterator[SlotLease]:
        """A slot for a request, holding as much of its prompt as is worth the while.

        Raises:
            EngineUnavailable: the server went away before the request could start.
        """
        self._check_open()
        chosen = await self._turns.slot(ask)
        lease = await self._shielded(self._prepare(chosen, ask), chosen.slot)
        # What runs is what the slot is going to hold: the next one of this conversation waits for it.
        self.table.hold(lease.slot, ask.tokens, ask.salt)
        try:
            yield lease
        except BaseException:
            # The slot may be busy for a while yet; nobody waits for that here.
            self._spawn(self._finish(lease))
            raise
        await asyncio.shield(self._spawn(self._finish(lease)))

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """All slots at once, for a request that cannot be pinned. What they hold is unknown afterwards."""
        self._check_open()
        await self._turns.all()
        tasks: dict[int, int | None] = {}
        try:
            tasks = {state.id: state.id_task for state in await read_slots(self._control)}
            yield
        finally:
            self._spawn(self._after_stranger(tasks))

    @property
    def streams(self) -> int:
        """Requests that run now."""
        return sum(slot.operation is Operation.REQUEST for slot in self.table)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._turns.waiting

    # --- operations of the admin API and of idle time ------------------------------------------------

    async def take(
        self, slot_id: int, operation: Operation, work: Callable[[Slot], Coroutine[Any, Any, _Result]]
    ) -> _Result:
        """Does `work` on an idle slot as its one operation. Raises what `work` raises."""
        self._check_open()
        self.table.begin(slot_id, operation, self._clock())
        return await asyncio.shield(self._spawn(self._taken(slot_id, work)))

    async def save(self, slot: Slot) -> bool:
        """Saves a slot on which SAVE has begun; afterwards its content is known to the last token."""
        registry, salt, length = self.saved, slot.salt, slot.length
        if registry is None or salt == STRANGE or not length:
            return False
        name = registry.new_name(self.facts.key)
        try:
            moved = await self.io.save(slot.id, name)
            if not moved.tokens:
                self._note_lost(slot)
                await registry.discard(name)
                return False
            entry = await registry.add(name, self.facts.key, salt, tokens_expected=moved.tokens)
        except (EngineRejected, StateFileError) as error:
            self._note_failed_save(error)
            return False
        self.counts.saves += 1
        self.counts.saved_tokens += moved.tokens
        self.rates.saved(moved.tokens, moved.size, moved.seconds)
        if common_prefix(entry.tokens, slot.tokens) < len(slot.tokens) or moved.tokens != length:
            self.counts.strangers += 1
            log.warning("%s: slot %d held something else than expected", self._engine, slot.id)
        self.hold(slot, entry.tokens, salt, saved=len(entry.tokens))
        return True

    async def restore(self, slot: Slot, entry: Saved) -> bool:
        """Brings a saved prefix into a slot on which RESTORE has begun. False leaves the slot's content as it
        was, or empty when the server refused the file."""
        registry = self.saved
        if registry is None:
            return False
        try:
            async with registry.using(entry) as name:
                moved = await self.io.restore(slot.id, name)
        except StateFileError as error:
            self.counts.failed_restores += 1
            log.warning("%s: a saved prefix was dropped: %s", self._engine, error)
            return False
        except EngineRejected as error:
            # A restore that fails wipes the slot.
            self.counts.failed_restores += 1
            self.hold(slot, array("i"), None)
            log.warning("%s: the server refused saved prefix %s: %s", self._engine, entry.name, error)
            await registry.drop(entry)
            return False
        self.counts.restores += 1
        self.counts.restored_tokens += moved.tokens
        self.rates.restored(moved.size, moved.seconds)
        self.hold(slot, entry.tokens, entry.salt, saved=len(entry.tokens), restored=True)
        return True

    async def erase(self, slot: Slot) -> None:
        """Empties a slot on which ERASE has begun."""
        await self.io.erase(slot.id)
        self.hold(slot, array("i"), None)

    def hold(self, slot: Slot, tokens: TokenIds[int], salt: str | None, **content: Any) -> None:  # noqa: ANN401 - SlotTable.hold's
        """Sets what a slot holds, here and in the mirror."""
        self.table.hold(slot.id, tokens, salt, **content)
        if slot.is_empty or salt == STRANGE:
            self._mirror.drop(slot.id)
        else:
            self._mirror.put(slot.id, Tier.GPU, slot.tokens, salt)

    def entries(self) -> Iterator[Saved]:
        """Saved prefixes this server can restore."""
        if self.saved is None or not self.can_restore:
            return iter(())
        return (e for e in self.saved.entries(self.facts.key) if len(e.tokens) <= self.facts.slot_ctx)

    def all_entries(self) -> Iterator[Saved]:
        """Saved prefixes of this model and layout, also those this server cannot restore."""
        return iter(()) if self.saved is None else self.saved.entries(self.facts.key)

    async def forget(self, entry: Saved) -> None:
        """Drops a saved prefix."""
        if self.saved is not None:
            await self.saved.drop(entry)

    def note_removed(self) -> None:
        """A saved prefix is gone: slots that were saved in it may be no more."""
        entries = list(self.all_entries())
        for slot in self.table:
            if slot.saved and slot.salt != STRANGE:
                slot.saved = max((slot.shared(e.tokens, e.salt) for e in entries), default=0)

    async def bring(self, ask: Ask) -> bool:
        """Restores a saved prefix into an idle slot ahead of its request; False when there is no room."""
        idle = [slot for slot in self.table.idle() if slot.pinned_until <= self.now()]
        chosen = self._plan(ask, idle) if idle else None
        if chosen is None or chosen.restore is None:
            return False
        self.table.begin(chosen.slot, first_operation(chosen), self._clock())
        slot, entry, save_first = self.table[chosen.slot], chosen.restore, chosen.save_first

        async def work(slot: Slot) -> bool:
            if save_first:
                await self.save(slot)
                self._next(slot, Operation.RESTORE)
            return await self.restore(slot, entry)

        return await asyncio.shield(self._spawn(self._taken(slot.id, work)))

    def now(self) -> float:
        """Seconds on the clock of the slot table."""
        return self._clock()

    def describe(self) -> list[dict[str, Any]]:
        """The slots for people, without what they hold."""
        now = self._clock()
        return [
            {
                "id": slot.id,
                "tokens": slot.length,
                "unknown": slot.unknown,
                "saved": slot.saved,
                "operation": slot.operation.value if slot.operation is not None else None,
                "since_s": round(now - slot.since, 3),
                "pinned_s": max(round(slot.pinned_until - now, 3), 0.0) if slot.pinned else 0.0,
            }
            for slot in self.table
        ]

    def adopt(self, states: Iterable[SlotState]) -> None:
        """What lay in the slots before kvpin came: nobody here knows it, and it is never taken for known."""
        for state in states:
            slot = self.table[state.id]
            if state.n_tokens or state.is_processing:
                self._strange(slot, state.n_tokens or 0)
            if state.is_processing:
                self.table.begin(slot.id, Operation.FOREIGN, self._clock())
                self._spawn(self._until_stranger_left(slot))

    async def write_back(self) -> None:
        """Saves what is worth it whenever slots are idle; runs until it is cancelled."""
        while True:
            self._changed.clear()
            slot = self._worth_saving()
            if slot is not None:
                self.counts.write_backs += 1
                with suppress(EngineError):
                    await self.take(slot.id, Operation.SAVE, self.save)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), WRITE_BACK_POLL_S if self._is_dirty() else None)
            await asyncio.sleep(IDLE_S)

    # --- the server's own word ------------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Holds the mirror against `/slots`: what somebody else changed is not known any more.

        Raises:
            EngineUnavailable: the server lost its slots, so it is another process.
        """
        uses = [slot.uses for slot in self.table]
        self.has_worked = False
        for state in await read_slots(self._control):
            slot = self.table[state.id]
            if not slot.is_idle or slot.uses != uses[slot.id]:
                continue
            if state.n_tokens is None and slot.id in self._used:
                self.is_lost = True
                raise EngineUnavailable("the server was restarted: its slots are new")
            if state.is_processing:
                self.counts.strangers += 1
                self._strange(slot, slot.length)
                self.table.begin(slot.id, Operation.FOREIGN, self._clock())
                self._spawn(self._until_stranger_left(slot))
            elif state.n_tokens is not None and state.n_tokens != slot.length:
                self.counts.strangers += 1
                self._strange(slot, state.n_tokens)

    def forget_everything(self) -> None:
        """The server lost all KV, as one that fell asleep does."""
        for slot in self.table:
            self._mirror.drop(slot.id)
        self.table.wipe()

    async def aclose(self, *, farewell: bool) -> None:
        """Ends all work; with `farewell`, what lies in slots is saved first."""
        self._closed = True
        self._turns.fail(EngineUnavailable("the engine was lost before it could start"))
        if farewell:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._farewell()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- inside ---------------------------------------------------------------------------------------

    def _plan(self, ask: Ask, slots: Iterable[Slot]) -> SlotPlan:
        now = self._clock()
        best = plan(
            ask.tokens,
            ask.salt,
            slots,
            self.entries(),
            self.rates.view,
            now,
            can_save=self.saved is not None and now >= self._no_save_before,
            can_restore=self.can_restore,
        )
        if best is None:
            raise EngineUnavailable("the server has no slots")
        return best

    async def _prepare(self, chosen: SlotPlan, ask: Ask) -> SlotLease:
        """Carries a plan out up to its request, which then has begun on the slot."""
        slot = self.table[chosen.slot]
        if chosen.save_first:
            await self.save(slot)
            self._next(slot, Operation.RESTORE if chosen.restore is not None else Operation.REQUEST)
        is_restored = chosen.restore is not None and await self.restore(slot, chosen.restore)
        if chosen.restore is not None:
            self._next(slot, Operation.REQUEST)
        kept = slot.shared(ask.tokens, ask.salt)
        grows = slot.unknown > 0 and kept == len(slot.tokens) and slot.salt == ask.salt
        return SlotLease(
            slot=slot.id,
            ask=ask,
            cached_tokens=min(kept, max(len(ask.tokens) - 1, 0)),
            firm=not grows or kept >= len(ask.tokens) - 1,
            may_reuse=slot.salt == ask.salt or slot.is_empty,
            restored=is_restored,
            before=slot.tokens,
            started=self._clock(),
        )

    def _next(self, slot: Slot, operation: Operation) -> None:
        """One operation ends and the next begins, with nobody in between."""
        now = self._clock()
        self.table.end(slot.id, now)
        self.table.begin(slot.id, operation, now)

    async def _finish(self, lease: SlotLease) -> None:
        """The request is over: what does its slot hold now?"""
        slot, answer = self.table[lease.slot], lease.answer
        try:
            if answer is not None and answer.is_complete and lease.ask.tokens:
                generated = await generated_tokens(self._control, answer, has_stop=lease.has_stop)
                tokens, unknown = slot_content(lease.ask.tokens, answer, generated)
                self._learn(lease, answer)
                self._used.add(slot.id)
            else:
                tokens, unknown = await self._settled(slot, lease)
        except EngineError as error:
            log.warning("%s: slot %d is not known after a request: %s", self._engine, slot.id, error)
            tokens, unknown = array("i"), len(lease.ask.tokens)
        if tokens:
            self.hold(slot, tokens, lease.ask.salt, unknown=unknown)
        else:
            self._strange(slot, unknown)
        self._release(slot)

    async def _settled(self, slot: Slot, lease: SlotLease) -> tuple[TokenIds[int], int]:
        """(known tokens, unknown ones) of a slot whose request was cut short, once the server is done.

        Until the server has answered, the slot holds its old content or part of the prompt: what both share
        is certain.
        """
        count = await self._count_when_idle(slot.id)
        prompt = lease.ask.tokens
        known = prompt if lease.has_begun else prompt[: common_prefix(prompt, lease.before)]
        known = known[:count]
        return known, count - len(known)

    async def _count_when_idle(self, slot_id: int) -> int:
        """Tokens in a slot, as soon as the server works on it no more."""
        pause_s, longest_s = SETTLE_POLL_S
        while True:
            state = (await read_slots(self._control))[slot_id]
            if not state.is_processing:
                return state.n_tokens or 0
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _learn(self, lease: SlotLease, answer: Answer) -> None:
        self.rates.held(self._clock() - lease.started)
        cached, total = answer.cached_tokens, answer.prompt_tokens
        if cached is None or total is None:
            return
        if answer.prompt_ms is not None:
            self.rates.prefilled(total - cached, answer.prompt_ms / 1000)
        if lease.restored:
            vain = cached < lease.cached_tokens / 2
            self._vain_restores = self._vain_restores + 1 if vain else 0
            if self._vain_restores >= MAX_VAIN_RESTORES and self.can_restore:
                self.can_restore = False
                self._find(
                    "restoring does not pay on this model: the server computes restored prompts again "
                    "(sliding-window, hybrid or recurrent memory); prefixes are not saved or restored here"
                )

    async def _after_stranger(self, tasks: dict[int, int | None]) -> None:
        """A request that ran alone is over: a slot that ran another task since holds nobody knows what."""
        try:
            for slot in self.table:
                await self._count_when_idle(slot.id)
            for state in await read_slots(self._control):
                if tasks.get(state.id, self) != state.id_task:
                    self._strange(self.table[state.id], state.n_tokens or 0)
        except EngineError:
            for slot in self.table:
                self._strange(slot, slot.length)
        self._turns.release_all()
        self._changed.set()

    async def _until_stranger_left(self, slot: Slot) -> None:
        try:
            self._strange(slot, await self._count_when_idle(slot.id))
        except EngineError as error:
            log.warning("%s: slot %d: %s", self._engine, slot.id, error)
        self._release(slot)

    def _strange(self, slot: Slot, count: int) -> None:
        # Of no use to anybody: nothing is lost with it, so it counts as saved.
        self.hold(slot, array("i"), STRANGE, unknown=count, saved=count)

    def _release(self, slot: Slot) -> None:
        self._turns.release(slot.id)
        self.has_worked = True
        self._changed.set()

    async def _taken(self, slot_id: int, work: Callable[[Slot], Coroutine[Any, Any, _Result]]) -> _Result:
        slot = self.table[slot_id]
        try:
            return await work(slot)
        except EngineUnavailable:
            self._strange(slot, slot.length)
            raise
        finally:
            self._release(slot)

    async def _shielded(self, work: Coroutine[Any, Any, SlotLease], slot_id: int) -> SlotLease:
        """`work` to its end, whoever waits for it; a slot that was prepared for nobody is released."""
        task = self._spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: self._abandon(slot_id, task))
            raise
        except EngineError:
            slot = self.table[slot_id]
            self._strange(slot, slot.length)
            self._release(slot)
            raise

    def _abandon(self, slot_id: int, task: asyncio.Task[SlotLease]) -> None:
        slot = self.table[slot_id]
        if task.cancelled() or task.exception() is not None:
            self._strange(slot, slot.length)
        self._release(slot)

    def _worth_saving(self) -> Slot | None:
        """The idle slot to save now, the one unused for longest."""
        now = self._clock()
        if self.saved is None or not self.can_restore or self._closed or now < self._no_save_before:
            return None
        streams = self.streams
        worth = [
            slot
            for slot in self.table
            if slot.salt != STRANGE and worth_saving(slot, self.rates.view, now, streams, idle_s=IDLE_S)
        ]
        return min(worth, key=lambda slot: slot.since, default=None)

    def _is_dirty(self) -> bool:
        return self.saved is not None and any(
            slot.dirty and slot.salt != STRANGE for slot in self.table.idle()
        )

    async def _farewell(self) -> None:
        for slot in self.table.idle():
            if slot.dirty and slot.salt != STRANGE and self.can_restore:
                self.table.begin(slot.id, Operation.SAVE, self._clock())
                with suppress(EngineError):
                    await self._taken(slot.id, self.save)

    def _note_failed_save(self, error: Exception) -> None:
        self.counts.failed_saves += 1
        self._no_save_before = self._clock() + SAVE_PAUSE_S
        log.warning(
            "%s: a slot could not be saved, no more saves for %.0f s: %s", self._engine, SAVE_PAUSE_S, error
        )

    def _note_lost(self, slot: Slot) -> None:
        """A slot that was to hold something holds nothing."""
        self.counts.strangers += 1
        self.hold(slot, array("i"), None)
        if self.counts.strangers == MANY_STRANGERS:
            self._find(
                "slots lose what they held: the server clears idle slots (-kvu, the default without -np; start it "
                "with -np N -c N*ctx and without -kvu), or somebody else uses it as well"
            )

    def _find(self, finding: str) -> None:
        self.findings.append(finding)
        log.warning("%s: %s", self._engine, finding)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine was lost before it could start")

    def _spawn(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
