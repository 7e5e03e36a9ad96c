"""The prefix index: which engine holds which block, on which tier.

One dict maps a block hash to one int whose bits are locations: four per engine, for gpu, host, disk and
pending. That is the whole memory of an entry. A look-up walks the chain and counts runs of equal bits, so
a prompt that one engine holds costs one dict look-up a block and nothing more.

Pending marks what a request in flight is about to leave behind: it counts as held, so that a burst of one
new prefix gathers on one engine, and goes when the request ends; events or usage have confirmed it by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_adapter.types import Tier
from proxy.core.blocks import BlockHash

_BITS = {Tier.GPU: 1, Tier.HOST: 2, Tier.DISK: 4}
_PENDING = 8
_WIDTH = 4
_ALL = 15


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks of a chain one engine holds, by the fastest tier each lies on."""

    gpu: int = 0
    host: int = 0
    disk: int = 0
    pending: int = 0

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.gpu + self.host + self.disk + self.pending


class PrefixIndex:
    """What every engine of a pool holds, as far as is known. Not thread-safe; one event loop owns it."""

    def __init__(self) -> None:
        self._locations: dict[BlockHash, int] = {}
        self._shifts: dict[str, int] = {}
        self._pending: Counter[tuple[str, BlockHash]] = Counter()
        self._held: Counter[int] = Counter()  # location bit → blocks

    def __len__(self) -> int:
        """Blocks known of any engine."""
        return len(self._locations)

    def add_engine(self, engine: str) -> None:
        """Gives the engine its bits; knowing it already is fine."""
        if engine not in self._shifts:
            taken = set(self._shifts.values())
            self._shifts[engine] = next(
                s for s in range(0, _WIDTH * (len(taken) + 1), _WIDTH) if s not in taken
            )

    def remove_engine(self, engine: str) -> None:
        """Forgets the engine and all it held."""
        self.wipe(engine)
        self._shifts.pop(engine, None)

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
        for block in hashes:
            self._pending.pop((engine, block), None)

    def holds(self, engine: str, block: BlockHash) -> bool:
        """Whether any tier of the engine holds the block; pending does not count."""
        return bool(self._locations.get(block, 0) >> self._shifts[engine] & (_ALL - _PENDING))

    def held(self, engine: str, tier: Tier) -> int:
        """Blocks that lie on `tier` of the engine."""
        return self._held[_BITS[tier] << self._shifts[engine]]

    def wipe(self, engine: str) -> None:
        """Forgets what the engine held. One pass over the index; for restarts and resyncs, not requests."""
        if engine not in self._shifts:
            return
        for bit in (*_BITS.values(), _PENDING):
            self._held.pop(bit << self._shifts[engine], None)
        keep = ~(_ALL << self._shifts[engine])
        self._locations = {h: rest for h, bits in self._locations.items() if (rest := bits & keep)}
        for key in [key for key in self._pending if key[0] == engine]:
            del self._pending[key]

    def add_pending(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """A request placed on the engine will leave these blocks there."""
        hashes = tuple(hashes)
        self._pending.update((engine, h) for h in hashes)
        self._set(_PENDING << self._shifts[engine], hashes)

    def end_pending(self, engine: str, hashes: Iterable[BlockHash]) -> None:
        """That request has ended, whatever came of it."""
        ended = []
        for block in hashes:
            left = self._pending.get((engine, block), 0) - 1
            if left > 0:
                self._pending[engine, block] = left
            elif left == 0:
                del self._pending[engine, block]
                ended.append(block)
        if ended:
            self._clear(_PENDING << self._shifts[engine], ended)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, Match]:
        """For each engine that holds the first block, how far its copy of the chain reaches."""
        counts: dict[str, list[int]] = {}
        alive = tuple(self._shifts.items())
        get, at, end = self._locations.get, 0, len(hashes)
        while at < end:
            bits = get(hashes[at], 0)
            start = at
            at += 1
            while at < end and get(hashes[at], 0) == bits:
                at += 1
            alive = tuple(item for item in alive if bits >> item[1] & _ALL)
            if not alive:
                break
            for engine, shift in alive:
                # The lowest bit set is the fastest tier; isolating it indexes gpu, host, disk, pending.
                held = bits >> shift & _ALL
                counts.setdefault(engine, [0, 0, 0, 0])[(held & -held).bit_length() - 1] += at - start
        return {engine: Match(*count) for engine, count in counts.items()}

    def _set(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        locations, added = self._locations, 0
        for block in hashes:
            bits = locations.get(block, 0)
            if not bits & bit:
                locations[block] = bits | bit
                added += 1
        self._held[bit] += added

    def _clear(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        locations, removed = self._locations, 0
        for block in hashes:
            bits = locations.get(block, 0)
            if bits & bit:
                removed += 1
                if bits == bit:
                    del locations[block]
                else:
                    locations[block] = bits - bit
        self._held[bit] -= removed
