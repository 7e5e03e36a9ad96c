"""Location bits for each block, stored by segments of chains.

Dicts map a block hash to its segment. A chain runs through segments of 64 blocks, so a prompt is read or
written in a few steps for every 64 blocks, however many locations there are. Blocks that lie nowhere are
dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from proxy.core.index import segments
from proxy.core.index.blocks import BlockHash
from proxy.core.index.segments import SEGMENT_BLOCKS, Segment, Spread, spread

# A block's dict, by its remainder: Python keeps numbers up to 256 ready, and a shift takes longer.
# Of a million blocks, each dict has 4,000.
_PARTS = 251
_SETS = 256  # segments are in sets by their address, whose last four bits are 0
# A step looks at one segment and takes a third of a microsecond; clearing one takes as long as this many
# steps. A slice of work takes half a millisecond.
_STEPS_TO_CLEAR = 60
SLICE_STEPS = 1500


class Locations:
    """Location bits of blocks. Not thread-safe."""

    def __init__(self) -> None:
        self._parts: Spread[BlockHash, Segment] = spread(_PARTS)
        self._segments: list[set[Segment]] = [set() for _ in range(_SETS)]
        self.retired = 0  # bits that no longer mean anything, and that some blocks may still have
        self.version = 0  # a number that changes with the locations
        self._leaving = 0  # retired bits that the current pass clears
        self._pass: Iterator[None] = iter(())

    def __len__(self) -> int:
        """Blocks that have a location."""
        return sum(map(len, self._parts))

    def get(self, block: BlockHash) -> int:
        """The block's location bits."""
        segment = self._parts[block % _PARTS].get(block)
        if segment is None:
            return 0
        if len(segment.masks) == 1:
            return segment.masks[0]
        at = segments.position(segment, block)
        return segments.runs(segment, at, at + 1)[0][0]

    def stretches(self, chain: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """Yields location bits along a chain, and how many blocks in a row have them; up to the first block
        that lies nowhere."""
        parts, at, end = self._parts, 0, len(chain)
        while at < end:
            block = chain[at]
            segment = parts[block % _PARTS].get(block)
            if segment is None:
                return
            masks, hashes, first, stop = segment.masks, segment.hashes, segment.first, segment.ends[-1]
            after = at + stop - first
            # Most segments are a part of the chain as they are, and all their blocks lie at the same places.
            # This is `segments.whole`: a look-up is faster without the call.
            if (
                len(masks) == 1
                and after <= end
                and hashes[first] == block
                and hashes[stop - 1] == chain[after - 1]
            ):
                yield masks[0], stop - first
                at = after
                continue
            start = segments.position(segment, block)
            blocks = segments.agreed(segment, start, chain, at)
            for mask, begin, until in segments.runs(segment, start, start + blocks):
                yield mask, until - begin
            at += blocks

    def mark(
        self,
        bit: int,
        chain: tuple[BlockHash, ...],
        after: BlockHash | None = None,
        again: Counter[BlockHash] | None = None,
        beside: int = 0,
        off: int = 0,
    ) -> tuple[int, int]:
        """Sets a location bit of consecutive blocks of one chain, and clears the bits `off`, which do not
        include that. `after`: the block before them, if known. `again` counts the blocks that had the bit
        before. Returns how many had not had it, and how many of those have the bit `beside`."""
        self.version += 1
        parts, added, both, at = self._parts, 0, 0, 0
        while at < len(chain):
            block = chain[at]
            segment = parts[block % _PARTS].get(block)
            if segment is None:
                blocks = self._insert(chain, at, bit, chain[at - 1] if at else after)
                added += blocks
            elif (blocks := segments.whole(segment, chain, at)) and not segment.masks[0] & bit:
                both += blocks if segment.masks[0] & beside else 0
                added += blocks
                segment.masks = ((segment.masks[0] | bit) & ~off,)
            else:
                start = segments.position(segment, block)
                blocks = segments.agreed(segment, start, chain, at)
                had = 0
                for mask, begin, end in segments.runs(segment, start, start + blocks):
                    if mask & bit:
                        had += end - begin
                        if again is not None:
                            again.update(segment.hashes[begin:end])
                    elif mask & beside:
                        both += end - begin
                if had < blocks or off:
                    segments.change(segment, start, start + blocks, on=bit, off=off)
                    added += blocks - had
            at += blocks
        return added, both

    def clear(self, bits: int, blocks: tuple[BlockHash, ...], of: int) -> dict[int, int]:
        """Clears location bits of blocks; these need not be one chain, but consecutive blocks of one are
        faster. Returns how many lost any bit, by the bits in `of` that they had before."""
        self.version += 1
        parts, at = self._parts, 0
        lost: dict[int, int] = {}
        while at < len(blocks):
            block = blocks[at]
            segment = parts[block % _PARTS].get(block)
            if segment is None:
                at += 1
                continue
            # Engines evict a chain from its end, so the blocks are mostly the end of their segment.
            start = segments.position(segment, block, len(blocks) - at)
            same = segments.equal(segment, start, blocks, at)
            for mask, n in self._take(segment, start, start + same, bits):
                lost[mask & of] = lost.get(mask & of, 0) + n
            at += same
        return lost

    def retire(self, bits: int) -> None:
        """Declares location bits meaningless; `tidy` clears them. Do not mark them before `tidy` has returned
        them."""
        self.retired |= bits
        self.version += 1

    def tidy(self) -> int:
        """Clears retired bits of some blocks, for half a millisecond. Returns the bits that no block has
        now."""
        if not self._leaving:
            if not self.retired:
                return 0
            self._leaving = self.retired
            self._pass = self._sweep(self._leaving)
        for _ in self._pass:
            return 0
        gone, self._leaving = self._leaving, 0
        self.retired &= ~gone
        return gone

    def _sweep(self, bits: int) -> Iterator[None]:
        """Clears location bits of every block, slice by slice. A segment that is split meanwhile loses them
        at once, as its new part may be in a set that the pass has done."""
        steps = 0
        for each in self._segments:
            for segment in list(each):
                steps += 1
                if segment in each and any(mask & bits for mask in segment.masks):
                    self._take(segment, segment.first, segment.ends[-1], bits)
                    steps += _STEPS_TO_CLEAR
                if steps >= SLICE_STEPS:
                    steps = 0
                    yield

    def _insert(self, chain: tuple[BlockHash, ...], at: int, mask: int, after: BlockHash | None) -> int:
        """Puts unknown blocks of the chain, from `at` on, into one segment; returns how many."""
        parts, segment = self._parts, None if after is None else self._open(after, mask)
        if segment is None:
            segment = segments.new((), mask)
            self._set_of(segment).add(segment)
        room = SEGMENT_BLOCKS - segment.ends[-1]
        fresh = chain if not at and len(chain) <= room else chain[at : at + room]
        for block in fresh:
            if parts[block % _PARTS].setdefault(block, segment) is not segment:
                fresh = fresh[: fresh.index(block)]
                break
        segments.extend(segment, fresh)
        return len(fresh)

    def _open(self, after: BlockHash, mask: int) -> Segment | None:
        """The segment that ends in the block `after`, if it has room and its end has the location bits
        `mask`."""
        segment = self._parts[after % _PARTS].get(after)
        if segment is None or segment.masks[-1] != mask:
            return None
        end = segment.ends[-1]
        return segment if end < SEGMENT_BLOCKS and segment.hashes[end - 1] == after else None

    def _take(self, segment: Segment, start: int, end: int, bits: int) -> list[tuple[int, int]]:
        """Clears location bits of blocks of a segment; blocks that then lie nowhere leave it. Returns the old
        bits of those that lost any, and how many had them."""
        lost: list[tuple[int, int]] = []
        # From the end: places before a removed block stay the same.
        for mask, begin, stop in segments.runs(segment, start, end)[::-1]:
            gone = mask & bits
            if gone:
                lost.append((mask, stop - begin))
                if gone == mask:
                    self._remove(segment, begin, stop)
                else:
                    segments.change(segment, begin, stop, off=bits)
        return lost

    def _remove(self, segment: Segment, start: int, end: int) -> None:
        """Takes blocks out of the segment and the index. Blocks behind them move to a new segment."""
        parts, first, last = self._parts, segment.first, segment.ends[-1]
        for block in segment.hashes[start:end]:
            del parts[block % _PARTS][block]
        if start > first:
            if end < last:
                self._move(segments.split(segment, end))
            segments.keep(segment, first, start)
        elif end < last:
            segments.keep(segment, end, last)
        else:
            self._set_of(segment).remove(segment)

    def _move(self, segment: Segment) -> None:
        """Points the segment's blocks to it."""
        self._set_of(segment).add(segment)
        for block in segment.hashes:
            self._parts[block % _PARTS][block] = segment
        if self._leaving:
            self._take(segment, segment.first, segment.ends[-1], self._leaving)

    def _set_of(self, segment: Segment) -> set[Segment]:
        return self._segments[id(segment) // 16 % _SETS]
