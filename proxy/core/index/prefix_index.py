"""The prefix index: which engine holds which block, on which tier.

Each block has an int of location bits, four per engine: gpu, host, disk and pending. An engine with several
KV cache groups (`groups.py`) has a bit for each further group, too. `locations.py` stores them. A look-up
reads how far equal bits reach along the chain. Then it reads what they mean, once for all engines that hold
the same part of it.

Pending blocks are those that a request in flight will store. They count as held, so that a burst of one new
prefix gathers on one engine. They end with the request; by then events or usage have confirmed them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.core.index.blocks import BlockHash
from proxy.core.index.groups import KvGroups
from proxy.core.index.locations import Locations

# Which of an engine's bits.
_PLACES = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 2}
_AT_PENDING = 3
_PENDING = 1 << _AT_PENDING
_WIDTH = 4  # bits of an engine: one hexadecimal digit
_ALL = 15
_STORED = _ALL - _PENDING
_PENDING_DIGIT = f"{_PENDING:x}"  # digits from here on have the bit
_GPU = 1 << _PLACES[Tier.GPU]
_ON_GPU = _GPU | _PENDING
# For each digit: the fastest of gpu, host, disk and pending (the lowest bit), and whether the block is or
# will be on the GPU.
_READ = {f"{held:x}": ((held & -held).bit_length() - 1, held & _ON_GPU > 0) for held in range(1, _ALL + 1)}
# For each digit: which of the four counts it adds to. A block that is on the GPU is not pending there.
_COUNTED = [
    [held >> place & 1 for place in range(3)] + [held & _ON_GPU == _PENDING] for held in range(_ALL + 1)
]
# For each digit and the bits that are cleared of it: which counts change, and by how much.
_CHANGES = [
    [
        tuple(
            (at, now - then)
            for at, (then, now) in enumerate(zip(_COUNTED[held], _COUNTED[held & ~bits], strict=True))
            if now != then
        )
        for bits in range(_ALL + 1)
    ]
    for held in range(_ALL + 1)
]


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


Alike = tuple[int, int, tuple[str, ...]]
"""Location bits of engines, those of their groups, and the engines: see `PrefixIndex._holders`."""
_MAX_ALIKE = 256


@dataclass(frozen=True, slots=True)
class InFlight:
    """Pending blocks of one engine: what requests in flight are about to leave there.

    Attributes:
        starts: last block of a chain → for each request for it, the place where its pending blocks begin, and
            its boundaries.
        awaited: block → requests that will leave it, without the first; the location bit stands for that one.
        boundaries: block → requests that will leave windows and states whole up to its end.
    """

    starts: dict[BlockHash, list[tuple[int, tuple[BlockHash, ...]]]] = field(default_factory=dict)
    awaited: Counter[BlockHash] = field(default_factory=Counter)
    boundaries: Counter[BlockHash] = field(default_factory=Counter)

    def begin(self, last: BlockHash, start: int, boundaries: tuple[BlockHash, ...] = ()) -> None:
        """A request for the chain that ends in `last` has pending blocks from `start` on, and leaves windows
        and states whole at these boundaries."""
        self.starts.setdefault(last, []).append((start, boundaries))
        self.boundaries.update(boundaries)

    def end(self, last: BlockHash) -> int | None:
        """One of those requests has ended; of several, the one with the fewest pending blocks. Returns where
        they began; None if there is no such request."""
        starts = self.starts.get(last)
        if not starts:
            return None
        ended = start, boundaries = max(starts)
        starts.remove(ended)
        if not starts:
            del self.starts[last]
        for block in boundaries:
            self.boundaries[block] -= 1
            if not self.boundaries[block]:
                del self.boundaries[block]
        return start

    def coming(self, chain: Sequence[BlockHash]) -> list[int]:
        """The boundaries that lie on a chain, in blocks."""
        if not self.boundaries:
            return []
        return [chain.index(block) + 1 for block in self.boundaries.keys() & chain]

    def last_of(self, blocks: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Counts each block down by one request. Returns the blocks that no other request will leave."""
        awaited = self.awaited
        if awaited.keys().isdisjoint(blocks):
            return blocks
        last = []
        for block in blocks:
            others = awaited.get(block, 0)
            if others > 1:
                awaited[block] = others - 1
            elif others:
                del awaited[block]
            else:
                last.append(block)
        return tuple(last)


