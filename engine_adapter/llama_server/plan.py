"""Chooses where a request runs: the slot, what is restored into it, and whether its content is saved first.

    every slot  ×  use it as it is | restore the best saved prefix   →   the least total of expected seconds

A total counts three costs. The request waits for the slot, save and restore, and prefill. The streams of
other slots stand still during save and restore. And overwritten content may have to be computed again later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine_adapter.llama_server.rates import Rates
from engine_adapter.llama_server.saved_entry import Saved, recency
from engine_adapter.llama_server.slots import Operation, Slot
from engine_adapter.types import TokenIds, common_prefix

LEAST_GAIN = 16  # least shared tokens for a restore: all chats share their first tokens
# Fewer shared tokens than this are no reason to overwrite a conversation: a template and its default system
# prompt are as long.
LEAST_SHARED = 64
SETTLE_S = 0.005  # time to find out what an answer left
LEAST_REST = 0.25  # an overdue operation is expected to take this share of its usual time longer


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request runs, and its expected costs in seconds.

    Attributes:
        cached_tokens: how many of them the server will report as cached.
        firm: False if unknown tokens of the slot may make it more.
        restore: the saved prefix to restore into the slot first, None to use the slot as it is.
        save_first: save the slot's content before anything else.
        is_ready: the slot is idle; if not, the request waits for it.
        over_pin: the slot's pin yields, because every slot has a pin in the way.
        wait_s: wait until the slot is idle.
        restore_s: restore, and the save before it.
        prefill_s: prefill of the tokens that are not cached.
        stall_s: total delay of the streams of other slots during save and restore.
        regret_s: expected later cost of the overwritten content.
    """

    slot: int
    cached_tokens: int
    firm: bool
    restore: Saved | None
    save_first: bool
    is_ready: bool
    over_pin: bool
    wait_s: float
    restore_s: float
    prefill_s: float
    stall_s: float
    regret_s: float

    @property
    def total_s(self) -> float:
        """The total cost; the plan with the least is chosen."""
        return self.wait_s + self.restore_s + self.prefill_s + self.stall_s + self.regret_s


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs that all candidates of one plan share."""

    prompt: TokenIds[int]
    salt: str | None
    rates: Rates
    now: float
    streams: int
    can_save: bool
    can_restore: bool

    @property
    def most(self) -> int:
        """Most tokens the server reports as cached: it always computes the last one."""
        return max(len(self.prompt) - 1, 0)


class _File(NamedTuple):
    entry: Saved
    reused: int  # tokens that it would spare
    seconds: float  # of its restore


def plan(
    prompt: TokenIds[int],
    salt: str | None,
    slots: Iterable[Slot],
    saved: Iterable[Saved],
    rates: Rates,
    now: float,
    *,
    can_save: bool,
    can_restore: bool,
) -> Plan:
    """The cheapest way to run `prompt` under `salt` on any of the slots, of which there is at least one.

    `saved` are files of this server's key; of two with the same cost the first is chosen. Without
    `can_restore` no file counts, and nothing is saved. A pin holds, unless every slot has a pin in the way.
    """
    table = tuple(slots)
    streams = sum(slot.operation is Operation.REQUEST for slot in table)
    given = _Inputs(prompt, salt, rates, now, streams, can_save and can_restore, can_restore)
    file = _best_file(given, saved) if can_restore and any(slot.is_idle for slot in table) else None
    candidates = [(slot, choice) for slot in table for choice in _choices(slot, file, given)]
    allowed = [candidate for candidate in candidates if not candidate[1].over_pin]
    if allowed:
        return min(allowed, key=_rank)[1]
    return min(candidates, key=lambda each: (each[0].pinned_until, *_rank(each)))[1]


def worth_saving(slot: Slot, rates: Rates, now: float, streams: int, *, idle_s: float) -> bool:
    """Whether to write an idle slot back: a file is expected to spare more than the save costs.

    The cost of the save counts once for the slot and once for each of `streams` running streams. A slot is
    never worth saving before it has been idle for `idle_s` seconds.
    """
    if not slot.is_idle or not slot.dirty or now - slot.since < idle_s:
        return False
    spared = _regret_s(slot, 0, slot.saved, rates, now) - _regret_s(slot, 0, slot.length, rates, now)
    return spared > rates.save_s(slot.length) * (1 + streams)


def _best_file(given: _Inputs, saved: Iterable[Saved]) -> _File | None:
    """The saved prefix whose restore into any idle slot costs least; None if none beats a full prefill.

    The loss in the slot does not depend on the file, so one file is the best for all slots. A file is
    compared with the prompt at most once, and only if one token shows that it may beat the best so far.
    """
    best: _File | None = None
    least = given.rates.prefill_s(len(given.prompt))
    for entry in saved:
        seconds = given.rates.file_s(entry)
        cost = seconds * (1 + given.streams)
        # A file that spares no more tokens than this loses.
        needed = max(len(given.prompt) - (least - cost) * given.rates.prefill_tok_s, LEAST_GAIN - 1)
        if entry.salt != given.salt or min(len(entry.tokens), given.most) <= needed:
            continue
        probe = int(needed)
        if entry.tokens[probe] != given.prompt[probe]:
            continue
        reused = min(common_prefix(entry.tokens, given.prompt), given.most)
        if reused > needed:
            best = _File(entry, reused, seconds)
            least = cost + given.rates.prefill_s(len(given.prompt) - reused)
    return best


def _choices(slot: Slot, file: _File | None, given: _Inputs) -> Iterable[Plan]:
    """The candidates of one slot: use it as it is, or restore `file` if the slot is idle and gains by it."""
    kept = slot.shared(given.prompt, given.salt)
    yield _choice(slot, kept, None, given)
    if file is not None and slot.is_idle and file.reused > kept:
        yield _choice(slot, 0, file, given)


def _choice(slot: Slot, kept: int, file: _File | None, given: _Inputs) -> Plan:
    """One candidate; `kept` leading tokens of the slot's content stay in place."""
    cached = min(kept, given.most) if file is None else file.reused
    others = given.streams - (slot.operation is Operation.REQUEST)
    save_s, regret_s = _loss(slot, kept, others, given)
    if kept < min(LEAST_SHARED, len(slot.tokens), len(given.prompt)):
        # An empty slot would have to compute these tokens as well. Without this term, all new conversations
        # go through one slot.
        regret_s += given.rates.prefill_s(min(kept, given.most))
    io_s = save_s + (0.0 if file is None else file.seconds)
    return Plan(
        slot=slot.id,
        cached_tokens=cached,
        firm=file is not None or not _may_hold_more(slot, kept, given),
        restore=None if file is None else file.entry,
        save_first=save_s > 0,
        is_ready=slot.is_idle,
        over_pin=slot.pinned_until > given.now and kept < slot.pinned,
        wait_s=_wait_s(slot, given.rates, given.now),
        restore_s=io_s,
        prefill_s=given.rates.prefill_s(len(given.prompt) - cached),
        stall_s=io_s * others,
        regret_s=regret_s,
    )


