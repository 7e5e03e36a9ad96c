"""One server process, from kvpin's first contact until it is gone: its facts, who schedules its slots, and
what kvpin declares of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec import structs

from engine_adapter.errors import EngineError, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server.checkpoints import UNPROBED, MemoryKind
from engine_adapter.llama_server.contents import SlotContents
from engine_adapter.llama_server.discovery import MOVES, ServerFacts, memory_rules, probe, probe_file
from engine_adapter.llama_server.mirror_events import TOKENS_PER_BLOCK, MirrorEvents
from engine_adapter.llama_server.options import SERVED, LlamaServerSpec
from engine_adapter.llama_server.plan import SlotRates, worth_saving
from engine_adapter.llama_server.saved import SavedPrefixes
from engine_adapter.llama_server.saved_files import StateFileError
from engine_adapter.llama_server.scheduler import SlotScheduler
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER, ServerRecord
from engine_adapter.llama_server.slot_io import erase, read_pulse, read_slots, read_user_mark, spare_slot
from engine_adapter.llama_server.slots import Slot, SlotOperation
from engine_adapter.llama_server.verbs import Pin, SlotVerbs
from engine_adapter.prompt.template_input import USUAL
from engine_adapter.types import TRANSLATED_ROUTES, Capability, EngineInfo, Finding

log = logging.getLogger("kvpin.llama_server")

# Longest time to save slots at shutdown. Supervisors kill a process after ten seconds.
FAREWELL_S = 8.0
# A slot is written back after it has been idle for this long.
IDLE_S = 0.1
POLL_S = 0.25
_INPUT = replace(USUAL, ascii_space=True)
_TOO_SLOW = Finding(
    "it is too slow to be tried out: the probe at connect, some 250 tokens, did not end within "
    "health.timeout_s. So predictions are not firm, and salts are refused",
    "raise health.timeout_s",
    (Capability.CACHE_SALT,),
)


class Probed(msgspec.Struct, frozen=True):
    """Result of probing a server process whose files arrive in `host_cache_dir`; see ServerFacts."""

    ram_cache: bool | None
    is_unified: bool | None
    memory: MemoryKind | None
    has_draft: bool = False
    continues: tuple[int, ...] = ()


@dataclass(eq=False, repr=False)
class ServerSession:
    """A connected server process."""

    _spec: LlamaServerSpec
    _control: ControlClient
    facts: ServerFacts
    _: KW_ONLY
    may_try: bool = True  # it may probe the server, and empty and save slots; else it changes nothing there
    told: Probed | None = None  # what probing a process with the same flags has told
    is_too_slow: bool = False  # the server did not answer the probe in time before; it is not probed again
    rates: SlotRates = field(default_factory=SlotRates)  # of its work, from earlier processes too
    # Manages its slots; None if they cannot be managed, and the server chooses them itself.
    scheduler: SlotScheduler | None = field(default=None, init=False)
    verbs: SlotVerbs | None = field(default=None, init=False)  # the admin verbs on its slots; None likewise
    # Reasons why kvpin cannot use it fully, beyond the findings of the facts.
    findings: list[Finding] = field(default_factory=list, init=False)
    mirror: MirrorEvents = field(default_factory=MirrorEvents, init=False)  # of its slots and files
    is_probing: bool = field(default=False, init=False)
    _has_files: bool = field(default=False, init=False)
    _shares_directory: bool = field(default=True, init=False)
    _left: str = field(default="", init=False)  # the probe's file, in a directory that kvpin does not know
    _write_back: asyncio.Task[None] | None = field(default=None, init=False)
    _probes: ServerRecord[Probed] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.is_too_slow:
            self.findings.append(_TOO_SLOW)

    async def begin(self, registry: SavedPrefixes | None, mirror: MirrorEvents) -> None:
        """Probes the server, takes over its slots, and begins to write them back. Errors end the session."""
        self.mirror = mirror
        try:
            await self._begin(registry)
        except BaseException:
            await self.end(farewell=False)
            raise

    async def end(self, *, farewell: bool) -> None:
        """Ends all work; with `farewell`, saves the slots first. May be called again."""
        task, self._write_back = self._write_back, None
        scheduler, self.scheduler, self.verbs = self.scheduler, None, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            if scheduler is not None and farewell and self.may_try:
                with suppress(TimeoutError, EngineError):
                    async with asyncio.timeout(FAREWELL_S):
                        if not await scheduler.is_asleep():
                            await save_all(scheduler)
                            await scheduler.reconcile()
        finally:
            if scheduler is not None:
                await scheduler.aclose()

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that the server has with its flags."""
        has = {
            Capability.KV_EVENTS: True,
            Capability.PIN: True,
            Capability.CACHE_SALT: self.facts.keeps_none_itself,
            Capability.FLUSH: self.facts.can_save,
            Capability.OFFLOAD: self._can_restore,
            Capability.RESTORE: self._can_restore,
        }
        with_slots = {capability for capability, there in has.items() if there and self.scheduler is not None}
        return frozenset({Capability.CACHED_TOKENS, Capability.TOKENIZE, *with_slots})

    @property
    def _can_restore(self) -> bool:
        return self.scheduler is not None and self.scheduler.contents.can_restore

    @property
    def facts_now(self) -> ServerFacts:
        """The facts, with what the work on its slots has shown since."""
        return self.facts if self.scheduler is None else self.scheduler.contents.facts

    @property
    def is_lost(self) -> bool:
        """True if the server turned out to be another process."""
        return self.scheduler is not None and self.scheduler.is_lost

    @property
    def probed(self) -> Probed | None:
        """The results of the probe; None if the next process has to be probed, too."""
        facts = self.facts
        if facts.ram_cache is None or not (self._has_files or facts.is_unified):
            return None
        return Probed(facts.ram_cache, facts.is_unified, facts.kind, facts.has_draft, facts.continues)

    async def is_busy_moving(self) -> bool:
        """True if the same process is saving or restoring a slot, during which it answers few questions."""
        scheduler, instance = self.scheduler, self.facts.instance
        if scheduler is None or not scheduler.moves_kv or instance is None:
            return False
        return (await read_pulse(self._control)).instance == instance

    @property
    def _lacks_probe(self) -> bool:
        is_open = self.facts.has_slots and self.facts.ram_cache is None
        return is_open and self.may_try and not self.is_too_slow

    async def can_be_probed(self) -> bool:
        """True if the server was too busy to be probed when kvpin connected, and does nothing now."""
        if self._lacks_probe:
            with suppress(TimeoutError):  # it answers between two steps: late, it is busy
                async with asyncio.timeout(POLL_S):
                    return not any(state.is_processing for state in await read_slots(self._control))
        return False

    async def try_out(self) -> None:
        """Probes a server that was too busy for it before. EngineUnavailable: its slots share one pool."""
        scheduler = self.scheduler
        if scheduler is None:
            return
        idle = scheduler.contents.table.idle()
        if self._lacks_probe and idle and not scheduler.streams and not scheduler.waiting:
            slot = min(idle, key=lambda slot: (slot.dirty, slot.length))
            work = partial(self._try_out_on, scheduler.contents)
            await scheduler.take(slot.id, SlotOperation.FOREIGN, work)
        if self.facts.is_unified:
            scheduler.is_lost = True
            raise EngineUnavailable("its slots share one KV pool, as the probe shows only now")

    async def _try_out_on(self, contents: SlotContents, slot: Slot) -> None:
        contents.mark_unknown(slot, None)
        continues = self.facts.continues
        await self._probe(slot.id)
        self.facts = replace(self.facts, continues=continues)  # files keep the key that they have
        await self._learn_memory()
        self._note_probe()
        contents.learn(self.facts)
        contents.mark_unknown(slot, (await read_slots(self._control))[slot.id].n_tokens)

    async def _begin(self, registry: SavedPrefixes | None) -> None:
        directory = registry.place.host if registry is not None else None
        self._probes = ServerRecord(directory, self._spec.url, self.facts.instance, "probe", Probed)
        if self.facts.has_slots:
            states, told = await read_slots(self._control), self.told or self._probes.read()
            if told is not None:  # by an earlier probe: no slot loses its content again
                self.facts = replace(
                    self.facts,
                    ram_cache=told.ram_cache,
                    is_unified=told.is_unified,
                    kind=told.memory,
                    continues=self.facts.continues or told.continues,
                )
            elif self._lacks_probe and not any(state.is_processing for state in states):
                await self._probe(spare_slot(states))
        if not self.facts.has_slots or self.facts.looks_unified:
            return
        # A slot without a request does not say whether a draft model or earlier text proposes tokens.
        drafts = {state.has_draft for state in await read_slots(self._control)}
        untold = drafts == {None} and self.may_try and (told is None or told.has_draft)
        self.facts = replace(self.facts, has_draft=True in drafts or untold)
        await self._learn_memory()
        saved = await self._usable(registry)
        self._has_files = saved is not None
        if saved is not None:
            saved.rates[self.facts.key] = self.rates
        self._note_probe()
        contents = SlotContents(
            self._spec.id, self.facts, self._control, saved, self.mirror, time.monotonic, self.rates
        )
        scheduler = self.scheduler = SlotScheduler(contents)
        # Pins are those of the kvpin that uses the server.
        directory = saved.place.host if saved is not None and self.may_try else None
        record = ServerRecord(directory, self._spec.url, self.facts.instance, "pins", list[Pin])
        self.verbs = SlotVerbs(scheduler, record)
        for state in await read_slots(self._control) if self.may_try else ():
            # Content that was restored and never used does not show, and may be anybody's.
            if state.n_tokens is None and self.facts.can_save and not state.is_processing:
                await erase(self._control, state.id)
        scheduler.adopt(await read_slots(self._control), may_try=self.may_try)
        if self.may_try:
            self._write_back = asyncio.get_running_loop().create_task(self._keep_writing_back(scheduler))

    async def _keep_writing_back(self, scheduler: SlotScheduler) -> None:
        while True:
            try:
                await write_back(scheduler)
            except Exception:
                # Log a bug in it, and let nothing else fail.
                log.exception("%s: writing slots back crashed; it starts again in 1 s", self._spec.id)
                await asyncio.sleep(1.0)

    async def _probe(self, slot_id: int) -> None:
        self.is_probing = True
        directory, left = self._spec.options.host_cache_dir, probe_file(self._spec)
        saves = self.facts.can_save and (directory is not None or self.facts.is_unified is None)
        file = left if directory is None else probe_file()
        self.facts = await probe(self._control, self.facts, slot_id, file=file if saves else None)
        if saves and directory is None:
            self._left = left
        elif saves and directory is not None:
            self._shares_directory = await asyncio.to_thread(_take_probe, directory, file)
            await asyncio.to_thread(_take_probe, directory, left)
        self.is_probing = False

    async def _learn_memory(self) -> None:
        """Turns what the probe told of the memory into rules."""
        kind = self.facts.kind
        if kind is None:
            self.facts = replace(self.facts, memory=UNPROBED)
            return
        if self._spec.options.host_cache_dir is None:  # nothing is restored
            kind = structs.replace(kind, has_window_in_files=False)
        rules = await asyncio.to_thread(memory_rules, kind, self.facts)
        mark = () if rules.is_plain else await read_user_mark(self._control)
        self.facts = replace(self.facts, memory=rules, user_mark=mark)

    def _note_probe(self) -> None:
        """Spares the next kvpin the probe of this process."""
        if self.may_try and self._probes is not None and (probed := self.probed) is not None:
            self._probes.write(probed)

    async def _usable(self, registry: SavedPrefixes | None) -> SavedPrefixes | None:
        """The registry, if the server can save and the directory can be used."""
        if registry is None and self.facts.can_save:
            left = f"; until then, a small file stays there, {self._left}" if self._left else ""
            remedy = f"set host_cache_dir to the server's --slot-save-path as kvpin sees it{left}"
            self.findings.append(Finding("nothing is saved", remedy, MOVES))
        if registry is None or not self.facts.can_save:
            return None
        directory = registry.place.host
        try:
            await (registry.rebuild() if self.may_try else registry.look())
        except StateFileError as error:
            problem = f"nothing is saved: host_cache_dir {directory} cannot be used ({error})"
            self.findings.append(Finding(problem, lacks=MOVES))
            return None
        if not self._shares_directory:
            problem = f"nothing is saved: files of the server do not arrive in host_cache_dir {directory}"
            choice = "or set host_cache_dir to the directory it saves to"
            remedy = f"start it with --slot-save-path {directory}, {choice}"
            self.findings.append(Finding(problem, remedy, MOVES))
            return None
        return registry