@dataclass(slots=True)
class Grouped:
    """An engine with further KV cache groups.

    Attributes:
        slots: its own slot, and those of its groups' bits.
    """

    groups: KvGroups
    slots: list[int]


class PrefixIndex:
    """Index of the blocks that each engine of a pool holds, as far as known.

    Not thread-safe: one event loop owns it.
    """

    def __init__(self) -> None:
        self._locations = Locations()
        self._shifts: dict[str, int] = {}
        self._slots: list[str] = []  # the engine of each four bits, "" for none
        self._free: list[int] = []  # slots whose bits no block has
        self._each = 0  # the lowest bit of each engine
        self._flights: dict[str, InFlight] = {}
        self._counts: dict[str, list[int]] = {}  # see `counts`
        self._alone: dict[str, int] = {}  # as `_shifts`, of engines without further groups
        self._grouped: dict[str, Grouped] = {}  # the other engines
        self._grouped_bits = self._group_bits = 0  # all location bits of those, and of their groups
        self._alike: dict[int, Alike] = {}  # see `_holders`

    def __len__(self) -> int:
        """Blocks of all engines, and blocks of wiped engines that are not tidied yet."""
        return len(self._locations)

    def add_engine(self, engine: str) -> None:
        """Gives the engine its location bits. Adding it twice is fine."""
        if engine in self._shifts:
            return
        slot = self._slot()
        self._slots[slot] = engine
        self._shifts[engine] = self._alone[engine] = shift = _WIDTH * slot
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
        the engine's.

        Args:
            engine: has the group.
            group: the group.
            tokens_per_block: the group's block size.
            pool: the pool's block size.
        """
        own = self._grouped.get(engine)
        if own is None:
            shift = self._alone.pop(engine)
            own = self._grouped[engine] = Grouped(KvGroups(pool), [shift // _WIDTH])
            self._grouped_bits |= _ALL << shift
        groups, slots = own.groups, own.slots
        if group.number in groups.bits:
            return groups
        self._alike.clear()
        at = len(groups.bits)
        if not at % _WIDTH:
            slots.append(self._slot())
            self._group_bits |= _ALL << _WIDTH * slots[-1]
        groups.add(group, tokens_per_block, 1 << _WIDTH * slots[-1] + at % _WIDTH)
        return groups

    def groups_of(self, engine: str) -> KvGroups | None:
        """The further KV cache groups of the engine; None if none is known."""
        own = self._grouped.get(engine)
        return None if own is None else own.groups

    def store_group(self, engine: str, group: KvGroup, hashes: tuple[BlockHash, ...]) -> None:
        """The group now holds these blocks, of one chain and in its order."""
        groups = self._grouped[engine].groups
        groups.count(group, self._locations.mark(groups.bits[group.number], hashes)[0])

    def remove_group(self, engine: str, group: KvGroup, hashes: tuple[BlockHash, ...]) -> None:
        """The group no longer holds these blocks."""
        groups = self._grouped[engine].groups
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
        self._slots[shift // _WIDTH] = ""
        self._each ^= 1 << shift
        held = self._counts.pop(engine)
        del self._flights[engine]
        if any(held):
            self._locations.retire(_ALL << shift)
            self._tidy()
        else:
            self._free.append(shift // _WIDTH)
        own = self._grouped.pop(engine, None)
        if own is None:
            del self._alone[engine]
            return
        self._alike.clear()
        self._grouped_bits ^= _ALL << shift
        for slot in own.slots[1:]:
            self._group_bits ^= _ALL << _WIDTH * slot
            self._locations.retire(_ALL << _WIDTH * slot)

    def _tidy(self) -> None:
        """Clears a few bits of engines that are gone."""
        gone = self._locations.tidy()
        if gone:
            self._free += [slot for slot in range(len(self._slots)) if gone >> _WIDTH * slot & 1]

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
        at, shift, counts = _PLACES[tier], self._shifts[engine], self._counts[engine]
        beside = _PENDING << shift if tier is Tier.GPU else 0
        bit = 1 << shift + at
        added, awaited = self._locations.mark(bit, hashes, after, beside=beside, off=off << shift)
        counts[at] += added
        counts[_AT_PENDING] -= awaited

    def remove(self, engine: str, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        """These blocks left `tier` of the engine. They need not be one chain, and may be unknown; consecutive
        blocks of one chain are removed faster."""
        self._clear(engine, 1 << _PLACES[tier], tuple(hashes))
        if self._locations.retired:
            self._tidy()

    def drop(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """Removes blocks that kvpin flushed: no tier holds them, and none is pending."""
        hashes = tuple(hashes)
        self._clear(engine, _ALL, hashes)
        awaited = self._flights[engine].awaited
        for block in awaited and hashes:
            awaited.pop(block, None)

    def holds(self, engine: str, block: BlockHash) -> bool:
        """True if any tier of the engine holds the block; pending blocks do not count."""
        return bool(self._locations.get(block) >> self._shifts[engine] & _STORED)

    def is_on_gpu(self, engine: str, block: BlockHash) -> bool:
        """True if the block lies on the engine's GPU; pending blocks do not count."""
        return bool(self._locations.get(block) >> self._shifts[engine] & _GPU)

    def held(self, engine: str, tier: Tier) -> int:
        """Blocks that lie on `tier` of the engine."""
        return self._counts[engine][_PLACES[tier]]

    def pending(self, engine: str) -> int:
        """Blocks that requests in flight will leave on the engine and its GPU does not hold yet."""
        return self._counts[engine][_AT_PENDING]

    def counts(self, engine: str) -> tuple[int, int, int, int]:
        """Blocks on its GPU, host tier and disk, and pending blocks."""
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
            start, boundaries = self._stored(chain, shift), tuple[BlockHash, ...]()
            if engine in self._grouped:
                start, boundaries = self._left_in_groups(engine, chain, start, reusable)
            flight.begin(chain[-1], start, boundaries)
            bits = _PENDING << shift, _GPU << shift
            added, there = self._locations.mark(bits[0], chain[start:], None, flight.awaited, beside=bits[1])
            self._counts[engine][_AT_PENDING] += added - there

    def end_pending(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """That request has ended. Of several for the same chain, the one that added the fewest blocks ends
        first. A request that a wipe ended is unknown, which is fine."""
        chain, flight = tuple(hashes), self._flights[engine]
        start = flight.end(chain[-1]) if chain else None
        if start is not None:
            self._clear(engine, _PENDING, flight.last_of(chain[start:]))

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
            self._store(engine, Tier.GPU, pending, None, off=_PENDING)
        else:
            self._store(engine, Tier.GPU, pending, None)
            self._clear(engine, _PENDING, last)

    def _stored(self, chain: Sequence[BlockHash], shift: int) -> int:
        """Leading blocks of the chain that a tier of the engine holds."""
        stored = 0
        for mask, blocks in self._locations.stretches(chain):
            if not mask >> shift & _STORED:
                break
            stored += blocks
        return stored

    def _left_in_groups(
        self, engine: str, chain: tuple[BlockHash, ...], stored: int, reusable: int | None
    ) -> tuple[int, tuple[BlockHash, ...]]:
        """How many of the `stored` leading blocks the engine's further groups can reuse, and the boundaries
        at which a request for the chain leaves windows and states whole: see `groups.py`."""
        groups, shift = self._grouped[engine].groups, self._shifts[engine]
        stretches = [*self._locations.stretches(chain)]
        masks, ends = [mask for mask, _ in stretches], [*accumulate(blocks for _, blocks in stretches)]
        reused, lacks = groups.reach(masks, ends, stored)
        end = len(chain) if reusable is None else min(reusable, len(chain))
        held = 0
        for mask, stop in zip(masks, ends, strict=True):
            if not mask >> shift & _ALL:
                break
            held = min(stop, end)
        reach, coming = reused, self._flights[engine].coming(chain)
        if coming or held != stored:
            reach, lacks = groups.reach(masks, ends, held, _PENDING << shift, coming)
        boundaries = {end, held} if lacks is not None and reach < held else {end}
        aligned = {each // groups.alignment * groups.alignment for each in boundaries}
        return reused, tuple([chain[each - 1] for each in aligned if each])

    def _clear(self, engine: str, bits: int, hashes: tuple[BlockHash, ...]) -> None:
        """Clears some of the engine's four bits of blocks."""
        shift, counts = self._shifts[engine], self._counts[engine]
        for mask, blocks in self._locations.clear(bits << shift, hashes, _ALL << shift).items():
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
            column = digits[shift // _WIDTH :: width]
            if column[0] != "0":
                match = matches.get(column)
                if match is None:
                    match = matches[column] = _match_of(column, ends)
                found[engine] = match
        if self._grouped:
            found |= self._match_grouped(digits, masks, ends, hashes, most)
        return found

    def _match_grouped(
        self, digits: str, masks: list[int], ends: list[int], hashes: Sequence[BlockHash], most: int | None
    ) -> dict[str, Match]:
        """The matches of engines with further groups. `digits`: see `match`."""
        found, others = self._match_alike(digits, masks, ends, most)
        width, within = len(self._slots), dict[tuple[str, ...], Match]()
        for engine in others:
            own = self._grouped[engine]
            columns = [digits[slot::width] for slot in own.slots]
            column = columns[0]
            if max(column) >= _PENDING_DIGIT:  # what is in flight differs from engine to engine
                coming = self._flights[engine].coming(hashes)
                found[engine] = _within_groups(own, masks, ends, column, most, coming)
                continue
            key = (own.groups.shape, *columns)
            match = within.get(key)
            if match is None:
                match = within[key] = _within_groups(own, masks, ends, column, most)
            found[engine] = match
        return found

    def _match_alike(
        self, digits: str, masks: list[int], ends: list[int], most: int | None
    ) -> tuple[dict[str, Match], Sequence[str]]:
        """The matches of engines that hold the first stretches alike, and no more; and the engines left over.
        Most engines hold a system prompt, and nothing else of a prompt."""
        bits, groups, engines = self._holders(masks[0])
        same = 0
        if groups:
            all_bits = bits * _ALL | groups
            for mask in masks:
                here = mask & all_bits
                if here not in (bits, bits | groups):
                    break
                same += 1
        if not same:
            return {}, engines
        own = self._grouped[engines[0]]
        match = _within_groups(own, masks[:same], ends[:same], "1" * same, most)
        found = dict.fromkeys(engines, match)
        if same == len(masks):
            return found, ()
        row = len(self._slots) * same
        return found, [each for each in engines if digits[row + self._shifts[each] // _WIDTH] != "0"]

    def _holders(self, mask: int) -> Alike:
        """The engines with further groups that hold a block, by its location bits. Those bits and the bits of
        their groups, if all of them hold it on the GPU alone and have groups that need the same; else 0."""
        held = mask & self._grouped_bits
        alike = self._alike.get(held)
        if alike is None:
            engines = tuple([each for each in self._grouped if held >> self._shifts[each] & _ALL])
            shapes = {self._grouped[each].groups.shape for each in engines}
            is_alike = len(shapes) == 1 and held & ~self._each == 0
            groups = sum(self._grouped[each].groups.mask for each in engines) if is_alike else 0
            if len(self._alike) == _MAX_ALIKE:
                self._alike.clear()
            alike = self._alike[held] = held, groups, engines
        return alike

    def _reach(self, chain: Sequence[BlockHash]) -> tuple[list[int], list[int]]:
        """Location bits of the engines that hold all blocks so far, and where each stretch of equal bits
        ends; up to the first block that none of them holds."""
        masks, ends, at = list[int](), list[int](), 0
        last, alive, groups = -1, self._each * _ALL, self._group_bits
        for mask, blocks in self._locations.stretches(chain):
            at += blocks
            here = mask & (alive | groups)
            if here == last:
                ends[-1] = at
                continue
            alive = ((here | here >> 1 | here >> 2 | here >> 3) & self._each) * _ALL
            if not alive:
                break
            last = here
            masks.append(here)
            ends.append(at)
        return masks, ends


def _match_of(column: str, ends: list[int]) -> Match:
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


def _within_groups(
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
    match, groups, pending = _match_of(column, ends), own.groups, _PENDING << _WIDTH * own.slots[0]
    held = match.blocks if most is None else min(match.blocks, most)
    reach, lacks = groups.reach(masks, ends, held, pending, coming)
    sure = groups.reach(masks, ends, reach)[0] if max(column) >= _PENDING_DIGIT else reach
    if sure >= held:
        return match
    now = within = _match_of(column, [min(end, sure) for end in ends])
    if reach > sure:
        within = _match_of(column, [min(end, reach) for end in ends])
    return Match(
        now.gpu, now.host, now.disk, reach - now.blocks + now.pending, within.lead, held - reach, lacks
    )
