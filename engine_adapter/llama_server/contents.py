"""The content of slots and files, and the I/O that moves KV between them.

The scheduler decides whose turn it is. The caller begins each operation on its slot first.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from engine_adapter.errors import EngineError, EngineRejected
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import saved_files, slot_io
from engine_adapter.llama_server.checkpoints import MemoryRules
from engine_adapter.llama_server.discovery import MOVES, ServerFacts
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.plan import SlotRates
from engine_adapter.llama_server.saved import Saved, SavedPrefixes, salt_digest
from engine_adapter.llama_server.saved_files import FileFault, StateFileError
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import NO_TOKENS, Slot, SlotTable
from engine_adapter.types import Capability, Finding, Retention, Tier, common_prefix

log = logging.getLogger("kvpin.llama_server")

# Pause after a failed save; it doubles with each further failure.
SAVE_PAUSE_S, MAX_SAVE_PAUSE_S = 1.0, 60.0
# After this many unexpected changes, somebody else uses the slots too.
MANY_CHANGES = 5
# After this many useless restores in a row (less than half was reused), restoring ends.
MAX_VAIN_RESTORES = 2
# After this many wrong predictions in a row, the rules of the memory do not fit the server.
MAX_WRONG = 3


@dataclass(slots=True)
class Counts:
    """Counts of the events on one server since kvpin connected to it."""

    saves: int = 0
    write_backs: int = 0
    restores: int = 0
    failed_saves: int = 0
    failed_restores: int = 0
    saved_tokens: int = 0
    restored_tokens: int = 0
    strangers: int = 0  # times that somebody else changed a slot


@dataclass(eq=False, repr=False)
class SlotContents:
    """The slots of one server process and the files it can restore. `_saved` is None when nothing can be
    saved. Every change of content goes to `_mirror`. The server reuses any prefix of a slot's content
    [`reuses_any_prefix`], until it is seen not to."""

    engine: str  # its id, for logs
    facts: ServerFacts  # as far as it was probed
    control: ControlClient
    _saved: SavedPrefixes | None
    _mirror: MirrorEvents
    clock: Callable[[], float]
    rates: SlotRates = field(default_factory=SlotRates)
    counts: Counts = field(default_factory=Counts, init=False)
    findings: list[Finding] = field(default_factory=list, init=False)
    reuses_any_prefix: bool = field(default=True, init=False)
    has_other_adapters: bool = field(default=False, init=False)  # of LoRA: it makes other KV by now
    _refused: set[str] = field(default_factory=set, init=False)  # by this server, by name
    _vain_restores: int = field(default=0, init=False)
    _wrong: int = field(default=0, init=False)
    _no_save_before: float = field(default=0.0, init=False)
    _save_pause_s: float = field(default=SAVE_PAUSE_S, init=False)

    def __post_init__(self) -> None:
        self.rules = self.facts.memory
        self.table = SlotTable(self.facts.slots, self.rules, self._tell)

    @property
    def can_restore(self) -> bool:
        """True if saved prefixes can be restored, and so are worth saving."""
        is_sound = self.reuses_any_prefix and self.rules.can_restore and not self.facts.has_draft
        return self._saved is not None and is_sound and not self.has_other_adapters

    @property
    def can_save(self) -> bool:
        """True if a save may be tried now."""
        return self.can_restore and self.clock() >= self._no_save_before

    def entries(self) -> Iterator[Saved]:
        """Saved prefixes this server can restore."""
        if self._saved is None or not self.can_restore:
            return iter(())
        return (
            entry
            for entry in self._saved.usable(self.facts.key)
            if len(entry.tokens) <= self.facts.slot_ctx and entry.name not in self._refused
        )

    def all_entries(self) -> Iterator[Saved]:
        """Saved prefixes of this model and layout."""
        return iter(()) if self._saved is None else self._saved.entries(self.facts.key)

    def _tell(self, slot: Slot) -> None:
        """Tells the mirror what a slot holds now."""
        if slot.is_empty or slot.salt == UNKNOWN_OWNER:
            self._mirror.drop(slot.id)
        else:
            self._mirror.put(slot.id, Tier.GPU, slot.tokens, slot.salt)

    def keep(self, slot: Slot, retention: Retention | None) -> None:
        """Retains what a request left in the slot, and the files that hold its beginning."""
        if retention is None or not retention.priority:
            return
        until = max(slot.kept_until, self.clock() + retention.ttl_s)
        slot.kept_until, slot.kept_for = until, salt_digest(retention.owner)
        for entry in self.all_entries():
            if self._saved is not None and slot.shared(entry.tokens, entry.salt) == len(entry.tokens):
                self._saved.keep(entry, retention.ttl_s, slot.kept_for)

    def mark_unknown(self, slot: Slot, count: int | None) -> None:
        """The slot holds `count` tokens whose ids are not known. None, where nothing tells how many, does not
        count as empty: an empty slot is nobody's, and any tenant may reuse it."""
        count = max(slot.length, 1) if count is None else count
        # Nobody can reuse these tokens, so their loss costs nothing: they count as saved.
        lost = self.rules.lost(count)
        self.table.hold(slot.id, NO_TOKENS, UNKNOWN_OWNER, unknown=count, saved=count, memory=lost)

    def mark_changed(self, slot: Slot, count: int) -> None:
        """Somebody else changed the slot: it holds `count` unknown tokens now."""
        self.counts.strangers += 1
        self.mark_unknown(slot, count)
        if self.counts.strangers == MANY_CHANGES:
            self._find(
                "slots change by themselves: another client uses the server, or the server clears idle slots "
                "(-kvu, the default without -np); start it with -np N -c N*ctx and without -kvu"
            )

    async def save(self, slot: Slot) -> bool:
        """Saves a slot on which SAVE has begun; the file's header then lists all its tokens. False if the
        save failed, which leaves the slot as it was, or if somebody else changed the slot."""
        registry, tokens, salt, length, uses = self._saved, slot.tokens, slot.salt, slot.length, slot.uses
        if registry is None or salt == UNKNOWN_OWNER or not length:
            return False
        name, entry = saved_files.new_name(self.facts.key), None
        try:
            # A server that finds no room may leave half a file and report success, so make room first.
            await registry.make_room(round(length * self.rates.bytes_per_token))
            moved = await slot_io.save(self.control, slot.id, name)
            if moved.tokens and await self._keeps_adapters():
                entry = await registry.add(
                    name,
                    self.facts.key,
                    salt,
                    tokens_expected=moved.tokens,
                    bytes_expected=moved.size,
                    keep_s=slot.kept_until - self.clock(),
                    owner=slot.kept_for,
                    replaces=self.rules.cuts_files,
                )
        except (EngineError, StateFileError) as error:
            self.counts.failed_saves += 1
            self._no_save_before = self.clock() + self._save_pause_s
            text = "%s: a slot could not be saved %s; kvpin tries again in %.0f s: %s"
            log.warning(text, self.engine, _room_in(registry.place.host), self._save_pause_s, error)
            self._save_pause_s = min(2 * self._save_pause_s, MAX_SAVE_PAUSE_S)
            return False
        finally:
            if entry is None:
                await registry.discard(name)
        kept = 0 if entry is None else common_prefix(entry.tokens, tokens)
        if entry is None or moved.tokens != length or kept < len(tokens):
            # Its owner is unknown too, so the tenant that this slot served does not get it.
            self.mark_changed(slot, moved.tokens)
            if entry is not None:
                await registry.drop(entry)
            return False
        self._save_pause_s = SAVE_PAUSE_S
        self.counts.saves += 1
        self.counts.saved_tokens += moved.tokens
        self.rates.saved(moved.tokens, moved.size, moved.seconds)
        if slot.uses == uses:  # else the server fell asleep meanwhile, and the slot is empty
            self.table.hold(slot.id, entry.tokens, salt, saved=entry.count, text=slot.text)
        return True

    async def restore(self, slot: Slot, entry: Saved) -> bool:
        """Restores a saved prefix into a slot on which RESTORE has begun. False leaves the slot as it was, or
        empty if the server refused the file."""
        try:
            if self._saved is None or not await self._keeps_adapters():
                return False
        except EngineRejected:  # it does not tell
            return False
        try:
            async with self._saved.using(entry) as name:
                moved = await slot_io.restore(self.control, slot.id, name)
        except StateFileError as error:
            self.counts.failed_restores += 1
            fate = "is damaged and deleted" if error.reason is FileFault.DAMAGED else "cannot be restored now"
            log.warning("%s: a saved prefix %s: %s", self.engine, fate, error)
            return False
        except EngineRejected as error:
            self.counts.failed_restores += 1
            text = "%s: the server refused saved prefix %s: %s; the file is kept, and not restored here again"
            log.warning(text, self.engine, entry.name, error)
            if error.status == HTTPStatus.BAD_REQUEST:
                self.table.hold(slot.id, NO_TOKENS, None)  # a failed restore wipes the slot
            else:  # perhaps somebody before the server refused it
                self.mark_unknown(slot, None)
            # The file is not damaged: another server may take it, or this one with other flags.
            self._refused.add(entry.name)
            self._mirror.drop(entry.name)
            return False
        self.counts.restores += 1
        self.counts.restored_tokens += moved.tokens
        self.rates.restored(moved.size, moved.seconds)
        memory = self.rules.restored(len(entry.tokens))
        self.table.hold(slot.id, entry.tokens, entry.salt, saved=entry.count, memory=memory)
        return True

    async def _keeps_adapters(self) -> bool:
        """Asks whether the server has the LoRA adapters that it had when kvpin connected: their scales may be
        set at any time, and the server keeps its slots."""
        told = self.facts.adapters
        if told and await slot_io.read_adapters(self.control) != told:
            self.has_other_adapters = True
        return not self.has_other_adapters

    @asynccontextmanager
    async def keeping(self, entry: Saved | None) -> AsyncIterator[Saved | None]:
        """Protects a saved prefix, or the one in its place, from eviction: its restore is planned."""
        if self._saved is None or entry is None:
            yield entry
        else:
            heir = self._saved.heir(entry)
            entry = heir if self.rules.cuts_files or heir.count == entry.count else entry
            async with self._saved.keeping(entry):
                yield entry

    async def erase(self, slot: Slot) -> None:
        """Empties a slot on which ERASE has begun."""
        await slot_io.erase(self.control, slot.id)
        self.table.hold(slot.id, NO_TOKENS, None)

    async def forget(self, entry: Saved) -> None:
        """Drops a saved prefix."""
        if self._saved is not None:
            await self._saved.drop(entry)

    def end_pins(self) -> None:
        """Ends the pins of files, also those of an earlier process with another model."""
        if self._saved is not None:
            self._saved.unpin(self.engine)

    def note_files(self, slots: Iterable[Slot]) -> None:
        """Counts how many leading tokens of these slots' content a restore of a file would bring back."""
        entries = list(self.entries())
        for slot in slots:
            if slot.salt != UNKNOWN_OWNER:
                shared = ((entry.count, slot.shared(entry.tokens, entry.salt)) for entry in entries)
                spared = (self.rules.restored(count).reused(of, slot.length + 1) for count, of in shared)
                slot.saved = max(spared, default=0)

    def learn(self, facts: ServerFacts) -> None:
        """The server was probed: it tells more of its memory."""
        self.facts = facts
        self._follow(facts.memory)

    def note_prediction(self, *, is_right: bool) -> None:
        """A firm prediction came true, or not. Too many that do not are no longer called firm."""
        self._wrong = 0 if is_right else self._wrong + 1
        rules = self.rules
        if self._wrong < MAX_WRONG or not rules.is_sure or (rules.is_plain and not rules.chunk):
            return
        self._follow(replace(rules, is_sure=False))
        if rules.chunk:
            self._find(
                "the server does not move KV as kvpin expects, or not at all for this model: predictions are "
                "estimates; leave cache_reuse out"
            )
        else:
            self._find(
                "the server makes its context checkpoints elsewhere than kvpin expects: predictions are "
                "estimates; start it without -b, -ub, --ctx-checkpoints and --checkpoint-min-step"
            )

    def note_restored(self, *, in_vain: bool) -> None:
        """A request ran on restored KV; `in_vain` if the server computed most of it again."""
        self._vain_restores = self._vain_restores + 1 if in_vain else 0
        if self._vain_restores == MAX_VAIN_RESTORES:
            self.reuses_any_prefix = False
            self._find(
                "restoring does not pay on this model: the server computes restored prompts again "
                "(sliding-window, hybrid or recurrent memory); kvpin no longer saves or restores its slots",
                MOVES,
            )

    def describe(self) -> list[dict[str, Any]]:
        """The slots for people, without their content."""
        now = self.clock()
        return [
            {
                "id": slot.id,
                "tokens": slot.length,
                "unknown": slot.unknown,
                "saved": slot.saved,
                "operation": slot.operation.value if slot.operation is not None else None,
                "since_s": round(now - slot.since, 3) if slot.uses else None,
                "pinned_s": max(round(slot.pinned_until - now, 3), 0.0) if slot.pinned else 0.0,
            }
            for slot in self.table
        ]

    def _follow(self, rules: MemoryRules) -> None:
        self.rules = rules
        self.table.follow(rules)

    def _find(self, problem: str, lacks: Collection[Capability] = ()) -> None:
        self.findings.append(Finding(problem, lacks=lacks))
        log.warning("%s: %s", self.engine, problem)


def _room_in(directory: Path) -> str:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"in {directory} ({error.strerror})"
    return f"in {directory} ({free} bytes free; check its room, and that the server may write there)"
