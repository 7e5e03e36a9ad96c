"""Engine block names → our chain, stored compactly.

A run is up to RUN_BLOCKS consecutive blocks of one chain. For each block it has the engine's name, four tier
bits, and the hashes of the pool blocks that end in it. If blocks end inside pool blocks, because they are
smaller, it also has their tokens, so that the chain can continue after any of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine_adapter.types import ExtraIds, Tier, TokenIds
from proxy.core.index.blocks import BlockHash, extend

Name = int | bytes

# A run lives as long as any of its blocks. This bounds the memory that one block keeps alive.
RUN_BLOCKS = 64
TIER_BITS = {Tier.GPU: 1, Tier.HOST: 2, Tier.DISK: 4}
_BITS = 4
_HELD = (1 << _BITS) - 1
# One bit for each of n blocks.
_ONES = tuple(sum(1 << _BITS * at for at in range(n)) for n in range(RUN_BLOCKS + 1))


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a chain: after the pool block `base` and the tokens since, which fill no further block."""

    base: BlockHash
    tokens: TokenIds[int] | None = None
    extra_ids: ExtraIds[int] | None = None


class KeptRun(msgspec.Struct, frozen=True, array_like=True):
    """A run as plain data, to outlive the process."""

    base: BlockHash  # the pool block before it
    size: int  # tokens of each block
    lead: int  # tokens since `base` at its beginning
    names: list[Name]  # the engine's names of its blocks
    held: bytes  # `TIER_BITS` of each, one byte a block
    hashes: bytes  # its pool blocks, as uint64
    tokens: bytes | None  # `lead` and its tokens as int32, where blocks end inside pool blocks
    extra_ids: bytes | None  # one uint64 for each of these; None when all are 0


