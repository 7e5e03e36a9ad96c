"""Chooses where a request runs: the slot, what is restored into it, and whether its content is saved first.

    every slot  ×  use it as it is | restore the best saved prefix   →   the least total of expected seconds

A total counts three costs. The request waits for the slot, save and restore, and prefill. The streams of
other slots stand still during save and restore. And overwritten content may have to be computed again later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine_adapter.llama_server.slots import Operation, Slot
from engine_adapter.types import Tier, TokenIds, common_prefix

LEAST_GAIN = 16  # least shared tokens for a restore: all chats share their first tokens
# Fewer shared tokens than this are no reason to overwrite a conversation: a template and its default system
# prompt are as long.
LEAST_SHARED = 64
SETTLE_S = 0.005  # time to find out what an answer left
LEAST_REST = 0.25  # an overdue operation is expected to take this share of its usual time longer


class SavedView(Protocol):
    """The properties of a saved prefix that a plan needs."""

    @property
    def name(self) -> str:
        """Name of its file."""

    @property
    def tokens(self) -> TokenIds[int]:
        """The tokens whose KV it holds."""

    @property
    def salt(self) -> str | None:
        """Cache salt of the content."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    @property
    def tier(self) -> Tier:
        """HOST or DISK."""


Entry = TypeVar("Entry", bound=SavedView)


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of this server; every rate is above 0.

    Attributes:
        prefill_tok_s: prompt tokens computed per second.
        save_bytes_s: bytes per second from a slot to the host tier.
        restore_bytes_s: bytes per second from the host tier to a slot.
        disk_bytes_s: bytes per second from the disk tier to the host tier.
        bytes_per_token: bytes of a saved file per token.
        hold_s: usual seconds that a request holds a slot.
        reuse_probability: prior that a conversation goes on right after an answer.
        half_life_s: idle seconds that halve this probability.
        save_overhead_s: seconds of a save that do not depend on its bytes.
        restore_overhead_s: the same for a restore.
    """

    prefill_tok_s: float
    save_bytes_s: float
    restore_bytes_s: float
    disk_bytes_s: float
    bytes_per_token: float
    hold_s: float
    reuse_probability: float = 0.5
    half_life_s: float = 1800.0
    save_overhead_s: float = 0.002
    restore_overhead_s: float = 0.002

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens."""
        return tokens / self.prefill_tok_s

    def save_s(self, tokens: int) -> float:
        """Seconds to save a slot of `tokens` tokens."""
        return self.save_overhead_s + tokens * self.bytes_per_token / self.save_bytes_s

    def restore_s(self, tokens: int) -> float:
        """Seconds to restore a file of `tokens` tokens that lies in the host tier."""
        return self.restore_overhead_s + tokens * self.bytes_per_token / self.restore_bytes_s

    def file_s(self, entry: SavedView) -> float:
        """Seconds to restore this file from its tier."""
        seconds = self.restore_overhead_s + entry.size / self.restore_bytes_s
        return seconds + entry.size / self.disk_bytes_s if entry.tier is Tier.DISK else seconds