def _take_probe(directory: str, file: str) -> bool:
    """True if the small file that a probe leaves behind is in the directory; removes it."""
    try:
        (Path(directory).expanduser() / file).unlink()
    except OSError:
        return False
    return True


# --- saves in idle time, so that overwriting a slot later loses nothing ----------------------------


async def write_back(scheduler: SlotScheduler) -> None:
    """Saves idle slots that are worth it; runs until it is cancelled. Saves each content once: where not all
    have room, each file drives out another."""
    written: dict[int, int] = {}  # by slot: its uses when it was saved
    while True:
        scheduler.changed.clear()
        slot = _worth_most(scheduler, written)
        if slot is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if dirty_slots(scheduler) else None):
                    await scheduler.changed.wait()
            await asyncio.sleep(IDLE_S)
            continue
        if await scheduler.is_asleep() or not slot.is_idle:
            continue  # a save would wake it, and find nothing; or a request came meanwhile
        with suppress(EngineError):
            scheduler.contents.counts.write_backs += 1
            uses = slot.uses + 1  # the save is one
            if await scheduler.take(slot.id, SlotOperation.SAVE, scheduler.contents.save):
                written[slot.id] = uses


async def save_all(scheduler: SlotScheduler) -> None:
    """Saves every slot that is not saved yet: first the idle ones, then those that were busy."""
    await save_idle(scheduler)
    await scheduler.settled()
    await save_idle(scheduler)


