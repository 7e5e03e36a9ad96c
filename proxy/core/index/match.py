"""What an engine holds of a chain, from its location bits.

An engine has four bits of a block, which are one digit: gpu, host, disk and pending. A column has a digit for
each stretch of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine_adapter.types import Attention, Tier
from proxy.core.index.groups import Grouped

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
    """Number of leading blocks of a chain that one engine holds, by the fastest tier of each block.

    Attributes:
        lead: leading blocks that are on the GPU or will be.
        cut: blocks after these that full attention holds, and that cannot be reused.
        lacks: the kind of attention whose groups lack what they need to reuse those; None without any.
    """

    gpu: int = 0
    host: int = 0
    disk: int = 0
    pending: int = 0
    lead: int = 0
    cut: int = 0
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
    own: Grouped,
    masks: list[int],
    ends: list[int],
    column: str,
    most: int | None,
    coming: Sequence[int] = (),
) -> Match:
    """The part of a chain that an engine's further groups can reuse, too. `coming`: see `KvGroups.reach`.

    Blocks are pending beyond the boundary that the groups allow now, if requests in flight move it: whatever
    full attention holds there is reused only when they have computed it again.
    """
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