@dataclass(frozen=True, slots=True)
class Plan(Generic[Entry]):
    """Where a request runs, and its expected costs in seconds.

    Attributes:
        slot: the slot.
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them the server will report as cached.
        firm: False if unknown tokens of the slot may make it more.
        restore: the saved prefix to restore into the slot first, None to use the slot as it is.
        save_first: whether to save the slot's content before anything else.
        is_ready: whether the slot is idle; if not, the request waits for it.
        over_pin: the slot's pin yields, because every slot has a pin in the way.
        wait_s: wait until the slot is idle.
        restore_s: restore, and the save before it.
        prefill_s: prefill of the tokens that are not cached.
        stall_s: total delay of the streams of other slots during save and restore.
        regret_s: expected later cost of the overwritten content.
    """

    slot: int
    prompt_tokens: int
    cached_tokens: int
    firm: bool
    restore: Entry | None
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

    @property
    def why(self) -> str:
        """The choice in one sentence, for people."""
        share = f"{'' if self.firm else 'at least '}{self.cached_tokens} of {self.prompt_tokens} tokens"
        if self.restore is not None:
            sentence = f"slot {self.slot} gets {share} from {self.restore.tier} file {self.restore.name!r}"
        elif self.cached_tokens:
            sentence = f"slot {self.slot} holds {share}"
        else:
            sentence = f"slot {self.slot} is the cheapest for a full prefill of {self.prompt_tokens} tokens"
        if self.save_first:
            sentence += ", its content is saved first"
        if not self.is_ready:
            sentence += f", free in about {self.wait_s:.2g} s"
        return sentence + (", its pin ends first and every slot is pinned" if self.over_pin else "")


@dataclass(frozen=True, slots=True)
class _Ask:
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


@dataclass(frozen=True, slots=True)
class _File(Generic[Entry]):
    """A saved prefix, the tokens it would spare, and the seconds its restore takes."""

    entry: Entry
    reused: int
    seconds: float


def plan(
    prompt: TokenIds[int],
    salt: str | None,
    slots: Iterable[Slot],
    saved: Iterable[Entry],
    rates: Rates,
    now: float,
    *,
    can_save: bool,
    can_restore: bool,
) -> Plan[Entry] | None:
    """The cheapest way to run `prompt` under `salt`; None only when there are no slots.

    `saved` are files of this server's key; of two with the same cost the first is chosen. Without
    `can_restore` no file counts, and nothing is saved. A pin holds, unless every slot has a pin in the way.
    """
    table = tuple(slots)
    streams = sum(slot.operation is Operation.REQUEST for slot in table)
    ask = _Ask(prompt, salt, rates, now, streams, can_save and can_restore, can_restore)
    file = _best_file(ask, saved) if can_restore and any(slot.is_idle for slot in table) else None
    candidates = [(slot, choice) for slot in table for choice in _choices(slot, file, ask)]
    allowed = [candidate for candidate in candidates if not candidate[1].over_pin]
    if allowed:
        return min(allowed, key=_rank)[1]
    if candidates:
        return min(candidates, key=lambda each: (each[0].pinned_until, *_rank(each)))[1]
    return None


def worth_saving(slot: Slot, rates: Rates, now: float, streams: int, *, idle_s: float) -> bool:
    """Whether to write an idle slot back: a file is expected to spare more than the save costs.

    The cost of the save counts once for the slot and once for each of `streams` running streams. A slot is
    never worth saving before it has been idle for `idle_s` seconds.
    """
    if not slot.is_idle or not slot.dirty or now - slot.since < idle_s:
        return False
    spared = _regret_s(slot, 0, slot.saved, rates, now) - _regret_s(slot, 0, slot.length, rates, now)
    return spared > rates.save_s(slot.length) * (1 + streams)


def density(tokens: int, size: int, age_s: float, uses: int, half_life_s: float) -> float:
    """Value per byte of a saved file of `size` bytes (above 0). The file with the least is evicted first.

    The tokens it spares, times its uses plus one, halved for every `half_life_s` since the last use.
    """
    return tokens / size * (1 + uses) * _recency(age_s, half_life_s)


def _recency(age_s: float, half_life_s: float) -> float:
    """1 right after a use, halved every half-life. A use in the future counts as now."""
    return float(0.5 ** (max(age_s, 0.0) / half_life_s))


