"""How many tokens of a slot a server reuses, where its memory cannot be cut at any token.

A sliding window forgets what lies behind it, and a recurrent state cannot go back. Such a server copies this
part of its memory now and then: a context checkpoint. A prompt that leaves the slot's content early resumes
at a checkpoint, or is computed from its beginning.

    SlotMemory.reused     how many tokens of a prompt the server reuses
    SlotMemory.after      the memory of the slot once a prompt was computed there: which checkpoints it has
    MemoryRules.restored  the memory after a restore: a file holds the last state alone, and no checkpoint

With `--swa-full`, windows keep all tokens, but a file still holds the last window alone. After a restore,
such a server reuses a beginning of the file although the window before it is gone, and answers wrongly:
`SlotMemory.is_sound`.

The server keeps one checkpoint too many. A prompt that shares `n` tokens with the slot's content leaves the
checkpoints of up to `n + 1` tokens, and the last token of that one is another one now. If it is a copy of
nothing before its last token, the server goes on behind it, and answers wrongly: `Checkpoint.is_stale`.

A memory that can be cut anywhere may also be moved, where its owner allows that: `reusable`.

Source: tools/server/server-context.cpp of llama.cpp 0c1e570, and runs of it. Nothing shows checkpoints but
their effect on `timings.cache_n`. Positions count from 0. For a memory that can be cut anywhere, the
same rules give the common prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from engine_adapter.types import TokenIds, common_prefix

# The server computes the last tokens of a prompt on their own, so that a checkpoint lies before them.
_LAST = 4
_PAD = 256  # the cells of a sliding window are a multiple of this


class Checkpoint(NamedTuple):
    """A copy of the memory of a slot's first `tokens` tokens. It holds them from position `oldest` on.
    `is_stale`: the last of them is not the content's, and the server does not compute it again."""

    tokens: int
    oldest: int
    is_stale: bool = False

    @property
    def newest(self) -> int:
        """Position of its last token."""
        return self.tokens - 1

    def beyond(self, shared: int) -> Checkpoint:
        """What it is once a prompt is computed that shares so many tokens with the content."""
        return self._replace(is_stale=True) if self.tokens > shared and self.oldest == self.newest else self


