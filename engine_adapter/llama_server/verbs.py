"""The admin verbs on slots and files: flush → erase, offload → save and erase, restore, pin.

Progress counts blocks: a slot or file of n tokens has n // 16 of them.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

import msgspec

from engine_adapter.llama_server.mirror_events import TOKENS_PER_BLOCK
from engine_adapter.llama_server.saved import Saved, salt_digest
from engine_adapter.llama_server.scheduler import SlotScheduler
from engine_adapter.llama_server.server_files import ServerRecord
from engine_adapter.llama_server.slots import NEVER, Slot, SlotOperation
from engine_adapter.types import KvProgress, KvTarget, KvVerb, Pinned, TokenIds

_Held = TypeVar("_Held", Slot, Saved)
# Operations that kvpin itself runs on a slot. They are over soon.
_OWN_WORK = (SlotOperation.SETTLE, SlotOperation.SAVE, SlotOperation.RESTORE, SlotOperation.ERASE)
_POLL_S = 0.01
_SERVER_CACHE = "server_cache"  # `--cache-ram`, which no route empties


class Pin(msgspec.Struct, frozen=True):
    """A pin, also on disk: it protects the slot and the file that hold most of these tokens, as int32, of
    content with this digest of a cache salt, until a Unix time."""

    pin_id: str
    tokens: bytes
    salt: str | None
    until: float


@dataclass(slots=True)
class _Tally:
    """The progress of an operation, in blocks; `left` by reason."""

    total: int = 0
    done: int = 0
    size: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def progress(self) -> KvProgress:
        return KvProgress(self.done, self.total, self.size, dict(self.left))

    def note(self, blocks: int, size: float = 0, *, left: str | None = None) -> KvProgress:
        """The progress with further blocks: done, of `size` bytes, or left for a reason."""
        if left is not None:
            self.left[left] += blocks
        else:
            self.done += blocks
            self.size += round(size)
        return self.progress()


class SlotVerbs:
    """KV operations on the slots and files of one server."""

    def __init__(self, scheduler: SlotScheduler, record: ServerRecord[list[Pin]]) -> None:
        """`record`: where pins are written to. Those that are there begin again."""
        self._scheduler = scheduler
        self._record = record
        self._contents = scheduler.contents
        self._pins = record.read() or []
        self.protect()

    def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Yields the progress of an operation."""
        match verb:
            case KvVerb.FLUSH:
                return self._flush(target)
            case KvVerb.OFFLOAD:
                return self._offload(target)
            case KvVerb.RESTORE:
                return self._restore(target)

    def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        """Pins the slot and the file that hold most of a prefix."""
        pin_id, most = f"pin-{uuid4().hex}", 0
        if target.token_ids is not None:
            ids, salt = target.token_ids, salt_digest(target.cache_salt)
            most = max((held.shared(ids, salt) for held in self._holders(ids, salt)), default=0)
            if most:
                self._pins.append(Pin(pin_id, ids[:most].tobytes(), salt, time.time() + ttl_s))
            self.protect()
            self._record.write(self._pins)
        return Pinned(pin_id, most // TOKENS_PER_BLOCK, ttl_s)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none with that id."""
        left = [pin for pin in self._pins if pin.pin_id != pin_id]
        if len(left) == len(self._pins):
            return False
        self._pins = left
        self.protect()
        self._record.write(self._pins)
        return True

    def _holders(self, ids: TokenIds[int], salt: str | None) -> list[Slot | Saved]:
        """The slot and the file that hold most of a prefix, if that is at least one full block."""

        def shared(held: Slot | Saved) -> int:
            return held.shared(ids, salt)

        slot = max(self._contents.table, key=shared)
        entry = max(self._contents.entries(), key=shared, default=None)
        return [held for held in (slot, entry) if held is not None and shared(held) >= TOKENS_PER_BLOCK]

    def protect(self) -> None:
        """Applies all current pins to what holds their prefixes now."""
        now, table = time.time(), self._contents.table
        self._pins = [pin for pin in self._pins if pin.until > now]
        for slot in table:
            table.pin(slot.id, 0, NEVER)
        self._contents.end_pins()
        for pin in self._pins:
            ids = array("i", pin.tokens)
            for held in self._holders(ids, pin.salt):
                if isinstance(held, Slot):
                    until = max(pin.until - now + self._contents.clock(), held.pinned_until)
                    table.pin(held.id, max(held.shared(ids, pin.salt), held.pinned), until)
                else:
                    mine = self._contents.engine
                    held.pins[mine] = max(pin.until, held.pins.get(mine, 0.0))

    async def _flush(self, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Erases slots and deletes files that begin like the target. The server's own prompt cache is out of
        reach: what it may still hold is left."""
        scheduler, tally = self._scheduler, _Tally()
        cached = None if self._contents.facts.keeps_none_itself else _SERVER_CACHE
        for slot in self._contents.table:
            await self._until_still(slot)
        slots = self._free([slot for slot in self._contents.table if _matches(slot, target)], tally)
        entries, kept = self._saved(target)
        if kept:
            tally.left["pinned"] += sum(map(_blocks, kept))
        tally.total = sum(map(_blocks, slots)) + sum(map(_blocks, entries))
        for slot in slots:
            blocks, reason = _blocks(slot), cached
            await self._until_still(slot)
            if slot.is_idle:
                await scheduler.take(slot.id, SlotOperation.ERASE, self._contents.erase)
            else:
                reason = "in_use"
            yield tally.note(blocks, left=reason)
        known, (entries, _) = entries, self._saved(target)  # some were saved meanwhile
        tally.total += sum(_blocks(entry) for entry in entries if entry not in known)
        for entry in entries:
            await self._contents.forget(entry)
            yield tally.note(_blocks(entry), entry.size)
        if cached is not None and not tally.left[cached]:
            tally.left[cached] = 1  # how many are in it, nobody tells
        yield tally.progress()

    def _saved(self, target: KvTarget) -> tuple[list[Saved], list[Saved]]:
        """The files that begin like the target: (those that are not pinned, those that are)."""
        entries = [entry for entry in self._contents.all_entries() if _matches(entry, target)]
        kept = [entry for entry in entries if entry.pinned_until > time.time()]
        return [entry for entry in entries if entry not in kept], kept

    async def _offload(self, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        tally = _Tally()
        held = [slot for slot in self._contents.table if _matches(slot, target)]
        if target.token_ids is not None:
            held = _fullest(held, target)
        slots = self._free(held, tally)
        tally.total = sum(map(_blocks, slots))
        for slot in slots:
            blocks = _blocks(slot)
            reason = await self._offload_slot(slot)
            size = blocks * TOKENS_PER_BLOCK * self._contents.rates.bytes_per_token
            yield tally.note(blocks, size, left=reason)
        yield tally.progress()

    async def _offload_slot(self, slot: Slot) -> str | None:
        """Saves and erases a slot; returns the reason if it was left."""
        save = self._contents.save
        if slot.is_idle and slot.dirty and not await self._scheduler.take(slot.id, SlotOperation.SAVE, save):
            return "not_saved"
        if not slot.is_idle or slot.dirty:
            return "in_use"  # maybe of a request that took it meanwhile
        await self._scheduler.take(slot.id, SlotOperation.ERASE, self._contents.erase)
        return None

    async def _restore(self, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Restores files into slots: the best one for a prefix, otherwise one for each empty slot."""
        tally = _Tally()
        for entry in self._wanted(target):
            tally.total += _blocks(entry)
            is_there = await self._scheduler.bring(entry)
            yield tally.note(_blocks(entry), entry.size, left=None if is_there else "no_room")
        yield tally.progress()

    def _wanted(self, target: KvTarget) -> list[Saved]:
        """The files to restore, without those whose tokens lie in a slot already."""
        table = self._contents.table
        entries = [entry for entry in self._contents.entries() if _matches(entry, target)]
        entries.sort(key=lambda entry: entry.last_used, reverse=True)
        missing = [e for e in entries if all(slot.shared(e.tokens, e.salt) < e.count for slot in table)]
        if target.token_ids is None:
            return missing[: sum(slot.is_empty for slot in table.idle())]
        reached = max((_shared(slot, target) for slot in table), default=0)
        return [e for e in _fullest(entries, target)[:1] if e in missing and _shared(e, target) > reached]

    def _free(self, slots: list[Slot], tally: _Tally) -> list[Slot]:
        """The slots that are free; the others are left."""
        free = []
        for slot in slots:
            if slot.pinned_until > self._contents.clock():
                tally.left["pinned"] += _blocks(slot)
            elif not slot.is_idle:
                tally.left["in_use"] += _blocks(slot)
            else:
                free.append(slot)
        tally.left = +tally.left
        return free

    async def _until_still(self, slot: Slot) -> None:
        """Waits while kvpin itself moves what the slot holds: a save would outlive a flush. The session's end
        may leave the mark of such work there for ever."""
        while slot.operation in _OWN_WORK and not self._scheduler.is_closed:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_POLL_S)


def _blocks(held: Slot | Saved) -> int:
    return (held.length if isinstance(held, Slot) else held.count) // TOKENS_PER_BLOCK


def _matches(held: Slot | Saved, target: KvTarget) -> bool:
    """True if content shares a full leading block with the target; one of everything, unknown content."""
    if isinstance(held, Slot) and held.is_empty:
        return False
    if target.token_ids is None:
        return target.cache_salt is None or held.salt == salt_digest(target.cache_salt)
    return _shared(held, target) >= TOKENS_PER_BLOCK


def _shared(held: Slot | Saved, target: KvTarget) -> int:
    """Number of leading tokens of a prompt that a slot or file holds."""
    return 0 if target.token_ids is None else held.shared(target.token_ids, salt_digest(target.cache_salt))


def _fullest(held: list[_Held], target: KvTarget) -> list[_Held]:
    """The slots or files that share the most tokens with the target, if that is at least one full block."""
    most = max((_shared(each, target) for each in held), default=0)
    return [each for each in held if most >= TOKENS_PER_BLOCK and _shared(each, target) == most]
