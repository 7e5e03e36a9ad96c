"""The slots of one llama-server: the tokens that each holds, and the operation that runs on it.

At most one operation is in flight per slot: a prompt pinned to a busy slot can corrupt the answer that runs
there. Every change happens between two awaits of the caller, so a reader never sees half a change. Times are
seconds on the caller's clock; nothing here reads a clock.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules, SlotMemory, reusable
from engine_adapter.types import TokenIds, common_prefix

NEVER = -math.inf
NO_TOKENS: TokenIds[int] = array("i")


class SlotOperation(StrEnum):
    """An operation that can run on a slot."""

    REQUEST = "request"
    SETTLE = "settle"  # the answer is over; the scheduler finds out what it left in the slot
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"
    FOREIGN = "foreign"  # another client's request


class SlotBusy(Exception):
    """Two operations on one slot, or the end of an operation that never began: a bug of the caller."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. Others read it; `SlotTable` changes it."""

    id: int
    # The known content, from the first token on. During a request: its prompt.
    tokens: TokenIds[int] = field(default_factory=lambda: NO_TOKENS)
    unknown: int = 0  # number of further tokens, whose ids are unknown
    salt: str | None = None  # digest of the content's cache salt
    operation: SlotOperation | None = None
    since: float = 0.0  # time when the operation began, or when the slot became idle
    uses: int = 0  # operations and wipes so far; if it has not changed, nothing happened
    saved: int = 0  # leading tokens of the content that lie in a saved file
    pinned: int = 0  # leading tokens that must not be overwritten before `pinned_until`
    pinned_until: float = NEVER
    kept_until: float = NEVER  # a client retains the content until this time: it is not overwritten unsaved
    kept_for: str | None = None  # digest of that client's tenant
    # Its answer called a tool: the next turn, with the result, is expected until then.
    due_until: float = NEVER
    session: int | None = None  # digest of the content's conversation; None if its client names none
    is_outdated: bool = False  # that conversation went on in another slot
    # Which of the content a prompt can resume. During a request: once its prompt is computed.
    memory: SlotMemory = field(default_factory=SlotMemory)
    # How the text begins that the server made its content of, where the tokens are not known; as code points.
    text: TokenIds[int] = field(default_factory=lambda: NO_TOKENS, repr=False)

    @property
    def length(self) -> int:
        """Tokens it holds, known or not."""
        return len(self.tokens) + self.unknown

    @property
    def is_empty(self) -> bool:
        """True if it holds no token, known or not."""
        return self.length == 0

    @property
    def is_idle(self) -> bool:
        """True if no operation is in flight."""
        return self.operation is None

    @property
    def dirty(self) -> bool:
        """True if part of the content lies in no saved file."""
        return self.length > self.saved

    def shared(self, tokens: TokenIds[int], salt: str | None) -> int:
        """Number of leading tokens of `tokens` known to lie here under `salt`."""
        return common_prefix(self.tokens, tokens) if self.salt == salt else 0

    def is_firm(self, kept: int, new: int, salt: str | None, *, grows: bool) -> bool:
        """False if more than `kept` of a prompt's `new` tokens may be reused: unknown ones, those of an
        answer that runs (`grows`), or from an unknown checkpoint."""
        is_at_end = kept == len(self.tokens) or self.memory.rules.chunk > 0
        may_hold_more = (grows or self.unknown > 0) and self.salt == salt and is_at_end and kept < new - 1
        return not may_hold_more and self.memory.is_firm(kept, new)

    def reusable(self, tokens: TokenIds[int], salt: str | None) -> int:
        """Number of leading tokens of `tokens` whose KV the server takes from here, in place or moved."""
        return reusable(self.tokens, tokens, self.memory.rules.chunk) if self.salt == salt else 0

    def likely_reusable(self, text: TokenIds[int], salt: str | None) -> int:
        """Estimate of `reusable` for a prompt that begins with this text under `salt`."""
        if not self.text or self.salt != salt:
            return 0
        chunk = self.memory.rules.chunk * len(self.text) // max(self.length, 1)  # in characters
        return self.length * reusable(self.text, text, chunk) // len(self.text)