class MemoryKind(msgspec.Struct, frozen=True):
    """What a probe finds out of the memory of a server."""

    is_recurrent: bool
    has_window: bool
    has_checkpoints: bool
    has_window_in_files: bool


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """The kind of a server's memory, and its flags. By default, the memory can be cut at any token."""

    slot_ctx: int = 0  # context of a slot, in tokens
    # Tokens that a layer with a sliding window sees; 0 without such layers, or with `--swa-full`.
    window: int = 0
    # Some layers have a recurrent state: Mamba, linear attention, short convolutions.
    is_recurrent: bool = False
    # Files hold only the last window, and the server does not notice: `--swa-full`.
    loses_window: bool = False
    most: int = 32  # `--ctx-checkpoints`, the most checkpoints of a slot
    spacing: int = 8192  # `--checkpoint-min-step`
    batch: int = 2048  # `--batch-size`
    ubatch: int = 512  # `--ubatch-size`
    chunk: int = 0  # the server moves runs of at least so many tokens, see `reusable`; 0 if it moves none
    is_sure: bool = True  # False if the server does not do as these rules say, or if a figure is a guess

    @property
    def is_plain(self) -> bool:
        """True if the memory can be cut at any token."""
        return not self.window and not self.is_recurrent

    @property
    def cells(self) -> int:
        """Tokens that the sliding windows hold: the window, and room to compute further ones."""
        return -(-min(self.slot_ctx, self.window + self.ubatch) // _PAD) * _PAD

    @property
    def can_restore(self) -> bool:
        """False if whatever is restored is computed again: the file holds just the window, and the server
        wants one token more."""
        return not self.window

    @property
    def cuts_files(self) -> bool:
        """True if any beginning of a restored file is reused. If not, a file is of use as a whole or not at
        all: a longer one does not stand for a shorter one."""
        return self.is_plain and not self.loses_window

    def restored(self, length: int) -> SlotMemory:
        """The memory of a slot after a file of `length` tokens was restored into it."""
        floor, exact = length if self.loses_window else 0, 0 if self.chunk else math.inf
        return SlotMemory(self, length, self.oldest_of(length), floor=floor, exact=exact)

    def oldest_of(self, length: int) -> int:
        """Position of the oldest token that a copy of the memory has, made at `length` tokens."""
        return max(length - self.window, 0) if self.window else 0

    def lost(self, length: int) -> SlotMemory:
        """The memory of a slot with `length` tokens whose checkpoints are not known."""
        return replace(self.restored(length), is_known=self.is_plain or not length)


PLAIN = MemoryRules()
# Of a server that is not probed yet: no answer of it may be wrong.
UNPROBED = MemoryRules(loses_window=True)


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """The memory of one slot."""

    rules: MemoryRules = PLAIN
    length: int = 0  # tokens of its content
    oldest: int = 0  # position of the oldest token that the sliding windows hold
    floor: int = 0  # if less than this is reused, it must be nothing
    # Its checkpoints, in the order in which they were made.
    checkpoints: tuple[Checkpoint, ...] = field(default=(), repr=False)
    is_known: bool = True  # False if it may have other checkpoints
    # It may have one of one token, of another prompt: computing a prompt whole leaves that.
    may_keep_first: bool = False
    # Leading tokens whose KV is sure to have been computed where it lies, after nothing that was moved;
    # infinite if all of it was.
    exact: float = math.inf

    def reused(self, shared: int, new: int) -> int:
        """Tokens that the server reuses of a prompt of `new` tokens, whose first `shared` lie in the slot."""
        reused = max(min(self._resume(shared, new)[0], new - 1), 0)
        return reused if reused >= self.floor and self.is_sound(shared, new) else 0

    def is_sound(self, shared: int, new: int, *, more: bool = False) -> bool:
        """False if the server would reuse KV that is not whole, or not of this prompt: it must be told to
        reuse nothing. `more`: the prompt may share further tokens, which kvpin does not know. `new` is 0 for
        a prompt that it does not know: the server may reuse any part of the slot."""
        if min(shared, max(new - 1, 0)) < self.floor:
            return False
        if self.rules.is_plain:
            return True
        if more or not new:
            known = shared if new else 0
            stale = [each for each in self.checkpoints if each.is_stale and each.tokens > known]
            if stale or not self.is_known or (self.may_keep_first and not known):
                return False
        if not shared or not new or self._has_all(shared, new):
            return True
        resumed = self._fitting(shared, new)
        if resumed is None:
            return self.is_known and not self.may_keep_first
        return not resumed.is_stale

    def is_firm(self, shared: int, new: int) -> bool:
        """True if `reused` is exact; it is too low if not."""
        rules = self.rules
        goes_on = rules.is_recurrent and not rules.window and shared == self.length < new
        return rules.is_sure and (rules.is_plain or self.is_known or goes_on or not shared)

    def used_by(self, shared: int, *, moves: bool) -> SlotMemory:
        """The memory for a prompt of which `shared` tokens lie there. `moves`: others may be moved there."""
        is_exact = not moves and shared <= self.exact
        return replace(self, exact=math.inf if is_exact else min(self.exact, shared))

    def after(
        self, shared: int, new: int, user_starts: Sequence[int] = (), *, told: int | None = None
    ) -> SlotMemory:
        """The memory once that prompt was computed. `user_starts`: where its user messages begin. `told`: how
        many tokens the server says it reused, if it has said so."""
        rules = self.rules
        if rules.is_plain:
            is_whole = not self.reused(shared, new)
            return replace(self, length=new, floor=0 if is_whole else self.floor, is_known=True)
        is_right = told is None or told == self.reused(shared, new)
        way = self._resume(shared, new) if is_right else self._way_of(told, shared)
        if way is None:
            return rules.lost(new)
        resumed, position, oldest = way
        at = max(min(resumed, new - 1), 0)
        old = [each.beyond(shared) for each in self.checkpoints if each.newest <= position]
        is_known = self.is_known or not shared or told == 0
        made: list[Checkpoint] = []
        while at < new:
            last = next(reversed(made or old), None)
            end = _batch_end(rules, at, new, user_starts, last)
            is_near = new < end + rules.ubatch
            is_far = last is None or at > last.tokens + rules.spacing
            is_last_user = bool(user_starts) and at == user_starts[-1]
            if rules.most and at and (is_near or (at in user_starts and (is_far or is_last_user))):
                _make_room(rules, old, made, at)
                made.append(Checkpoint(at, max(at - 1 if rules.is_recurrent else 0, oldest)))
            at, oldest = end, self._oldest(oldest, end)
        keeps_first = (self.may_keep_first or not position) and all(each.tokens > 1 for each in made)
        return SlotMemory(rules, new, oldest, 0, (*old, *made), is_known, keeps_first)

    def grown(self, length: int) -> SlotMemory:
        """The memory once the slot holds `length` tokens: an answer was added, or nothing."""
        if length < self.length:
            return self.rules.lost(length)
        return replace(self, length=length, oldest=self._oldest(self.oldest, length))

    def _oldest(self, oldest: int, length: int) -> int:
        return max(oldest, length - self.rules.cells) if self.rules.window else 0

    def _resume(self, shared: int, new: int) -> tuple[int, int, int]:
        """(tokens reused, position up to which checkpoints stay, the oldest token of the windows then)."""
        if not shared:
            return 0, 0, 0
        if self._has_all(shared, new):
            return shared, shared, self.oldest
        each = self._fitting(shared, new)
        return (0, 0, 0) if each is None else self._resume_at(each, shared)

    def _needed(self, shared: int, new: int) -> int:
        """The window before the first new token must be there, and one token more: up to this position."""
        return max(shared - self.rules.window - (shared == new), 0)

    def _has_all(self, shared: int, new: int) -> bool:
        """True if the server goes on behind the tokens that a prompt shares, without a checkpoint."""
        oldest = self.length - 1 if self.rules.is_recurrent else self.oldest
        return oldest < self._needed(shared, new)

    def _fitting(self, shared: int, new: int) -> Checkpoint | None:
        """The checkpoint at which the server goes on."""
        needed = self._needed(shared, new)
        for each in reversed(self.checkpoints):
            if each.newest <= shared and (each.oldest < needed or not each.oldest):
                return each
        return None

    def _resume_at(self, each: Checkpoint, shared: int) -> tuple[int, int, int]:
        position = min(shared, max(each.oldest + 1, each.newest))
        return min(position, each.tokens), position, self.rules.oldest_of(each.tokens)

    def _way_of(self, told: int | None, shared: int) -> tuple[int, int, int] | None:
        """As `_resume`, for a server that reused `told` tokens; None if it is not clear how."""
        ways = [self._resume_at(each, shared) for each in reversed(self.checkpoints)]
        ways += [(0, 0, 0), (shared, shared, self.oldest)]
        return next((way for way in ways if way[0] == told), None)


def _batch_end(
    rules: MemoryRules, at: int, new: int, user_starts: Sequence[int], last: Checkpoint | None
) -> int:
    """The end of the batch that begins at `at`: a place for a checkpoint, or the limit of a batch."""
    ends = [new, at + rules.batch]
    if rules.most:
        ends += [new - min(rules.batch, tail) for tail in (_LAST + rules.ubatch, _LAST)]
        for start in user_starts:
            if start == user_starts[-1] or last is None or start > last.tokens + rules.spacing:
                ends.append(start)
    return min(end for end in ends if end > at)


def _make_room(rules: MemoryRules, old: list[Checkpoint], made: list[Checkpoint], at: int) -> None:
    """Drops what the server drops before it makes a checkpoint at `at`. `made` are of the same request."""
    index, previous = 0, -1
    while index < len(old) and len(old) + len(made) + 1 >= rules.most:
        if previous >= 0 and old[index].tokens <= previous + rules.spacing:
            del old[index]
        else:
            previous = old[index].tokens
            index += 1
    while len(old) + len(made) >= rules.most:
        del (old or made)[0]
    for several in (old, made):
        several[:] = [each for each in several if each.tokens != at]


def reusable(content: TokenIds[int], prompt: TokenIds[int], chunk: int) -> int:
    """Leading tokens of `prompt` whose KV a server takes from the `content` of a slot.

    That is the common beginning. With a `chunk` above 0 (`--cache-reuse`), it is also the runs of at least so
    many tokens that go on with the prompt and stand further back in the slot: the server moves their KV
    forward, over what is not in the prompt. A token that is new ends this.
    """
    at = found = common_prefix(content, prompt)
    run = prompt[at : at + chunk].tobytes()
    if not chunk or at + chunk > len(prompt) or run not in content.tobytes():
        return at
    try:
        held, wanted = _as_text(content), _as_text(prompt)
    except (OverflowError, UnicodeDecodeError):  # no model has tokens of such ids
        return at
    while at + chunk <= len(wanted) and (found := held.find(wanted[at : at + chunk], found)) >= 0:
        moved = common_prefix(held[found:], wanted[at:])
        at, found = at + moved, found + moved
    return at


def _as_text(tokens: TokenIds[int]) -> str:
    """The tokens as characters behind the surrogates, because a text can be searched for a part."""
    ids, added = tokens.tobytes(), b"\0\0\1\0" * len(tokens)
    characters = int.from_bytes(ids, "little") + int.from_bytes(added, "little")
    return characters.to_bytes(len(ids), "little").decode("utf-32-le")


def user_starts(tokens: TokenIds[int], mark: Sequence[int]) -> tuple[int, ...]:
    """The positions in a prompt where `mark` stands, the tokens that begin a user message."""
    found, wanted, at = [], list(mark), 0
    with suppress(ValueError):  # its first token comes no more
        while wanted:
            at = tokens.index(wanted[0], at)
            if tokens[at : at + len(wanted)].tolist() == wanted:
                found.append(at)
            at += 1
    return tuple(found)