class BlockRun:
    """Consecutive blocks of one chain."""

    __slots__ = (
        *("_base", "_extra_ids", "_hashes", "_lead", "_pool", "_tokens"),
        *("held", "is_whole", "names", "shares", "size"),
    )

    def __init__(self, start: Point, size: int, pool: int) -> None:
        """An empty run at `start`, of blocks of `size` tokens, over pool blocks of `pool` tokens."""
        self.size = size  # tokens of each
        self.names: list[Name] = []  # the engine's names of them
        self.held = 0  # `TIER_BITS` of each, four bits a block
        self._pool = pool
        self._base = start.base
        self._lead = len(start.tokens) if start.tokens is not None else 0
        self._hashes: list[BlockHash] = []
        self.is_whole = not self._lead and not size % pool  # they end where pool blocks end
        # Pool blocks may end inside them, so that other blocks of the engine may hold the same pool block.
        self.shares = size != pool if self.is_whole else bool(pool % size or self._lead % size)
        self._tokens = None if self.is_whole else (start.tokens or array("i"))[:]
        self._extra_ids = start.extra_ids

    @classmethod
    def of_block(cls, name: Name, hashes: Sequence[BlockHash], pool: int) -> BlockRun:
        """A run of one block that no tier holds yet, in which these pool blocks end."""
        run = cls(Point(hashes[0]), len(hashes) * pool, pool)
        run.names.append(name)
        run._hashes += hashes
        return run

    def kept(self) -> KeptRun:
        """The run as plain data."""
        return KeptRun(
            self._base,
            self.size,
            self._lead,
            self.names[:],
            bytes(map(self.held_at, range(len(self.names)))),
            array("Q", self._hashes).tobytes(),
            None if self._tokens is None else self._tokens.tobytes(),
            None if self._extra_ids is None else self._extra_ids.tobytes(),
        )

    @classmethod
    def of(cls, kept: KeptRun, pool: int) -> BlockRun:
        """A run from plain data, over pool blocks of `pool` tokens, that no tier holds yet."""
        lead = None if kept.tokens is None else array("i", kept.tokens)
        extra_ids = None if kept.extra_ids is None else array("Q", kept.extra_ids)
        run = cls(Point(kept.base, lead and lead[: kept.lead]), kept.size, pool)
        run.names, run._hashes = kept.names, array("Q", kept.hashes).tolist()
        run._tokens, run._extra_ids = lead, extra_ids
        return run

    @property
    def last(self) -> BlockHash:
        """The last pool block, or the one before the first."""
        return self._hashes[-1] if self._hashes else self._base

    def append(
        self, names: Sequence[Name], token_ids: TokenIds[int], extra_ids: ExtraIds[int] | None, bit: int
    ) -> tuple[BlockHash, ...]:
        """Adds blocks that the tier of `bit` holds. Returns the hashes of the pool blocks that end in
        them."""
        if self._tokens is not None:
            token_ids, extra_ids = self._join(token_ids, extra_ids)
        hashes = extend(self.last, token_ids, extra_ids, self._pool)
        self._hashes += hashes
        self.held |= bit * _ONES[len(names)] << _BITS * len(self.names)
        self.names += names
        return hashes

    def _join(
        self, token_ids: TokenIds[int], extra_ids: ExtraIds[int] | None
    ) -> tuple[TokenIds[int], ExtraIds[int] | None]:
        """Stores the tokens. Returns them together with those since the last pool block."""
        kept = self._tokens if self._tokens is not None else array("i")
        before, done = len(kept), len(self._hashes) * self._pool
        kept += token_ids
        if extra_ids is None and self._extra_ids is None:
            return kept[done:], None
        ids = array("Q", bytes(8 * before)) if self._extra_ids is None else self._extra_ids[:before]
        ids += extra_ids if extra_ids is not None else array("Q", bytes(8 * len(token_ids)))
        self._extra_ids = ids
        return kept[done:], ids[done:]

    def place_of(self, name: Name) -> int:
        """The place of the block with this name, which must be in the run."""
        names = self.names
        # Engines continue a chain at its end, and evict it from there.
        return len(names) - 1 if names[-1] == name else names.index(name)

    def hashes_of(self, at: int) -> Sequence[BlockHash]:
        """The pool blocks that end in the block at `at`."""
        start = self._lead + at * self.size
        return self._hashes[start // self._pool : (start + self.size) // self._pool]

    def stretches(self, bit: int) -> list[tuple[int, int]]:
        """Where blocks in a row begin and end that the tier of `bit` holds."""
        blocks = len(self.names)
        found: list[tuple[int, int]] = []
        held, every = self.held & bit * _ONES[blocks], bit * _ONES[blocks]
        if held in (0, every):
            return [(0, blocks)] if held else []
        for at in range(blocks):
            if self.held_at(at) & bit:
                first = found.pop()[0] if found and found[-1][1] == at else at
                found.append((first, at + 1))
        return found

    def between(self, first: int, end: int) -> Sequence[BlockHash]:
        """The pool blocks that end in the blocks from `first` to before `end`."""
        start, stop = self._lead + first * self.size, self._lead + end * self.size
        return self._hashes[start // self._pool : stop // self._pool]

    def before(self, at: int) -> BlockHash:
        """The last pool block that ends before the block at `at`."""
        whole = (self._lead + at * self.size) // self._pool
        return self._hashes[whole - 1] if whole else self._base

    def inner(self, first: int, end: int | None = None) -> list[BlockHash]:
        """The pool blocks that end inside the blocks from `first` to before `end`, and not at their ends."""
        end = len(self.names) if end is None else end
        size, pool = self.size, self._pool
        inner: list[BlockHash] = []
        if not self.shares:
            return inner
        if self.is_whole:
            each = size // pool
            inner = self._hashes[first * each : end * each]
            if len(inner) == each:
                inner.pop()
            else:
                del inner[each - 1 :: each]
            return inner
        for stop in range(self._lead + (first + 1) * size, self._lead + (end + 1) * size, size):
            inner += self._hashes[(stop - size) // pool : (stop - 1) // pool]
        return inner

    def after(self, at: int) -> Point:
        """The place in the chain where the block at `at` ends."""
        end = self._lead + (at + 1) * self.size
        rest, base = end % self._pool, self.before(at + 1)
        if not rest or self._tokens is None:
            return Point(base)
        extra_ids = self._extra_ids
        return Point(base, self._tokens[end - rest : end], extra_ids and extra_ids[end - rest : end])

    def held_at(self, at: int) -> int:
        """`TIER_BITS` of the block at `at`."""
        return self.held >> _BITS * at & _HELD

    def hold(self, at: int, bits: int) -> None:
        """More tiers hold the block at `at`."""
        self.held |= bits << _BITS * at

    def release(self, at: int, bits: int) -> None:
        """These tiers no longer hold the block at `at`. Drops the end of the run that no tier holds: engines
        evict from the end, and may continue the chain with other blocks."""
        self.held &= ~(bits << _BITS * at)
        if at == len(self.names) - 1 and not self.held_at(at):
            blocks = (self.held.bit_length() + _BITS - 1) // _BITS
            end = self._lead + blocks * self.size
            del self.names[blocks:]
            del self._hashes[end // self._pool :]
            if self._tokens is not None:
                del self._tokens[end:]
