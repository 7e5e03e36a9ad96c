"""Chooses where a request runs: the slot, what is restored into it, and whether its content is saved first.

    every slot  ×  use it as it is | restore the best saved prefix   →   the least total of expected seconds

A total counts three costs. The request waits for the slot, save and restore, and prefill. The streams of
other slots stand still during save and restore. And overwritten content may have to be computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from engine_adapter.hold import Forecast
from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules, reusable
from engine_adapter.llama_server.saved_files import Saved
from engine_adapter.llama_server.slots import NO_TOKENS, Slot, SlotOperation
from engine_adapter.types import Tier, TokenIds

_CHARACTERS = 4  # of a token, about
# How often the next turn comes within `TOOL_S` of a tool call: vLLM's router, issue 285.
AFTER_TOOL_CALL = 0.95
# An outdated slot's content is needed less often, by this factor: a client may name several conversations
# alike, or go on from where it was. With 0, 0.3 and 1, simulated requests like those of
# tests/live/test_llama_checkpoints.py reused 111,000, 110,000 and 83,000 tokens of 288,000.
OUTDATED = 0.3
WINDOW = 32


@dataclass(slots=True)
class SlotRates:
    """How long work on the slots of one server takes.

    The time of prompts, and whether they come back, is learned by the engine's pool. Only a server with
    slots saves and restores files and waits for slots: this is learned here. Each rate is the median of its
    last samples. The first guess counts as two samples, so one outlier has no effect. Saves count as cheap:
    their real rate is learned only if they are tried.
    """

    # Tokens → seconds to compute so many prompt tokens.
    prefill_s: Callable[[int], float] = lambda tokens: tokens / 500.0  # guesses, before it is in a pool
    # Idle seconds → probability that a prompt idle for so long is requested again.
    returns: Callable[[float], float] = lambda _idle_s: 0.0
    save_bytes_s: float = 1e9  # bytes per second from a slot to the host tier
    restore_bytes_s: float = 2e9  # bytes per second from the host tier to a slot
    disk_bytes_s: float = 400e6  # bytes per second from the disk tier to the host tier
    bytes_per_token: float = 1000.0
    hold_s: float = 2.0  # usual seconds that a request holds a slot
    reuse_probability: float = 0.8  # first guess that a conversation goes on right after an answer
    half_life_s: float = 1800.0  # idle seconds that halve this guess
    overhead_s: float = 0.002  # seconds of a save or a restore that do not depend on its bytes
    measured: dict[str, float] = field(default_factory=dict)
    _samples: dict[str, deque[float]] = field(default_factory=dict)

    def save_s(self, tokens: int) -> float:
        """Seconds to save a slot of `tokens` tokens."""
        return self.overhead_s + tokens * self.bytes_per_token / self.save_bytes_s

    def restore_s(self, tokens: int) -> float:
        """Seconds to restore a file of `tokens` tokens that lies in the host tier."""
        return self.overhead_s + tokens * self.bytes_per_token / self.restore_bytes_s

    def file_s(self, entry: Saved) -> float:
        """Seconds to restore this file from its tier."""
        seconds = self.overhead_s + entry.size / self.restore_bytes_s
        return seconds + entry.size / self.disk_bytes_s if entry.tier is Tier.DISK else seconds

    def comes_back(self, idle_s: float) -> float:
        """Probability that a prompt idle for `idle_s` seconds is requested again: the pool's, or the first
        guess if that is higher. The pool's own prior is lower: few people share a server with slots, and
        their conversations go on."""
        guess = self.reuse_probability * float(0.5 ** (max(idle_s, 0.0) / self.half_life_s))
        return max(self.returns(idle_s), guess)

    def value(self, entry: Saved, now: float) -> tuple[float, float]:
        """Seconds that a file is expected to spare for each of its bytes; then when it was last used."""
        times = self.comes_back(now - entry.last_used) * (1 + entry.uses)
        return times * self.prefill_s(entry.count) / entry.size, entry.last_used

    def saved(self, tokens: int, size: int, seconds: float) -> None:
        """A slot of `tokens` tokens became a file of `size` bytes in `seconds`."""
        if tokens:  # exact: it is a property of the model
            self.bytes_per_token = self.measured["bytes_per_token"] = size / tokens
        self._learn("save_bytes_s", size, seconds - self.overhead_s)

    def restored(self, size: int, seconds: float) -> None:
        """A file of `size` bytes in the host tier went into a slot in `seconds`."""
        self._learn("restore_bytes_s", size, seconds - self.overhead_s)

    def held(self, seconds: float) -> None:
        """A request held its slot for `seconds`."""
        self._learn("hold_s", seconds, 1.0)

    def _learn(self, rate: str, amount: float, per: float) -> None:
        if amount > 0 and per > 0:
            guess = getattr(self, rate)
            samples = self._samples.setdefault(rate, deque((guess, guess), maxlen=WINDOW))
            samples.append(amount / per)
            self.measured[rate] = median(samples)
            setattr(self, rate, self.measured[rate])


LEAST_GAIN = 16  # least shared tokens for a restore: all chats share their first tokens
# Fewer shared tokens than this are no reason to overwrite a conversation: a template and its default system
# prompt are as long.
LEAST_SHARED = 64
SETTLE_S = 0.005  # time to find out what an answer left
LEAST_REST = 0.25  # an overdue operation is expected to take this share of its usual time longer


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of slot for a request."""

    slot: int
    # What the server will report as cached, and the expected seconds: `restore_s` has the save before the
    # restore, and `interference_s` the delay of other slots' streams during both.
    cost: Forecast
    restore: Saved | None  # the saved prefix to restore into the slot first, None to use the slot as it is
    save_first: bool  # save the slot's content before anything else
    over_pin: bool  # the slot's pin yields, because every slot has a pin in the way


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs that all candidates of one plan share."""

    prompt: TokenIds[int]
    salt: str | None
    rates: SlotRates
    now: float
    streams: int
    can_save: bool
    can_restore: bool
    rules: MemoryRules
    text: TokenIds[int]

    @property
    def length(self) -> int:
        """Tokens of the prompt; an estimate if only its text is known."""
        return len(self.prompt) or len(self.text) // _CHARACTERS

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
    rates: SlotRates,
    now: float,
    *,
    can_save: bool,
    can_restore: bool,
    rules: MemoryRules = PLAIN,
    text: TokenIds[int] = NO_TOKENS,
) -> Plan:
    """The cheapest way to run `prompt` under `salt` on any of the slots, of which there is at least one.

    `saved` are files of this server's key; of two with the same cost the first is chosen. `rules` say how
    much of a restored file is reused. `text` is how the prompt begins, as code points, if its tokens are not
    known. Without `can_restore` no file counts, and nothing is saved. A pin
    holds, unless every slot has a pin in the way.
    """
    table = tuple(slots)
    streams = sum(slot.operation is SlotOperation.REQUEST for slot in table)
    given = _Inputs(prompt, salt, rates, now, streams, can_save and can_restore, can_restore, rules, text)
    file = _best_file(given, saved) if can_restore and any(slot.is_idle for slot in table) else None
    candidates = [(slot, choice) for slot in table for choice in _choices(slot, file, given)]
    allowed = [candidate for candidate in candidates if not candidate[1].over_pin]
    if allowed:
        return min(allowed, key=_rank)[1]
    return min(candidates, key=lambda each: (each[0].pinned_until, *_rank(each)))[1]


def worth_saving(slot: Slot, rates: SlotRates, now: float, streams: int, *, idle_s: float) -> bool:
    """True if saving an idle slot pays: a file is expected to spare more than the save costs. The cost of the
    save counts once for the slot and once for each of `streams` running streams. A slot is never worth saving
    before it has been idle for `idle_s` seconds."""
    if not slot.is_idle or not slot.dirty or now - slot.since < idle_s:
        return False
    spared = _regret_s(slot, 0, slot.saved, rates, now) - _regret_s(slot, 0, slot.length, rates, now)
    return spared > rates.save_s(slot.length) * (1 + streams)


def _best_file(given: _Inputs, saved: Iterable[Saved]) -> _File | None:
    """The saved prefix whose restore into any idle slot costs least; None if none beats a full prefill. The
    loss in the slot does not depend on the file, so one file is the best for all slots. A file is compared
    with the prompt at most once, and only if one token shows that it may beat the best so far."""
    best: _File | None = None
    length, prefill_s = len(given.prompt), given.rates.prefill_s
    least_s = prefill_s(length)
    for entry in saved:
        seconds, most = given.rates.file_s(entry), min(len(entry.tokens), given.most)
        cost_s = seconds * (1 + given.streams)
        if entry.salt != given.salt or cost_s + prefill_s(length - most) >= least_s:
            continue
        # A file that costs no less than the best so far has to spare more tokens.
        has_to = best is not None and seconds >= best.seconds
        needed = max(best.reused if best is not None and has_to else 0, LEAST_GAIN - 1)
        if most <= needed or entry.tokens[needed] != given.prompt[needed]:
            continue
        restored = given.rules.restored(len(entry.tokens))
        reused = restored.reused(reusable(entry.tokens, given.prompt, given.rules.chunk), length)
        total_s = cost_s + prefill_s(length - reused)
        if reused > needed and total_s < least_s:
            best, least_s = _File(entry, reused, seconds), total_s
    return best


def _choices(slot: Slot, file: _File | None, given: _Inputs) -> Iterable[Plan]:
    """The candidates of one slot: use it as it is, or restore `file` if the slot is idle and gains by it."""
    kept = slot.reusable(given.prompt, given.salt)
    yield _choice(slot, kept, None, given)
    if file is not None and slot.is_idle and file.reused > slot.memory.reused(kept, len(given.prompt)):
        yield _choice(slot, 0, file, given)


def _choice(slot: Slot, kept: int, file: _File | None, given: _Inputs) -> Plan:
    """One candidate; `kept` leading tokens of the prompt are in the slot already."""
    in_place = slot.memory.reused(kept, len(given.prompt))
    cached = in_place if file is None else file.reused
    likely = slot.likely_reusable(given.text, given.salt) if given.text else 0
    others = given.streams - (slot.operation is SlotOperation.REQUEST)
    save_s, regret_s = _loss(slot, kept or likely, others, given)
    if kept < min(LEAST_SHARED, len(slot.tokens), len(given.prompt)):
        # An empty slot would have to compute these tokens as well. Without this term, all new conversations
        # go through one slot.
        length, prefill_s = len(given.prompt), given.rates.prefill_s
        regret_s += prefill_s(length) - prefill_s(length - in_place)
    io_s = save_s + (0.0 if file is None else file.seconds)
    cost = Forecast(
        cached_tokens=cached,
        firm=given.rules.is_sure
        if file is not None
        else slot.is_firm(kept, len(given.prompt), given.salt, grows=not slot.is_idle),
        wait_s=_wait_s(slot, given.rates, given.now),
        restore_s=io_s,
        prefill_s=given.rates.prefill_s(max(given.length - (cached or likely), 0)),
        interference_s=io_s * others,
        regret_s=regret_s,
    )
    return Plan(
        slot=slot.id,
        cost=cost,
        restore=None if file is None else file.entry,
        save_first=save_s > 0,
        over_pin=slot.pinned_until > given.now
        and (0 if file is not None else slot.shared(given.prompt, given.salt)) < slot.pinned,
    )


def _loss(slot: Slot, kept: int, others: int, given: _Inputs) -> tuple[float, float]:
    """(seconds to save the slot first, 0 if that does not pay; remaining regret)."""
    saved = slot.saved if given.can_restore else 0
    regret_s = _regret_s(slot, kept, saved, given.rates, given.now)
    if not given.can_save or saved >= slot.length:
        return 0.0, regret_s
    save_s = given.rates.save_s(slot.length)
    after_s = _regret_s(slot, kept, slot.length, given.rates, given.now)
    return (save_s, after_s) if save_s * (1 + others) + after_s < regret_s else (0.0, regret_s)


def _regret_s(slot: Slot, kept: int, saved: int, rates: SlotRates, now: float) -> float:
    """Expected cost of overwriting all but `kept` leading tokens, with `saved` of them in a file. If it comes
    back, the file is restored and the rest computed. What goes on in its own slot loses nothing."""
    if kept and kept == len(slot.tokens):
        return 0.0
    later_s = rates.prefill_s(max(slot.length - max(kept, saved), 0))
    if saved > kept:
        later_s += rates.restore_s(saved)
    if slot.kept_until > now:
        return later_s  # a client that retains content is expected to come back
    if slot.due_until > now:
        return AFTER_TOOL_CALL * later_s
    idle_s = now - slot.since if slot.is_idle else 0.0
    return rates.comes_back(idle_s) * (OUTDATED if slot.is_outdated else 1.0) * later_s


def _wait_s(slot: Slot, rates: SlotRates, now: float) -> float:
    """Expected seconds until the slot is idle. An overdue operation counts as taking a while longer."""
    match slot.operation:
        case None:
            return 0.0
        case SlotOperation.SETTLE:
            usual_s = SETTLE_S
        case SlotOperation.SAVE:
            usual_s = rates.save_s(slot.length)
        case SlotOperation.RESTORE | SlotOperation.ERASE:
            usual_s = rates.restore_s(slot.length)
        case _:
            usual_s = rates.hold_s
    return max(usual_s - (now - slot.since), usual_s * LEAST_REST)


def _rank(candidate: tuple[Slot, Plan]) -> tuple[float, bool, float, int, bool]:
    """Least total first; then an empty slot, the longest idle one, the lower id, no restore."""
    slot, choice = candidate
    return choice.cost.total_s, not slot.is_empty, slot.since, slot.id, choice.restore is not None