async def save_idle(scheduler: SlotScheduler) -> None:
    """Saves every idle slot that is not saved yet; stops at the first that cannot be saved."""
    for slot in dirty_slots(scheduler):
        if not slot.is_idle:
            continue
        with suppress(EngineError):
            if await scheduler.take(slot.id, SlotOperation.SAVE, scheduler.contents.save):
                continue
        return


def dirty_slots(scheduler: SlotScheduler) -> list[Slot]:
    """Idle slots with known owners whose content lies in no file."""
    if not scheduler.contents.can_restore:
        return []
    return [slot for slot in scheduler.contents.table.idle() if slot.dirty and slot.salt != UNKNOWN_OWNER]


def _worth_most(scheduler: SlotScheduler, written: Mapping[int, int]) -> Slot | None:
    """The slot to save now: the longest idle one that is worth it, and was used since it was `written`."""
    contents = scheduler.contents
    if not contents.can_save:
        return None
    rates, now, streams = contents.rates, contents.clock(), scheduler.streams
    new = [slot for slot in dirty_slots(scheduler) if written.get(slot.id) != slot.uses]
    worth = [slot for slot in new if worth_saving(slot, rates, now, streams, idle_s=IDLE_S)]
    return min(worth, key=lambda slot: slot.since, default=None)