def _best_file(ask: _Ask, saved: Iterable[Entry]) -> _File[Entry] | None:
    """The saved prefix whose restore into any idle slot costs least; None if none beats a full prefill.

    The loss in the slot does not depend on the file, so one file is the best for all slots. A file is
    compared with the prompt at most once, and only if one token shows that it may beat the best so far.
    """
    best: _File[Entry] | None = None
    least = ask.rates.prefill_s(len(ask.prompt))
    for entry in saved:
        seconds = ask.rates.file_s(entry)
        cost = seconds * (1 + ask.streams)
        # A file that spares no more tokens than this loses.
        needed = max(len(ask.prompt) - (least - cost) * ask.rates.prefill_tok_s, LEAST_GAIN - 1)
        if entry.salt != ask.salt or min(len(entry.tokens), ask.most) <= needed:
            continue
        probe = int(needed)
        if entry.tokens[probe] != ask.prompt[probe]:
            continue
        reused = min(common_prefix(entry.tokens, ask.prompt), ask.most)
        if reused > needed:
            best = _File(entry, reused, seconds)
            least = cost + ask.rates.prefill_s(len(ask.prompt) - reused)
    return best


def _choices(slot: Slot, file: _File[Entry] | None, ask: _Ask) -> Iterable[Plan[Entry]]:
    """The candidates of one slot: use it as it is, or restore `file` if the slot is idle and gains by it."""
    kept = slot.shared(ask.prompt, ask.salt)
    yield _choice(slot, kept, None, ask)
    if file is not None and slot.is_idle and file.reused > kept:
        yield _choice(slot, 0, file, ask)


def _choice(slot: Slot, kept: int, file: _File[Entry] | None, ask: _Ask) -> Plan[Entry]:
    """One candidate; `kept` leading tokens of the slot's content stay in place."""
    cached = min(kept, ask.most) if file is None else file.reused
    others = ask.streams - (slot.operation is Operation.REQUEST)
    save_s, regret_s = _loss(slot, kept, others, ask)
    if kept < min(LEAST_SHARED, len(slot.tokens), len(ask.prompt)):
        # An empty slot would have to compute these tokens as well. Without this term, all new conversations
        # go through one slot.
        regret_s += ask.rates.prefill_s(min(kept, ask.most))
    io_s = save_s + (0.0 if file is None else file.seconds)
    return Plan(
        slot=slot.id,
        prompt_tokens=len(ask.prompt),
        cached_tokens=cached,
        firm=file is not None or not _may_hold_more(slot, kept, ask),
        restore=None if file is None else file.entry,
        save_first=save_s > 0,
        is_ready=slot.is_idle,
        over_pin=slot.pinned_until > ask.now and kept < slot.pinned,
        wait_s=_wait_s(slot, ask.rates, ask.now),
        restore_s=io_s,
        prefill_s=ask.rates.prefill_s(len(ask.prompt) - cached),
        stall_s=io_s * others,
        regret_s=regret_s,
    )


def _may_hold_more(slot: Slot, kept: int, ask: _Ask) -> bool:
    """Whether unknown tokens, of the content or of a running answer, may be reused too."""
    grows = slot.unknown > 0 or not slot.is_idle
    return grows and slot.salt == ask.salt and kept == len(slot.tokens) and kept < ask.most


def _loss(slot: Slot, kept: int, others: int, ask: _Ask) -> tuple[float, float]:
    """(seconds to save the slot first, 0 if that does not pay; remaining regret)."""
    saved = slot.saved if ask.can_restore else 0
    regret_s = _regret_s(slot, kept, saved, ask.rates, ask.now)
    if not ask.can_save or saved >= slot.length:
        return 0.0, regret_s
    save_s = ask.rates.save_s(slot.length)
    after_s = _regret_s(slot, kept, slot.length, ask.rates, ask.now)
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
    return rates.reuse_probability * _recency(idle_s, rates.half_life_s) * later_s


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


def _rank(candidate: tuple[Slot, Plan[Entry]]) -> tuple[float, bool, float, int, bool]:
    """Least total first; then an empty slot, the longest idle one, the lower id, no restore."""
    slot, choice = candidate
    return choice.total_s, not slot.is_empty, slot.since, slot.id, choice.restore is not None
