"""What an engine holds of a chain, from its location bits, and how much of it a prompt can reuse."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from sys import intern

import msgspec

from engine_adapter.types import Attention, KvGroup, Tier

# --- how far a prompt can be reused on an engine with several KV cache groups ---------------------------
# A prompt can be reused up to a boundary if each group holds what it needs there (`Attention`). vLLM finds
# the boundary so (vllm/v1/core/kv_cache_coordinator.py): the main group gives the longest prefix; each
# further kind of group shortens it to the next boundary where it hits; again, until none shortens it.
#
# A request leaves windows and states whole at few boundaries, by vLLM's default (`reachable_block_mask` in
# vllm/v1/core/single_type_kv_cache_manager.py): at the end of its prompt, and where it met blocks that
# another kind of group held further than its own window or state. Other groups keep all that is computed.
#
# Lengths are in blocks of the pool here; a group's own blocks have one or more of them.


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Groups that need the same of a prompt. A prompt needs it of all of them."""

    attention: Attention  # what they need
    window: int  # tokens of the window or chunk
    size: int  # their block size, in blocks of the pool
    bits: int  # their location bits
    tokens_per_block: int  # the pool's block size

    @property
    def need(self) -> int:
        """The blocks that a window or a state needs before a boundary."""
        if self.attention is Attention.STATE:
            return 1
        return -(-(self.window - 1) // (self.tokens_per_block * self.size))

    def runs(
        self, masks: Sequence[int], ends: Sequence[int], end: int, pending: int, coming: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Where blocks in a row begin and end that they hold along a chain, the last ones first, in their own
        blocks; see `KvGroups.reach`. Only the first `end` blocks count."""
        if self.attention not in {Attention.WINDOW, Attention.STATE}:
            return self._runs(masks, ends, end, pending)
        runs = self._runs(masks, ends, end, 0)
        lasts = [min(boundary, end) // self.size for boundary in coming]
        return _joined([*runs, *((max(last - self.need, 0), last) for last in lasts)]) if lasts else runs

    def _runs(
        self, masks: Sequence[int], ends: Sequence[int], end: int, pending: int
    ) -> Iterator[tuple[int, int]]:
        size, bits, run_start, run_end = self.size, self.bits, 0, 0
        for at in range(min(bisect_left(ends, end), len(ends) - 1), -1, -1):
            mask = masks[at]
            if mask & bits == bits or mask & pending:
                # A block counts where it ends: only its last block of the pool is marked.
                first, last = (ends[at - 1] if at else 0) // size, min(ends[at], end) // size
                if last > first:
                    if last < run_start:
                        yield run_start, run_end
                        run_end = 0
                    run_start, run_end = first, run_end or last
        if run_end:
            yield run_start, run_end

    def hit(self, runs: Iterator[tuple[int, int]], length: int, alignment: int) -> int:
        """The longest boundary up to `length` at which they hit. `alignment` divides every boundary."""
        most, step = length // self.size, max(alignment // self.size, 1)
        match self.attention:
            case Attention.PREFIX:
                *_, (first, last) = ((0, 0), *runs)
                found = 0 if first else min(last, most)
            case Attention.CHUNK:
                found = self._chunk(runs, most)
            case _:  # a window or a state; unknown kinds have no rule, see `KvGroups.add`
                found = self._before(runs, most, step)
        return found // step * step * self.size

    def _before(self, runs: Iterator[tuple[int, int]], most: int, step: int) -> int:
        """The last boundary that has the blocks they need before it, or all blocks."""
        need = self.need
        for first, last in runs:
            end = min(last, most) // step * step
            if end > first and (end - first >= need or not first):
                return end
        return 0

    def _chunk(self, runs: Iterator[tuple[int, int]], most: int) -> int:
        tokens = self.tokens_per_block * self.size
        start = most * tokens // self.window * self.window // tokens
        for first, last in runs:
            if first <= start < last:
                return min(last, most)
        return start


def _joined(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same runs from the last to the first; those that touch are one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return reversed(joined)


class KvGroups:
    """The further KV cache groups of one engine."""

    def __init__(self, tokens_per_block: int) -> None:
        """`tokens_per_block`: the pool's block size."""
        self._tokens_per_block = tokens_per_block
        self._sizes: dict[KvGroup, int] = {}
        self.bits: dict[int, int] = {}  # the location bit of each
        self.mask = 0  # all these bits
        self.kinds: list[GroupKind] = []  # the groups by what they need
        # What each needs, in the order of their bits. Equal shapes that hold the same reach as far. They are
        # one object.
        self.shape = ""
        self.alignment = 1  # every boundary is a multiple of it, in blocks of the pool
        self.is_known = True  # False if it is not known of each group what it needs
        self.held = 0  # blocks that all of them hold together, in blocks of the pool

    def add(self, group: KvGroup, tokens_per_block: int, bit: int) -> None:
        """A new group, with blocks of so many tokens. Its blocks have this location bit."""
        size, rest = divmod(tokens_per_block, self._tokens_per_block)
        self.bits[group.number] = bit
        self.mask |= bit
        self.shape = intern(self.shape + f"{group.attention} {group.window} {tokens_per_block}, ")
        if rest or not size or group.attention is Attention.UNKNOWN:
            self.is_known = False
            return
        self._sizes[group] = size
        by_need: dict[tuple[Attention, int, int], int] = {}
        for each, blocks in self._sizes.items():
            need = (each.attention, each.window, blocks)
            by_need[need] = by_need.get(need, 0) | self.bits[each.number]
        self.kinds = [GroupKind(*need, bits, self._tokens_per_block) for need, bits in by_need.items()]
        self.alignment = lcm(*self._sizes.values())

    def room(self, blocks: int, main: int) -> int:
        """Blocks of prompts that the engine can store before it evicts. All groups share the engine's
        `blocks`, of which the main group holds `main`. A prompt is assumed to take as much in these groups as
        the prompts that the engine holds."""
        free = max(blocks - main - self.held, 0)
        return free * main // (main + self.held) if main else free // (1 + len(self.bits))

    def evicted(self, blocks: int, main: int, coming: int) -> int:
        """Blocks of prompts that the engine evicts while it computes prompts of `coming` blocks. Until the
        window has left them, these take as many in each group. `blocks` and `main`: see `room`."""
        more = coming * (1 + len(self.bits)) - max(blocks - main - self.held, 0)
        return more * main // (main + self.held) if main and more > 0 else 0

    def count(self, group: KvGroup, blocks: int) -> None:
        """The group holds so many of its blocks more, or less."""
        self.held += blocks * self._sizes.get(group, 1)

    def reach(
        self,
        masks: Sequence[int],
        ends: Sequence[int],
        held: int,
        pending: int = 0,
        coming: Sequence[int] = (),
    ) -> tuple[int, Attention | None]:
        """The boundary up to which a prompt can be reused, in blocks of the pool, and the kind of groups that
        lack what they need beyond it; None if no group does. `masks`: location bits along the prompt's chain,
        by stretches of equal bits; `ends`: where each stretch ends. `held`: leading blocks that the main
        group holds, without those that no prompt of this length can reuse. `pending`: the location bit of
        blocks that requests in flight will leave in the groups that keep all blocks; 0: they do not count.
        `coming`: boundaries at which requests in flight will leave windows and states whole."""
        length = held // self.alignment * self.alignment
        lacks = None
        while length:
            before = length
            for kind in self.kinds:
                found = kind.hit(kind.runs(masks, ends, held, pending, coming), length, self.alignment)
                if found < length:
                    length, lacks = found, kind.attention
            if length == before or len(self.kinds) == 1:
                break
        return length, lacks


@dataclass(slots=True)
class Grouped:
    """An engine with further KV cache groups."""

    groups: KvGroups
    slots: list[int]  # its own slot, and those of its groups' bits


# --- what an engine holds of a chain, from its location bits --------------------------------------------
# An engine has four bits of a block, which are one digit: gpu, host, disk and pending. A column has a digit
# for each stretch of a chain.

# Which of an engine's bits.
PLACES = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 2}
AT_PENDING = 3
PENDING = 1 << AT_PENDING
WIDTH = 4  # bits of an engine: one hexadecimal digit
ALL = 15
PENDING_DIGIT = f"{PENDING:x}"  # digits from here on have the bit
GPU = 1 << PLACES[Tier.GPU]
ON_GPU = GPU | PENDING
BELOW = ALL & ~ON_GPU
# For each digit: the fastest of gpu, host, disk and pending (the lowest bit), and whether the block is or
# will be on the GPU.
_READ = {f"{held:x}": ((held & -held).bit_length() - 1, held & ON_GPU > 0) for held in range(1, ALL + 1)}


class Match(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Number of leading blocks of a chain that one engine holds, by the fastest tier of each block."""

    gpu: int = 0
    host: int = 0
    disk: int = 0
    pending: int = 0
    lead: int = 0  # leading blocks that are on the GPU or will be
    cut: int = 0  # blocks after these that full attention holds, and that cannot be reused
    # The kind of attention whose groups lack what they need to reuse those; None without any.
    lacks: Attention | None = None

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.gpu + self.host + self.disk + self.pending

    @property
    def of_full_attention(self) -> int:
        """Those that full attention holds."""
        return self.blocks + self.cut

    def tokens(self, tokens_per_block: int) -> dict[str, int]:
        """Tokens by tier; `pending` are those that requests in flight will leave on the GPU."""
        return {name: getattr(self, name) * tokens_per_block for name in ("gpu", "host", "disk", "pending")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Match) and self._tiers == other._tiers

    def __hash__(self) -> int:
        return hash(self._tiers)

    @property
    def _tiers(self) -> tuple[int, int, int, int]:
        return self.gpu, self.host, self.disk, self.pending


def match_of(column: str, ends: list[int]) -> Match:
    """An engine's match, from its digit in each stretch and where the stretches end."""
    counts, lead, start = [0, 0, 0, 0], 0, 0
    for digit, end in zip(column, ends, strict=True):
        if digit == "0":
            break
        fastest, on_gpu = _READ[digit]
        counts[fastest] += end - start
        if on_gpu and lead == start:
            lead = end
        start = end
    gpu, host, disk, pending = counts
    return Match(gpu, host, disk, pending, lead)


def in_chunks(column: str, ends: list[int], size: int) -> Match:
    """The match of an engine whose lower tiers give back chunks of `size` blocks or nothing: the blocks that
    lead on the GPU, and behind them whole chunks. As vLLM's offloading connector does, at least `size` blocks
    are taken from there: a chunk that lies on the GPU in part is not worth the way. What is pending behind
    them will be there with all before it."""
    lead = reach = match_of(column, ends).lead
    first = lead // size * size
    for digit, end in zip(column, ends, strict=True):
        if end > first and not int(digit, 16) & BELOW:
            break
        reach = max(reach, end)
    whole = reach // size * size
    held = whole if whole - lead >= size else lead
    for digit, end in zip(column, ends, strict=True):
        if end > held and digit < PENDING_DIGIT:
            break
        held = max(held, end)
    return match_of(column, [min(end, held) for end in ends])


def within_groups(
    own: Grouped, masks: list[int], ends: list[int], column: str, most: int | None, coming: Sequence[int] = ()
) -> Match:
    """The part of a chain that an engine's further groups can reuse, too. `coming`: see `KvGroups.reach`.
    Blocks are pending beyond the boundary that the groups allow now, if requests in flight move it: whatever
    full attention holds there is reused only when they have computed it again."""
    match, groups, pending = match_of(column, ends), own.groups, PENDING << WIDTH * own.slots[0]
    held = match.blocks if most is None else min(match.blocks, most)
    reach, lacks = groups.reach(masks, ends, held, pending, coming)
    sure = groups.reach(masks, ends, reach)[0] if max(column) >= PENDING_DIGIT else reach
    if sure >= held:
        return match
    now = within = match_of(column, [min(end, sure) for end in ends])
    if reach > sure:
        within = match_of(column, [min(end, reach) for end in ends])
    return Match(
        now.gpu, now.host, now.disk, reach - now.blocks + now.pending, within.lead, held - reach, lacks
    )
