"""The prefix index: which engine holds which block, on which tier.

Each block has an int of location bits, four per engine: gpu, host, disk and pending. An engine with several
KV cache groups (`match.py`) has a bit for each further group, too. `locations.py` stores them. A look-up
reads how far equal bits reach along the chain. Then it reads what they mean, once for all engines that hold
the same part of it.

Pending blocks are those that a request in flight will store. They count as held, so that a burst of one new
prefix gathers on one engine. They end with the request; by then events or usage have confirmed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from engine_adapter.types import KvGroup, Tier
from proxy.core.index.blocks import BlockHash
from proxy.core.index.expected import InFlight
from proxy.core.index.locations import Locations
from proxy.core.index.match import (
    ALL,
    AT_PENDING,
    GPU,
    ON_GPU,
    PENDING,
    PENDING_DIGIT,
    PLACES,
    WIDTH,
    Grouped,
    KvGroups,
    Match,
    in_chunks,
    match_of,
    within_groups,
)

_STORED = ALL - PENDING
# For each digit: which of the four counts it adds to. A block that is on the GPU is not pending there.
_COUNTED = [[held >> place & 1 for place in range(3)] + [held & ON_GPU == PENDING] for held in range(ALL + 1)]
# For each digit and the bits that are cleared of it: which counts change, and by how much.
_CHANGES = [
    [
        tuple(
            (at, now - then)
            for at, (then, now) in enumerate(zip(_COUNTED[held], _COUNTED[held & ~bits], strict=True))
            if now != then
        )
        for bits in range(ALL + 1)
    ]
    for held in range(ALL + 1)
]


Alike = tuple[int, int, tuple[str, ...], tuple[int, ...]]
"""Location bits of engines, those of their groups, the engines and their slots: `PrefixIndex._holders`."""
_MAX_ALIKE = 256


class PrefixIndex:
    """Index of the blocks that each engine of a pool holds, as far as known. Not thread-safe: one event loop
    owns it."""

    def __init__(self) -> None:
        self._locations = Locations()
        self._shifts: dict[str, int] = {}
        self._slots: list[str] = []  # the engine of each four bits, "" for none
        self._free: list[int] = []  # slots whose bits no block has
        self._each = 0  # the lowest bit of each engine
        self._flights: dict[str, InFlight] = {}
        self._counts: dict[str, list[int]] = {}  # see `counts`
        self._alone: dict[str, int] = {}  # as `_shifts`, of engines without further groups
        # The engines with further KV cache groups.
        self.grouped: dict[str, Grouped] = {}  # the other engines
        self._grouped_bits = self._group_bits = 0  # all location bits of those, and of their groups
        self._alike: dict[int, Alike] = {}  # see `_holders`
        self._chunks: dict[str, int] = {}  # see `set_chunk`
        # What `_reach` found last: of which chain, and in which version of the locations.
        self._reached: tuple[Sequence[BlockHash], int, list[int], list[int]] = (), -1, [], []

    def __len__(self) -> int:
        """Blocks of all engines, and blocks of wiped engines that are not tidied yet."""
        return len(self._locations)

    def add_engine(self, engine: str) -> None:
        """Gives the engine its location bits. Adding it twice is fine."""
        if engine in self._shifts:
            return
        slot = self._slot()
        self._slots[slot] = engine
        self._shifts[engine] = self._alone[engine] = shift = WIDTH * slot
        self._each |= 1 << shift
        self._flights[engine] = InFlight()
        self._counts[engine] = [0, 0, 0, 0]

    def _slot(self) -> int:
        """Takes a slot whose bits no block has."""
        if not self._free:
            self._free.append(len(self._slots))
            self._slots.append("")
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def add_group(self, engine: str, group: KvGroup, tokens_per_block: int, pool: int) -> KvGroups:
        """Gives a further KV cache group of the engine its location bit, unless it has one. Returns all of
        the engine's. `tokens_per_block` is the group's block size, `pool` the pool's."""
        own = self.grouped.get(engine)
        if own is None:
            shift = self._alone.pop(engine)
            own = self.grouped[engine] = Grouped(KvGroups(pool), [shift // WIDTH])
            self._grouped_bits |= ALL << shift
        groups, slots = own.groups, own.slots
        if group.number in groups.bits:
            return groups
        self._alike.clear()
        at = len(groups.bits)
        if not at % WIDTH:
            slots.append(self._slot())
            self._group_bits |= ALL << WIDTH * slots[-1]
        groups.add(group, tokens_per_block, 1 << WIDTH * slots[-1] + at % WIDTH)
        return groups

    def set_chunk(self, engine: str, blocks: int) -> None:
        """Lower tiers of the engine give back this many blocks together; see `in_chunks`."""
        self._chunks[engine] = blocks

    def groups_of(self, engine: str) -> KvGroups | None:
        """The further KV cache groups of the engine; None if none is known."""
        own = self.grouped.get(engine)
        return None if own is None else own.groups

    def store_group(self, engine: str, group: KvGroup, hashes: tuple[BlockHash, ...]) -> None:
        """The group now holds these blocks, of one chain and in its order."""
        groups = self.grouped[engine].groups
        groups.count(group, self._locations.mark(groups.bits[group.number], hashes)[0])

    def remove_group(self, engine: str, group: KvGroup, hashes: tuple[BlockHash, ...]) -> None:
        """The group no longer holds these blocks."""
        groups = self.grouped[engine].groups
        groups.count(group, -self._locations.clear(groups.bits[group.number], hashes, 0).get(0, 0))

    def in_groups(self, engine: str, block: BlockHash) -> bool:
        """True if a further group of the engine holds the block."""
        groups = self.groups_of(engine)
        return groups is not None and bool(self._locations.get(block) & groups.mask)

    def remove_engine(self, engine: str) -> None:
        """Forgets the engine and everything it held. Its bits are reused once no block has them."""
        if engine not in self._shifts:
            return
        shift = self._shifts.pop(engine)
        self._slots[shift // WIDTH] = ""
        self._each ^= 1 << shift
        held = self._counts.pop(engine)
        self._chunks.pop(engine, None)
        del self._flights[engine]
        if any(held):
            self._locations.retire(ALL << shift)
            self._tidy()
        else:
            self._free.append(shift // WIDTH)
        own = self.grouped.pop(engine, None)
        if own is None:
            del self._alone[engine]
            return
        self._alike.clear()
        self._grouped_bits ^= ALL << shift
        for slot in own.slots[1:]:
            self._group_bits ^= ALL << WIDTH * slot
            self._locations.retire(ALL << WIDTH * slot)

    def _tidy(self) -> None:
        """Clears a few bits of engines that are gone."""
        gone = self._locations.tidy()
        if gone:
            self._free += [slot for slot in range(len(self._slots)) if gone >> WIDTH * slot & 1]

    def store(
        self, engine: str, tier: Tier, hashes: Iterable[BlockHash], after: BlockHash | None = None
    ) -> None:
        """These consecutive blocks of one chain now lie on `tier` of the engine. `after` is the block before
        them, if known."""
        self._store(engine, tier, tuple(hashes), after)
        if self._locations.retired:
            self._tidy()

    def _store(
        self, engine: str, tier: Tier, hashes: tuple[BlockHash, ...], after: BlockHash | None, off: int = 0
    ) -> None:
        """Sets the engine's bit for the tier, and clears `off`, which must not change any count."""
        at, shift, counts = PLACES[tier], self._shifts[engine], self._counts[engine]
        beside = PENDING << shift if tier is Tier.GPU else 0
        bit = 1 << shift + at
        added, awaited = self._locations.mark(bit, hashes, after, beside=beside, off=off << shift)
        counts[at] += added
        counts[AT_PENDING] -= awaited

    def remove(self, engine: str, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        """These blocks left `tier` of the engine. They need not be one chain, and may be unknown; consecutive
        blocks of one chain are removed faster."""
        self._clear(engine, 1 << PLACES[tier], tuple(hashes))
        if self._locations.retired:
            self._tidy()

    def drop(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """Removes blocks that kvpin flushed: no tier holds them, and none is pending."""
        hashes = tuple(hashes)
        self._clear(engine, ALL, hashes)
        awaited = self._flights[engine].awaited
        for block in awaited and hashes:
            awaited.pop(block, None)

    def holds(self, engine: str, block: BlockHash) -> bool:
        """True if any tier of the engine holds the block; pending blocks do not count."""
        return bool(self._locations.get(block) >> self._shifts[engine] & _STORED)

    def is_on_gpu(self, engine: str, block: BlockHash) -> bool:
        """True if the block lies on the engine's GPU; pending blocks do not count."""
        return bool(self._locations.get(block) >> self._shifts[engine] & GPU)

    def held(self, engine: str, tier: Tier) -> int:
        """Blocks that lie on `tier` of the engine."""
        return self._counts[engine][PLACES[tier]]

    def counts(self, engine: str) -> tuple[int, int, int, int]:
        """Blocks on its GPU, host tier and disk, and those that requests in flight will leave on its GPU."""
        gpu, host, disk, pending = self._counts[engine]
        return gpu, host, disk, pending

    def wipe(self, engine: str) -> None:
        """Forgets what the engine held."""
        if engine in self._shifts:
            self.remove_engine(engine)
            self.add_engine(engine)

    def add_pending(self, engine: str, hashes: Iterable[BlockHash], reusable: int | None = None) -> None:
        """A request placed on the engine will leave this chain there, of which the same prompt can reuse
        `reusable` blocks; None for all. Its blocks are pending from the first that it has to compute: that no
        tier of the engine holds, or that a further group cannot reuse."""
        chain, shift, flight = tuple(hashes), self._shifts[engine], self._flights[engine]
        if chain:
            start = self._stored(chain, shift)
            boundaries: tuple[BlockHash, ...] = ()
            if engine in self._chunks:
                match = self.match(chain).get(engine)
                start = min(start, match.blocks) if match is not None else 0
            if engine in self.grouped:
                start, boundaries = self._left_in_groups(engine, chain, start, reusable)
            flight.begin(chain[-1], start, boundaries)
            bits = PENDING << shift, GPU << shift
            added, there = self._locations.mark(bits[0], chain[start:], None, flight.awaited, beside=bits[1])
            self._counts[engine][AT_PENDING] += added - there

    def end_pending(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """That request has ended. Of several for the same chain, the one that added the fewest blocks ends
        first. A request that a wipe ended is unknown, which is fine."""
        chain, flight = tuple(hashes), self._flights[engine]
        start = flight.end(chain[-1]) if chain else None
        if start is not None:
            self._clear(engine, PENDING, flight.last_of(chain[start:]))

    def served(self, engine: str, hashes: tuple[BlockHash, ...]) -> None:
        """A request for this chain has ended and left it on the GPU: `store` and `end_pending` in one."""
        flight = self._flights[engine]
        start = flight.end(hashes[-1]) if hashes else None
        if start is None:
            self.store(engine, Tier.GPU, hashes)
            return
        self.store(engine, Tier.GPU, hashes[:start])
        pending = hashes[start:]
        last = flight.last_of(pending)
        if len(last) == len(pending):
            self._store(engine, Tier.GPU, pending, None, off=PENDING)
        else:
            self._store(engine, Tier.GPU, pending, None)
            self._clear(engine, PENDING, last)

    def _stored(self, chain: Sequence[BlockHash], shift: int) -> int:
        """Leading blocks of the chain that a tier of the engine holds."""
        stored = 0
        for mask, end in zip(*self._reach(chain), strict=True):
            if not mask >> shift & _STORED:
                break
            stored = end
        return stored

    def _left_in_groups(
        self, engine: str, chain: tuple[BlockHash, ...], stored: int, reusable: int | None
    ) -> tuple[int, tuple[BlockHash, ...]]:
        """How many of the `stored` leading blocks the engine's further groups can reuse, and the boundaries
        at which a request for the chain leaves windows and states whole: see `match.py`."""
        groups, shift = self.grouped[engine].groups, self._shifts[engine]
        stretches = [*self._locations.stretches(chain)]
        masks, ends = [mask for mask, _ in stretches], [*accumulate(blocks for _, blocks in stretches)]
        reused, lacks = groups.reach(masks, ends, stored)
        end = len(chain) if reusable is None else min(reusable, len(chain))
        held = 0
        for mask, stop in zip(masks, ends, strict=True):
            if not mask >> shift & ALL:
                break
            held = min(stop, end)
        reach, coming = reused, self._flights[engine].coming(chain)
        if coming or held != stored:
            reach, lacks = groups.reach(masks, ends, held, PENDING << shift, coming)
        boundaries = {end, held} if lacks is not None and reach < held else {end}
        aligned = {each // groups.alignment * groups.alignment for each in boundaries}
        return reused, tuple([chain[each - 1] for each in aligned if each])

    def _clear(self, engine: str, bits: int, hashes: tuple[BlockHash, ...]) -> None:
        """Clears some of the engine's four bits of blocks."""
        shift, counts = self._shifts[engine], self._counts[engine]
        for mask, blocks in self._locations.clear(bits << shift, hashes, ALL << shift).items():
            for at, change in _CHANGES[mask >> shift][bits]:
                counts[at] += change * blocks

    def match(self, hashes: Sequence[BlockHash], most: int | None = None) -> dict[str, Match]:
        """The match of a chain on each engine that holds its first block. No prompt can reuse more than
        `most` of its blocks."""
        masks, ends = self._reach(hashes)
        if not masks:
            return {}
        # Of each slot a digit a stretch. A column is what a slot has of the chain, from stretch to stretch.
        width = len(self._slots)
        digits = "".join([f"{mask:0{width}x}"[::-1] for mask in masks])
        matches: dict[str, Match] = {}  # engines that hold the same of a prompt share one
        found: dict[str, Match] = {}
        for engine, shift in self._alone.items():
            column = digits[shift // WIDTH :: width]
            if column[0] != "0":
                match = matches.get(column)
                if match is None:
                    match = matches[column] = match_of(column, ends)
                found[engine] = match
        for engine, size in self._chunks.items():
            if engine in found:
                match = in_chunks(digits[self._shifts[engine] // WIDTH :: width], ends, size)
                found[engine] = match
                if not match.blocks:
                    del found[engine]
        if self.grouped:
            found |= self._match_grouped(digits, masks, ends, hashes, most)
        return found

    def _match_grouped(
        self, digits: str, masks: list[int], ends: list[int], hashes: Sequence[BlockHash], most: int | None
    ) -> dict[str, Match]:
        """The matches of engines with further groups. `digits`: see `match`."""
        found, others = self._match_alike(digits, masks, ends, most)
        width = len(self._slots)
        within: dict[tuple[str, ...], Match] = {}
        for engine in others:
            own = self.grouped[engine]
            columns = [digits[slot::width] for slot in own.slots]
            column = columns[0]
            if max(column) >= PENDING_DIGIT:  # what is in flight differs from engine to engine
                coming = self._flights[engine].coming(hashes)
                found[engine] = within_groups(own, masks, ends, column, most, coming)
                continue
            key = (own.groups.shape, *columns)
            match = within.get(key)
            if match is None:
                match = within[key] = within_groups(own, masks, ends, column, most)
            found[engine] = match
        return found

    def _match_alike(
        self, digits: str, masks: list[int], ends: list[int], most: int | None
    ) -> tuple[dict[str, Match], Sequence[str]]:
        """The matches of engines that hold the first stretches alike, and no more; and the engines left over.
        Most engines hold a system prompt, and nothing else of a prompt."""
        bits, groups, engines, slots = self._holders(masks[0])
        same = 0
        if groups:
            all_bits = bits * ALL | groups
            for mask in masks:
                here = mask & all_bits
                if here not in (bits, bits | groups):
                    break
                same += 1
        if not same:
            return {}, engines
        own = self.grouped[engines[0]]
        match = within_groups(own, masks[:same], ends[:same], "1" * same, most)
        found = dict.fromkeys(engines, match)
        if same == len(masks):
            return found, ()
        width = len(self._slots)
        row = digits[width * same : width * (same + 1)]
        return found, [each for each, slot in zip(engines, slots, strict=True) if row[slot] != "0"]

    def _holders(self, mask: int) -> Alike:
        """The engines with further groups that hold a block, by its location bits. Those bits and the bits of
        their groups, if all of them hold it on the GPU alone and have groups that need the same; else 0."""
        held = mask & self._grouped_bits
        alike = self._alike.get(held)
        if alike is None:
            engines = tuple([each for each in self.grouped if held >> self._shifts[each] & ALL])
            shapes = {self.grouped[each].groups.shape for each in engines}
            is_alike = len(shapes) == 1 and held & ~self._each == 0
            groups = sum(self.grouped[each].groups.mask for each in engines) if is_alike else 0
            if len(self._alike) == _MAX_ALIKE:
                self._alike.clear()
            slots = tuple([self._shifts[each] // WIDTH for each in engines])
            alike = self._alike[held] = held, groups, engines, slots
        return alike

    def _reach(self, chain: Sequence[BlockHash]) -> tuple[list[int], list[int]]:
        """Location bits of the engines that hold all blocks so far, and where each stretch of equal bits
        ends; up to the first block that none of them holds."""
        reached, version, masks, ends = self._reached
        if reached is chain and version == self._locations.version:  # of the prompt that was just placed
            return masks, ends
        at, masks, ends = 0, [], []
        last, alive, groups = -1, self._each * ALL, self._group_bits
        for mask, blocks in self._locations.stretches(chain):
            at += blocks
            here = mask & (alive | groups)
            if here == last:
                ends[-1] = at
                continue
            alive = ((here | here >> 1 | here >> 2 | here >> 3) & self._each) * ALL
            if not alive:
                break
            last = here
            masks.append(here)
            ends.append(at)
        self._reached = chain, self._locations.version, masks, ends
        return masks, ends
