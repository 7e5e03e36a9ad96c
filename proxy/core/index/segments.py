"""Stretches of chains that engines hold together: what the index is made of.

A segment is up to SEGMENT_BLOCKS consecutive blocks of one chain, with where they lie as runs of equal masks.
Since a hash covers all blocks before its own, two chains that agree in one block agree in all before it: a
segment is compared with a chain by its last block, whatever lies between.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from proxy.core.index.blocks import BlockHash

# A look-up takes as many steps as a chain has segments; a block that goes from the middle copies one.
SEGMENT_BLOCKS = 64
# Of segments that lie in the same places throughout: shared by all of that length.
_WHOLE = tuple((n,) for n in range(SEGMENT_BLOCKS + 1))


class Segment(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks of one chain. No part of reference cycles, so the garbage collector leaves it alone.

    A place in a segment is one in `hashes`.

    Attributes:
        hashes: the blocks, and beyond `first` and the last end those that were there: nothing is copied when
            blocks go from either end, which is where they do.
        masks: the location bits of each run of blocks that have the same.
        ends: where each run ends.
        first: where the first one begins.
    """

    hashes: tuple[BlockHash, ...]
    masks: tuple[int, ...]
    ends: tuple[int, ...]
    first: int = 0


def new(hashes: tuple[BlockHash, ...], mask: int) -> Segment:
    """A segment whose blocks all have the location bits `mask`."""
    return Segment(hashes, (mask,), _WHOLE[len(hashes)])


def extend(segment: Segment, hashes: tuple[BlockHash, ...]) -> None:
    """More blocks, that lie where the last one does. There must be room for them."""
    ends, size = segment.ends, segment.ends[-1] + len(hashes)
    segment.hashes = (*segment.hashes[: ends[-1]], *hashes)
    segment.ends = _WHOLE[size] if len(ends) == 1 else (*ends[:-1], size)


def position(segment: Segment, block: BlockHash) -> int:
    """The place of the block. It must be there."""
    mine, first, last = segment.hashes, segment.first, segment.ends[-1] - 1
    if mine[first] == block:
        return first
    return last if mine[last] == block else mine.index(block, first)


def agreed(segment: Segment, start: int, chain: Sequence[BlockHash], at: int) -> int:
    """How many blocks of the chain from `at` on are those of the segment from `start` on, one at least."""
    mine = segment.hashes
    blocks = min(segment.ends[-1] - start, len(chain) - at)
    if mine[start + blocks - 1] == chain[at + blocks - 1]:
        return blocks
    same, other = 0, blocks - 1
    while other - same > 1:
        middle = (same + other) // 2
        if mine[start + middle] == chain[at + middle]:
            same = middle
        else:
            other = middle
    return other


def equal(segment: Segment, start: int, blocks: tuple[BlockHash, ...], at: int) -> int:
    """As `agreed`, of blocks that need not be a chain."""
    mine = segment.hashes
    most = min(segment.ends[-1] - start, len(blocks) - at)
    if most == 1 or mine[start : start + most] == blocks[at : at + most]:
        return most
    return next(n for n in range(1, most) if mine[start + n] != blocks[at + n])


def runs(segment: Segment, start: int, end: int) -> Sequence[tuple[int, int, int]]:
    """The runs between two places of the segment: location bits, from where, to where."""
    masks, ends = segment.masks, segment.ends
    if len(masks) == 1:
        return ((masks[0], start, end),)
    first, last = bisect_right(ends, start), bisect_left(ends, end)
    inner = ends[first:last]
    return tuple(zip(masks[first : last + 1], (start, *inner), (*inner, end), strict=True))


def change(segment: Segment, start: int, end: int, on: int = 0, off: int = 0) -> None:
    """Sets the location bits `on` and clears `off` of the blocks between two places."""
    masks, ends, at = list[int](), list[int](), segment.first
    if start == at and end == segment.ends[0] and len(segment.masks) == 1:
        segment.masks = ((segment.masks[0] | on) & ~off,)
        return
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
    """Leaves the segment the blocks between two places alone, which stay what they are."""
    segment.first = start
    if len(segment.masks) == 1:
        segment.ends = _WHOLE[end]
    else:
        masks, _, ends = zip(*runs(segment, start, end), strict=True)
        segment.masks = masks
        segment.ends = ends if len(ends) > 1 else _WHOLE[end]


def split(segment: Segment, at: int) -> Segment:
    """The blocks from a place on, as another segment. The segment itself stays as it is."""
    parts = runs(segment, at, segment.ends[-1])
    masks = tuple([mask for mask, _, _ in parts])
    ends = tuple([end - at for _, _, end in parts])
    return Segment(segment.hashes[at : segment.ends[-1]], masks, ends if len(ends) > 1 else _WHOLE[ends[0]])
