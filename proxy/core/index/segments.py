"""Segments of chains: what the index consists of, in dicts that grow in small steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import msgspec

from proxy.core.index.blocks import BlockHash

# --- dicts that grow in small steps ---------------------------------------------------------------------
# A dict moves all its entries when it grows or has had many removals. For 350,000 entries that blocks the
# event loop for 70 ms. Entries spread over many dicts, by the high bits of a key's hash, move a few at a
# time.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_BITS = 8
KEY_SHIFT = 64 - _BITS  # `spread[key >> KEY_SHIFT]` for hashes of 64 bits, which need no more hashing
_HASH_SHIFT = 61 - _BITS  # hashes of integers have 61 bits
_MASK = (1 << _BITS) - 1

Spread = list[dict[K, V]]


def spread(parts: int = 1 << _BITS) -> Spread[K, V]:
    """So many empty dicts."""
    return [{} for _ in range(parts)]


def place(key: Hashable) -> int:
    """The number of the dict that holds the key."""
    return hash(key) >> _HASH_SHIFT & _MASK


# --- segments of chains: what the index consists of -----------------------------------------------------
# A segment is up to SEGMENT_BLOCKS consecutive blocks of one chain, with their location bits as runs of
# equal masks. A hash covers all blocks before its own, so two chains that agree in one block agree in all
# before it. A segment therefore equals a part of a chain if their last blocks do.

# A look-up takes one step per segment. Removing a block from the middle copies a segment.
SEGMENT_BLOCKS = 64
# `ends` of segments with a single mask, shared by all segments of that length.
_WHOLE = tuple((n,) for n in range(SEGMENT_BLOCKS + 1))


class Segment(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks of one chain. Segments form no reference cycles, so the garbage collector skips
    them. A place in a segment is an index into `hashes`."""

    # The blocks from `first` to the last of `ends`. Removed blocks stay at either end, so that nothing is
    # copied when blocks are removed there, as most are.
    hashes: tuple[BlockHash, ...]
    masks: tuple[int, ...]  # the location bits of each run of blocks that have the same
    ends: tuple[int, ...]  # the end of each run
    first: int = 0  # the beginning of the first run


def new(hashes: tuple[BlockHash, ...], mask: int) -> Segment:
    """A segment whose blocks all have the location bits `mask`."""
    return Segment(hashes, (mask,), _WHOLE[len(hashes)])


def extend(segment: Segment, hashes: tuple[BlockHash, ...]) -> None:
    """Adds blocks with the location bits of the last one. There must be room for them."""
    ends, size = segment.ends, segment.ends[-1] + len(hashes)
    segment.hashes = segment.hashes[: ends[-1]] + hashes
    segment.ends = _WHOLE[size] if len(ends) == 1 else (*ends[:-1], size)


def position(segment: Segment, block: BlockHash, rest: int = 1) -> int:
    """The place of the block, which must be in the segment. The fastest to find are the first one and the one
    that begins the last `rest` blocks."""
    mine, first = segment.hashes, segment.first
    if mine[first] == block:
        return first
    likely = segment.ends[-1] - rest
    return likely if likely > first and mine[likely] == block else mine.index(block, first)


def whole(segment: Segment, chain: Sequence[BlockHash], at: int) -> int:
    """Number of blocks of the segment, if all have the same location bits and equal the chain from `at` on;
    else 0."""
    hashes, first, end = segment.hashes, segment.first, segment.ends[-1]
    after = at + end - first
    alike = len(segment.masks) == 1 and after <= len(chain)
    return end - first if alike and hashes[first] == chain[at] and hashes[end - 1] == chain[after - 1] else 0


def common(one: Sequence[BlockHash], start: int, other: Sequence[BlockHash], at: int, blocks: int) -> int:
    """Number of leading blocks in which two chains agree, at most `blocks`: `one` from `start` on and `other`
    from `at` on. The first blocks must be equal."""
    if blocks == 1 or one[start + blocks - 1] == other[at + blocks - 1]:
        return blocks
    same, differs = 0, blocks - 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[start + middle] == other[at + middle]:
            same = middle
        else:
            differs = middle
    return differs


def agreed(segment: Segment, start: int, chain: Sequence[BlockHash], at: int) -> int:
    """Number of leading blocks in which the segment from `start` on and the chain from `at` on agree. The
    first blocks must be equal."""
    return common(segment.hashes, start, chain, at, min(segment.ends[-1] - start, len(chain) - at))


def equal(segment: Segment, start: int, blocks: tuple[BlockHash, ...], at: int) -> int:
    """Like `agreed`, for blocks that need not be a chain."""
    mine = segment.hashes
    most = min(segment.ends[-1] - start, len(blocks) - at)
    if most == 1 or mine[start : start + most] == blocks[at : at + most]:
        return most
    return next(n for n in range(1, most) if mine[start + n] != blocks[at + n])


def runs(segment: Segment, start: int, end: int) -> Sequence[tuple[int, int, int]]:
    """The runs between two places of the segment: location bits, begin, end."""
    masks, at = segment.masks, start
    if len(masks) == 1:
        return ((masks[0], start, end),)
    found: list[tuple[int, int, int]] = []
    for mask, stop in zip(masks, segment.ends):  # noqa: B905 - faster
        if stop >= end:
            found.append((mask, at, end))
            break
        if stop > at:
            found.append((mask, at, stop))
            at = stop
    return found


def change(segment: Segment, start: int, end: int, on: int = 0, off: int = 0) -> None:
    """Sets the location bits `on` and clears the bits `off` of the blocks between two places."""
    if start == segment.first and end == segment.ends[0] and len(segment.masks) == 1:
        segment.masks = ((segment.masks[0] | on) & ~off,)
        return
    at = segment.first
    masks: list[int] = []
    ends: list[int] = []
    for mask, stop in zip(segment.masks, segment.ends, strict=True):
        for upto, bits in ((min(stop, start), mask), (min(stop, end), (mask | on) & ~off), (stop, mask)):
            if upto <= at:
                continue
            if masks and masks[-1] == bits:
                ends[-1] = upto
            else:
                masks.append(bits)
                ends.append(upto)
            at = upto
    segment.masks = tuple(masks)
    segment.ends = tuple(ends) if len(ends) > 1 else _WHOLE[at]


def keep(segment: Segment, start: int, end: int) -> None:
    """Removes all blocks from the segment but those between two places."""
    segment.first = start
    if len(segment.masks) == 1:
        segment.ends = _WHOLE[end]
    else:
        masks, _, ends = zip(*runs(segment, start, end), strict=True)
        segment.masks = masks
        segment.ends = ends if len(ends) > 1 else _WHOLE[end]


def split(segment: Segment, at: int) -> Segment:
    """Copies the blocks from a place on into a new segment. The segment itself does not change."""
    parts = runs(segment, at, segment.ends[-1])
    masks = tuple([mask for mask, _, _ in parts])
    ends = tuple([end - at for _, _, end in parts])
    return Segment(segment.hashes[at : segment.ends[-1]], masks, ends if len(ends) > 1 else _WHOLE[ends[0]])