class SlotTable:
    """All slots of one server. `tell` is called after each change of what a slot is sure to hold."""

    def __init__(
        self, count: int, rules: MemoryRules = PLAIN, tell: Callable[[Slot], None] = lambda _: None
    ) -> None:
        self._slots = tuple(Slot(slot_id, memory=rules.restored(0)) for slot_id in range(count))
        self._tell = tell
        self.violations = 0  # times that SlotBusy was raised; above 0 there is a bug
        self.most_in_flight = [0] * count  # for each slot, the most operations ever requested at once

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

    def begin(self, slot_id: int, operation: SlotOperation, now: float) -> None:
        """Starts `operation` on an idle slot; on a busy one it raises SlotBusy and changes nothing."""
        slot = self._slots[slot_id]
        self.most_in_flight[slot_id] = max(self.most_in_flight[slot_id], 1 if slot.is_idle else 2)
        if not slot.is_idle:
            self._violated(f"cannot begin {operation} on slot {slot_id}: {slot.operation} is in flight there")
        slot.operation = operation
        slot.since = now
        slot.uses += 1

    def end(self, slot_id: int, now: float) -> None:
        """Ends the operation on a slot; raises SlotBusy if nothing runs there."""
        slot = self._slots[slot_id]
        if slot.is_idle:
            self._violated(f"cannot end an operation on slot {slot_id}: none is in flight there")
        slot.operation = None
        slot.since = now

    def hold(
        self,
        slot_id: int,
        tokens: TokenIds[int],
        salt: str | None,
        *,
        unknown: int = 0,
        saved: int | None = None,
        memory: SlotMemory | None = None,
        text: TokenIds[int] = NO_TOKENS,
        is_sure: bool = True,
    ) -> None:
        """Sets the content of a slot; an erased slot has no tokens, known or unknown.

        `tokens` is stored without a copy. With `saved` None, the common prefix of old and new content stays
        saved, if a file can be restored up to there. A pin ends if some of its tokens go, and retention ends
        if some of the content goes. With `memory` None, the slot's content stays, or an answer was added to
        it. `text`: see `Slot.text`. Not `is_sure`: a request is about to bring the content there.
        """
        slot = self._slots[slot_id]
        kept = slot.shared(tokens, salt)
        if kept < slot.pinned:
            self.pin(slot_id, 0, NEVER)
        if kept < len(slot.tokens):
            slot.kept_until, slot.kept_for = NEVER, None
            slot.session, slot.is_outdated = None, False
        slot.tokens = tokens
        slot.due_until = NEVER
        slot.text = text
        slot.unknown = unknown
        slot.salt = None if slot.is_empty else salt
        if saved is None:
            saved = slot.saved if kept >= slot.saved else kept if slot.memory.rules.cuts_files else 0
        slot.saved = min(saved, slot.length)
        slot.memory = memory or slot.memory.grown(slot.length)
        if is_sure:
            self._tell(slot)

    def serve(self, slot_id: int, session: int | None) -> None:
        """A request of a conversation runs on a slot. What other idle slots hold of it is out of date."""
        for slot in self._slots:
            if slot.id == slot_id:
                slot.session, slot.is_outdated = session, False
            elif session is not None and slot.session == session and slot.is_idle:
                slot.is_outdated = True

    def pin(self, slot_id: int, tokens: int, until: float) -> int:
        """Pins the first `tokens` known tokens of a slot until `until`; returns how many are pinned. A slot
        has one pin: this replaces the last one, and 0 tokens end it."""
        slot = self._slots[slot_id]
        slot.pinned = min(tokens, len(slot.tokens))
        slot.pinned_until = until if slot.pinned else NEVER
        return slot.pinned

    def follow(self, rules: MemoryRules) -> None:
        """From now on the memory of the slots has these rules. Which checkpoints they have is not known."""
        for slot in self._slots:
            slot.memory = rules.lost(slot.length)

    def wipe(self) -> None:
        """The server lost all KV: contents and pins go, operations in flight go on. Counts as a use, so that
        an operation in flight sees that the content has changed."""
        for slot in self._slots:
            self.hold(slot.id, NO_TOKENS, None)
            slot.uses += 1

    def _violated(self, message: str) -> None:
        self.violations += 1
        raise SlotBusy(message)
