"""The prefix index: which engine holds which block, on which tier.

Dicts map a block hash to one int whose bits are locations: four per engine, for gpu, host, disk and
pending. That is the whole memory of an entry. A look-up walks the chain and counts runs of equal bits, so
a prompt that one engine holds costs one dict look-up a block and nothing more.

Pending marks what a request in flight is about to leave behind: it counts as held, so that a burst of one
new prefix gathers on one engine, and goes when the request ends; events or usage have confirmed it by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine_adapter.types import Tier
from proxy.core.blocks import BlockHash
from proxy.core.spread import KEY_SHIFT, Spread, spread

_BITS = {Tier.GPU: 1, Tier.HOST: 2, Tier.DISK: 4}
_PENDING = 8
_WIDTH = 4
_ALL = 15
_ON_GPU = _BITS[Tier.GPU] | _PENDING


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks of a chain one engine holds, by the fastest tier each lies on.

    `lead` are those before the first that lies on no GPU, nor will in a moment.
    """

    gpu: int = 0
    host: int = 0
    disk: int = 0
    pending: int = 0
    lead: int = field(default=0, compare=False)

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.gpu + self.host + self.disk + self.pending


class PrefixIndex:
    """What every engine of a pool holds, as far as is known. Not thread-safe; one event loop owns it."""

    def __init__(self) -> None:
        self._locations: Spread[BlockHash, int] = spread()
        self._shifts: dict[str, int] = {}
        # Requests in flight that will leave a block on an engine, beyond the first, which its bit stands for.
        self._awaited: dict[str, dict[BlockHash, int]] = {}
        self._held: Counter[int] = Counter()  # location bit → blocks

    def __len__(self) -> int:
        """Blocks known of any engine."""
        return sum(map(len, self._locations))

    def add_engine(self, engine: str) -> None:
        """Gives the engine its bits; knowing it already is fine."""
        if engine not in self._shifts:
            taken = set(self._shifts.values())
            self._shifts[engine] = next(
                s for s in range(0, _WIDTH * (len(taken) + 1), _WIDTH) if s not in taken
            )
            self._awaited[engine] = {}

    def remove_engine(self, engine: str) -> None:
        """Forgets the engine and all it held."""
        self.wipe(engine)
        self._shifts.pop(engine, None)
        self._awaited.pop(engine, None)

    def store(self, engine: str, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        """These blocks now lie on `tier` of the engine."""
        self._set(_BITS[tier] << self._shifts[engine], hashes)

    def remove(self, engine: str, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        """These blocks left `tier` of the engine; unknown ones are fine."""
        self._clear(_BITS[tier] << self._shifts[engine], hashes)

    def drop(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """The engine was told to forget these blocks: no tier holds them, and none is expected."""
        hashes = tuple(hashes)
        for bit in (*_BITS.values(), _PENDING):
            self._clear(bit << self._shifts[engine], hashes)
        awaited = self._awaited[engine]
        for block in awaited and hashes:
            awaited.pop(block, None)

    def holds(self, engine: str, block: BlockHash) -> bool:
        """Whether any tier of the engine holds the block; pending does not count."""
        bits = self._locations[block >> KEY_SHIFT].get(block, 0)
        return bool(bits >> self._shifts[engine] & (_ALL - _PENDING))

    def held(self, engine: str, tier: Tier) -> int:
        """Blocks that lie on `tier` of the engine."""
        return self._held[_BITS[tier] << self._shifts[engine]]

    def pending(self, engine: str) -> int:
        """Blocks that requests in flight are about to leave on the engine."""
        return self._held[_PENDING << self._shifts[engine]]

    def wipe(self, engine: str) -> None:
        """Forgets what the engine held. One pass over the index; for restarts and resyncs, not requests."""
        if engine not in self._shifts:
            return
        held = [self._held.pop(bit << self._shifts[engine], 0) for bit in (*_BITS.values(), _PENDING)]
        if not any(held):
            return
        keep = ~(_ALL << self._shifts[engine])
        self._locations = [
            {block: rest for block, bits in each.items() if (rest := bits & keep)} for each in self._locations
        ]
        self._awaited[engine].clear()

    def add_pending(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """A request placed on the engine will leave these blocks there."""
        bit, locations, added = _PENDING << self._shifts[engine], self._locations, 0
        awaited = self._awaited[engine]
        for block in hashes:
            here = locations[block >> KEY_SHIFT]
            bits = here.get(block, 0)
            if bits & bit:
                awaited[block] = awaited.get(block, 0) + 1
            else:
                here[block] = bits | bit
                added += 1
        self._held[bit] += added

    def end_pending(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """That request has ended, whatever came of it."""
        awaited = self._awaited[engine]
        self._clear(_PENDING << self._shifts[engine], hashes if not awaited else _last_of(awaited, hashes))

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, Match]:
        """For each engine that holds the first block, how far its copy of the chain reaches."""
        counts: dict[str, list[int]] = {}
        alive = tuple(self._shifts.items())
        for bits, start, end in self._stretches(hashes):
            alive = tuple(item for item in alive if bits >> item[1] & _ALL)
            if not alive:
                break
            for engine, shift in alive:
                # The lowest bit set is the fastest tier; isolating it indexes gpu, host, disk, pending.
                held = bits >> shift & _ALL
                count = counts.setdefault(engine, [0, 0, 0, 0, 0])
                if held & _ON_GPU and count[4] == start:
                    count[4] = end
                count[(held & -held).bit_length() - 1] += end - start
        return {engine: Match(*count) for engine, count in counts.items()}

    def _stretches(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int, int]]:
        """Location bits, and from where to where they are the same, up to the first block nobody has."""
        locations, last, start = self._locations, 0, 0
        for at, block in enumerate(hashes):
            bits = locations[block >> KEY_SHIFT].get(block, 0)
            if bits != last:
                if last:
                    yield last, start, at
                last, start = bits, at
            if not bits:
                return
        if last:
            yield last, start, len(hashes)

    def _set(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        locations, added = self._locations, 0
        for block in hashes:
            here = locations[block >> KEY_SHIFT]
            bits = here.get(block, 0)
            if not bits & bit:
                here[block] = bits | bit
                added += 1
        self._held[bit] += added

    def _clear(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        locations, removed = self._locations, 0
        for block in hashes:
            here = locations[block >> KEY_SHIFT]
            bits = here.get(block, 0)
            if bits & bit:
                removed += 1
                if bits == bit:
                    del here[block]
                else:
                    here[block] = bits - bit
        self._held[bit] -= removed


def _last_of(awaited: dict[BlockHash, int], hashes: Iterable[BlockHash]) -> list[BlockHash]:
    """Counts each block down by one request; those that no other request waits for."""
    last = []
    for block in hashes:
        others = awaited.get(block, 0)
        if others > 1:
            awaited[block] = others - 1
        elif others:
            del awaited[block]
        else:
            last.append(block)
    return last