# --- what kvpin declares of a llama-server, while its model is in memory and before ---------------------


def absent(model: str, instance: str, card: Mapping[str, Any], *, keeps_none: bool = False) -> EngineInfo:
    """The facts about a server whose model was not in memory yet. `keeps_none`: it has no `--cache-ram`."""
    has = {Capability.CACHED_TOKENS, Capability.KV_EVENTS, Capability.TOKENIZE}
    return EngineInfo(
        model=model,
        instance=instance,
        capabilities=frozenset(has | {Capability.CACHE_SALT} if keeps_none else has),
        tokens_per_block=TOKENS_PER_BLOCK,
        shares_prefill=True,
        any_model=True,
        served_as_chats=TRANSLATED_ROUTES,
        routes=SERVED,
        runs_several=False,
        recomputes_prompts=True,
        card=card,
        too_long=_too_long,
    )


def info_of(spec: LlamaServerSpec, session: ServerSession) -> EngineInfo:
    """The facts about a server in its session."""
    facts = session.facts
    template = xxhash.xxh3_64_hexdigest(facts.chat_template.encode())
    known = absent(spec.model or facts.model, facts.instance or facts.fingerprint, facts.card)
    return replace(
        known,
        names_process=facts.instance is not None,
        template_input=_INPUT,
        rendering=f"model {facts.fingerprint}\ntemplate {template}",
        capabilities=session.capabilities,
        max_model_len=facts.slot_ctx,
        vocab_size=facts.vocab_size,
        tokenizer=spec.tokenizer or (str(facts.local_model) if facts.local_model else None),
        gpu_blocks=facts.slots * facts.slot_ctx // TOKENS_PER_BLOCK,
        version=facts.build,
        runs_several=session.scheduler is None,
        recomputes_prompts=session.scheduler is not None,
    )


def _too_long(tokens: int, limit: int) -> dict[str, Any]:
    """The server's own fields of this error; its clients look for the type."""
    return {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": limit}
