"""What each slot of one llama-server holds, token by token, and what runs on it.

At most one operation is in flight per slot: pinning a prompt to a busy slot can corrupt the answer that runs
there. Every change happens between two awaits of the caller, so what is read here is never half changed.
Times are seconds on a clock of the caller's choice; nothing here reads one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from engine_adapter.prompt.prefixes import common_prefix
from engine_adapter.types import TokenIds

NEVER = -math.inf


class Operation(StrEnum):
    """What can run on a slot."""

    REQUEST = "request"
    SETTLE = "settle"  # its answer is over, and what that left in the slot is being read
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"
    FOREIGN = "foreign"  # somebody else's, or one that could not be pinned


class SlotBusy(Exception):
    """Two operations on one slot, or the end of one that never began: a bug of the caller."""


def _nothing() -> TokenIds[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. Others read it; `SlotTable` changes it.

    Attributes:
        id: what `id_slot` names.
        tokens: the known content, from the first token on. During a request: the prompt being computed.
        unknown: further tokens it holds whose ids are not known.
        salt: cache salt of the content.
        operation: what runs on it, None while it is idle.
        since: when that began, or when it became idle.
        uses: operations begun and wipes so far; unchanged means that nothing happened in between.
        saved: leading tokens of the content that lie in a saved file.
        restored: the content came from a file and nothing has used it since.
        pinned: leading tokens that must not be overwritten before `pinned_until`.
        pinned_until: when that pin ends.
        kept_until: until then whoever left the content wants it kept, so that it is not lost unsaved.
        kept_for: who that is.
    """

    id: int
    tokens: TokenIds[int] = field(default_factory=_nothing)
    unknown: int = 0
    salt: str | None = None
    operation: Operation | None = None
    since: float = 0.0
    uses: int = 0
    saved: int = 0
    restored: bool = False
    pinned: int = 0
    pinned_until: float = NEVER
    kept_until: float = NEVER
    kept_for: str | None = None

    @property
    def length(self) -> int:
        """Tokens it holds, known or not."""
        return len(self.tokens) + self.unknown

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return self.length == 0

    @property
    def is_idle(self) -> bool:
        """Whether no operation is in flight."""
        return self.operation is None

    @property
    def dirty(self) -> bool:
        """Whether some of the content lies in no saved file."""
        return self.length > self.saved

    def shared(self, tokens: TokenIds[int], salt: str | None) -> int:
        """Number of leading tokens of `tokens` known to lie here under `salt`."""
        return common_prefix(self.tokens, tokens) if self.salt == salt else 0


class SlotTable:
    """All slots of one server.

    Attributes:
        violations: times that SlotBusy was raised; anything but 0 is a bug.
        most_in_flight: for each slot, the most operations that were ever asked to run at once.
    """

    def __init__(self, count: int) -> None:
        self._slots = tuple(Slot(slot_id) for slot_id in range(count))
        self.violations = 0
        self.most_in_flight = [0] * count

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot_id: int) -> Slot:
        return self._slots[slot_id]

    @property
    def in_flight(self) -> int:
        """Number of slots on which an operation runs."""
        return sum(not slot.is_idle for slot in self._slots)

    def idle(self) -> list[Slot]:
        """The slots on which nothing runs, by id."""
        return [slot for slot in self._slots if slot.is_idle]

    def begin(self, slot_id: int, operation: Operation, now: float) -> None:
        """`operation` starts on an idle slot; raises SlotBusy, and changes nothing, on any other."""
        slot = self._slots[slot_id]
        self.most_in_flight[slot_id] = max(self.most_in_flight[slot_id], 1 if slot.is_idle else 2)
        if not slot.is_idle:
            self._violated(f"cannot begin {operation} on slot {slot_id}: {slot.operation} is in flight there")
        slot.operation = operation
        slot.since = now
        slot.uses += 1

    def end(self, slot_id: int, now: float) -> None:
        """What runs on a slot is over; raises SlotBusy when nothing runs there."""
        slot = self._slots[slot_id]
        if slot.is_idle:
            self._violated(f"cannot end an operation on slot {slot_id}: none is in flight there")
        slot.operation = None
        slot.since = now

    def begin_all(self, operation: Operation, now: float) -> None:
        """`operation` takes every slot, as one that cannot be pinned does; SlotBusy unless all are idle."""
        if self.in_flight:
            busy = ", ".join(str(slot.id) for slot in self._slots if not slot.is_idle)
            self._violated(f"cannot begin {operation} on all slots: operations are in flight on {busy}")
        for slot in self._slots:
            self.begin(slot.id, operation, now)

    def end_all(self, now: float) -> None:
        """The end of `begin_all`; raises SlotBusy, and changes nothing, unless every slot is busy."""
        if self.in_flight < len(self):
            idle = ", ".join(str(slot.id) for slot in self.idle())
            self._violated(f"cannot end an operation on all slots: none is in flight on {idle}")
        for slot in self._slots:
            self.end(slot.id, now)

    def hold(
        self,
        slot_id: int,
        tokens: TokenIds[int],
        salt: str | None,
        *,
        unknown: int = 0,
        saved: int | None = None,
        restored: bool = False,
    ) -> None:
        """Sets the content of a slot; no tokens, known or unknown, is an erased slot.

        `tokens` is kept, not copied. `saved` None keeps what was saved as far as the new content starts with
        the old one. A pin ends here when its tokens do not all stay, and nothing is kept that does not.
        """
        slot = self._slots[slot_id]
        kept = slot.shared(tokens, salt)
        if kept < slot.pinned:
            self.pin(slot_id, 0, NEVER)
        if kept < len(slot.tokens):
            slot.kept_until, slot.kept_for = NEVER, None
        slot.tokens = tokens
        slot.unknown = unknown
        slot.salt = None if slot.is_empty else salt
        slot.saved = min(min(slot.saved, kept) if saved is None else saved, slot.length)
        slot.restored = restored

    def pin(self, slot_id: int, tokens: int, until: float) -> int:
        """Keeps the first `tokens` known tokens of a slot until `until`; returns how many those are.

        A slot has one pin: this replaces the one before, and 0 tokens end it.
        """
        slot = self._slots[slot_id]
        slot.pinned = min(tokens, len(slot.tokens))
        slot.pinned_until = until if slot.pinned else NEVER
        return slot.pinned

    def keep(self, slot_id: int, until: float, owner: str | None) -> None:
        """The content of a slot is to be kept for `owner`, if not longer already."""
        slot = self._slots[slot_id]
        slot.kept_until, slot.kept_for = max(slot.kept_until, until), owner

    def wipe(self) -> None:
        """The server lost all KV: contents and pins are gone, operations in flight stay in flight.

        Counts as a use, so that an operation in flight sees that the content it began with is no more.
        """
        for slot in self._slots:
            self.hold(slot.id, _nothing(), None)
            slot.uses += 1

    def _violated(self, message: str) -> None:
        self.violations += 1
        raise SlotBusy(message)