def _may_hold_more(slot: Slot, kept: int, given: _Inputs) -> bool:
    """Whether unknown tokens, of the content or of a running answer, may be reused too."""
    grows = slot.unknown > 0 or not slot.is_idle
    return grows and slot.salt == given.salt and kept == len(slot.tokens) and kept < given.most


def _loss(slot: Slot, kept: int, others: int, given: _Inputs) -> tuple[float, float]:
    """(seconds to save the slot first, 0 if that does not pay; remaining regret)."""
    saved = slot.saved if given.can_restore else 0
    regret_s = _regret_s(slot, kept, saved, given.rates, given.now)
    if not given.can_save or saved >= slot.length:
        return 0.0, regret_s
    save_s = given.rates.save_s(slot.length)
    after_s = _regret_s(slot, kept, slot.length, given.rates, given.now)
    return (save_s, after_s) if save_s * (1 + others) + after_s < regret_s else (0.0, regret_s)


def _regret_s(slot: Slot, kept: int, saved: int, rates: Rates, now: float) -> float:
    """Expected cost of overwriting all but `kept` leading tokens, with `saved` of them in a file.

    If the conversation comes back, the file is restored and the rest computed. A conversation that goes on in
    its own slot loses nothing.
    """
    if kept and kept == len(slot.tokens):
        return 0.0
    later_s = rates.prefill_s(max(slot.length - max(kept, saved), 0))
    if saved > kept:
        later_s += rates.restore_s(saved)
    if slot.kept_until > now:
        return later_s  # a client that retains content is expected to come back
    idle_s = now - slot.since if slot.is_idle else 0.0
    return rates.reuse_probability * recency(idle_s, rates.half_life_s) * later_s


def _wait_s(slot: Slot, rates: Rates, now: float) -> float:
    """Expected seconds until the slot is idle. An overdue operation counts as taking a while longer."""
    match slot.operation:
        case None:
            return 0.0
        case Operation.SETTLE:
            usual_s = SETTLE_S
        case Operation.SAVE:
            usual_s = rates.save_s(slot.length)
        case Operation.RESTORE | Operation.ERASE:
            usual_s = rates.restore_s(slot.length)
        case _:
            usual_s = rates.hold_s
    return max(usual_s - (now - slot.since), usual_s * LEAST_REST)


def _rank(candidate: tuple[Slot, Plan]) -> tuple[float, bool, float, int, bool]:
    """Least total first; then an empty slot, the longest idle one, the lower id, no restore."""
    slot, choice = candidate
    return choice.total_s, not slot.is_empty, slot.since, slot.id, choice.restore is not None
