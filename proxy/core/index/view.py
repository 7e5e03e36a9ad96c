"""One engine's KV events, re-hashed into our chain and written to the index.

The engine's own hashes are only names: they say which block is removed, or which block a new one follows. A
block's identity comes from the token ids and extra ids in its event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from msgspec.structs import replace

from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    ExtraIds,
    KvEvent,
    KvGroup,
    Tier,
    TokenIds,
    ViewLost,
    ViewResumed,
)
from proxy.core.index.blocks import BlockHash
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.runs import RUN_BLOCKS, TIER_BITS, BlockRun, KeptRun, Name, Point
from proxy.core.index.segments import KEY_SHIFT, Spread, place, spread

# Each part takes well below a millisecond.
SLICE_TOKENS = 4096
SLICE_NAMES = 128


def slices(event: KvEvent) -> Iterable[KvEvent]:
    """Events that together mean the same as this one."""
    if isinstance(event, BlocksStored) and event.token_ids:
        n_tokens = len(event.token_ids)
        fits = n_tokens == len(event.hashes) * event.tokens_per_block
        return _runs(event) if fits and n_tokens > SLICE_TOKENS else (event,)
    if isinstance(event, BlocksStored | BlocksRemoved) and len(event.hashes) > SLICE_NAMES:
        starts = range(0, len(event.hashes), SLICE_NAMES)
        return (replace(event, hashes=event.hashes[at : at + SLICE_NAMES]) for at in starts)
    return (event,)


def _runs(event: BlocksStored) -> Iterator[BlocksStored]:
    names, size, extra_ids = event.hashes, event.tokens_per_block, event.extra_ids
    step = max(SLICE_TOKENS // size, 1)
    for at in range(0, len(names), step):
        here = slice(at * size, (at + step) * size)
        yield replace(
            event,
            parent=names[at - 1] if at else event.parent,
            hashes=names[at : at + step],
            token_ids=event.token_ids[here],
            extra_ids=extra_ids[here] if extra_ids is not None else None,
        )


# A count of holders has 20 bits for each tier.
_LIMIT = 1 << 20  # holders of one entry on one tier
_ONE = {tier: 1 << 20 * at for at, tier in enumerate(TIER_BITS)}
# Removed blocks that are remembered, because a lower tier may still announce them by name.
MAX_RECALLED = 8192
# Blocks of further KV cache groups whose content is not known yet. They wait for the main group's event,
# which mostly is in the same batch.
MAX_WAITING = 100_000


@dataclass(slots=True)
class ViewCounts:
    """Blocks stored and removed, in the engine's own blocks, and events whose content could not be known."""

    stored: int = 0
    removed: int = 0
    orphaned: int = 0


class EngineView:
    """Applies one engine's events to the index of its pool. The engine's block size need not be the pool's. A
    larger block becomes several entries; it may share them with blocks that differ only later. Smaller
    blocks, pages, are gathered: an entry exists as long as the last page in it does, since engines evict from
    the end."""

    def __init__(
        self,
        engine: str,
        index: PrefixIndex,
        root_of: Callable[[str | None, str | None], BlockHash],
        tokens_per_block: int,
    ) -> None:
        """`root_of` gives the namespace root of a salt and a LoRA adapter; the block size is the pool's."""
        self._engine = engine
        self._index = index
        self._root_of = root_of
        self._tokens_per_block = tokens_per_block
        self._runs: Spread[Name, BlockRun] = spread()
        # Entry that several blocks may share → how many hold it, for each tier.
        self._holders: Spread[BlockHash, int] = spread()
        # Removed blocks; None until the engine announces a block by name.
        self._recalled: OrderedDict[Name, Sequence[BlockHash]] | None = None
        # Of the further KV cache groups: blocks whose content is not known yet, and the last pool blocks of
        # those that the main group has dropped.
        self._waiting: dict[Name, set[KvGroup]] = {}
        self._ends: dict[Name, BlockHash] = {}
        self.counts = ViewCounts()
        self.complete = False  # False if the engine may hold blocks that no event reported

    def apply(self, event: KvEvent) -> None:
        """Writes one event to the index."""
        match event:
            case BlocksStored(group=KvGroup() as group):
                self._store_in(group, event)
            case BlocksRemoved(group=KvGroup() as group):
                self._remove_from(group, event)
            case BlocksStored():
                if event.token_ids:
                    self._store(event)
                else:
                    self._store_named(event)
            case BlocksRemoved():
                self._remove(event)
            case CacheCleared():
                self._clear()
                self.complete = True
            case ViewLost() | ViewResumed():
                self._clear()
                self.complete = False
            case _:
                groups = self._index.groups_of(self._engine)
                self.complete = event.complete and (groups is None or groups.is_known)

    def _clear(self) -> None:
        self._runs = spread()
        self._holders = spread()
        self._recalled = None
        self._waiting, self._ends = {}, {}
        self._index.wipe(self._engine)

    # --- over a restart of kvpin --------------------------------------------------------------------

    def runs(self) -> Iterator[BlockRun]:
        """All runs. The view may change between two of them."""
        seen: set[BlockRun] = set()
        for part in self._runs:
            for run in set(part.values()) - seen:
                seen.add(run)
                yield run

    def restore(self, kept: KeptRun) -> None:
        """Takes back a run of an earlier view. Blocks that are known already stay as they are."""
        run = BlockRun.of(kept, self._tokens_per_block)
        for at, (name, bits) in enumerate(zip(kept.names, kept.held, strict=True)):
            if bits and self._runs[place(name)].setdefault(name, run) is run:
                run.hold(at, bits)
                self.counts.stored += 1
        for tier, bit in TIER_BITS.items():
            for first, end in run.stretches(bit):
                self._share(run.inner(first, end), tier)
                self._index.store(self._engine, tier, run.between(first, end), run.before(first))

    # --- stored ------------------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> None:
        names, size = event.hashes, event.tokens_per_block
        run = self._run_for(event)
        if run is None or len(event.token_ids) != len(names) * size:
            # Its content is unknown, so no request can match it.
            self.counts.orphaned += 1
            return
        self._set_chunk(event.per_chunk, size)
        at, extra_ids = 0, event.extra_ids
        while RUN_BLOCKS - len(run.names) < len(names) - at:
            end = at + RUN_BLOCKS - len(run.names)
            here = slice(at * size, end * size)
            part = extra_ids[here] if extra_ids is not None else None
            self._append(run, names[at:end], event.token_ids[here], part, event.tier)
            run, at = BlockRun(run.after(RUN_BLOCKS - 1), size, self._tokens_per_block), end
        token_ids = event.token_ids
        if at:
            names, token_ids = names[at:], token_ids[at * size :]
            extra_ids = extra_ids[at * size :] if extra_ids is not None else None
        self._append(run, names, token_ids, extra_ids, event.tier)
        self.counts.stored += len(event.hashes)

    def _append(
        self,
        run: BlockRun,
        names: tuple[Name, ...],
        token_ids: TokenIds[int],
        extra_ids: ExtraIds[int] | None,
        tier: Tier,
    ) -> None:
        """Stores blocks that follow the run and fit into it."""
        first, after = len(run.names), run.last
        hashes = run.append(names, token_ids, extra_ids, TIER_BITS[tier])
        if run.shares:
            self._share(run.inner(first), tier)
        for at, name in enumerate(names, first):
            here = self._runs[place(name)]
            old = here.setdefault(name, run)
            if old is not run:
                self._take_over(old, name, run, at, tier)
                here[name] = run
        self._index.store(self._engine, tier, hashes, after)
        if self._waiting or self._ends:
            self._found(names)

    def _run_for(self, event: BlocksStored) -> BlockRun | None:
        """The run that the event's blocks continue, or a new one; None if their parent is unknown."""
        size = event.tokens_per_block
        if size < 1:
            return None
        if event.parent is None:
            return BlockRun(Point(self._root_of(event.salt, event.lora)), size, self._tokens_per_block)
        run = self._runs[place(event.parent)].get(event.parent)
        if run is None:
            return None
        at = run.place_of(event.parent)
        if at == len(run.names) - 1 and run.size == size:
            return run
        return BlockRun(run.after(at), size, self._tokens_per_block)

    def _take_over(self, old: BlockRun, name: Name, run: BlockRun, at: int, tier: Tier) -> None:
        """Moves a known block to `run`, with the tiers that hold it, if its content is the same. Equal hashes
        say that, equal names do not."""
        old_at = old.place_of(name)
        bits = old.held_at(old_at)
        if old.hashes_of(old_at) == run.hashes_of(at):
            if bits & TIER_BITS[tier]:  # counted twice now
                self._unshare(run.inner(at, at + 1), tier)
            run.hold(at, bits)
        else:
            for each, bit in TIER_BITS.items():
                if bits & bit:
                    self._index.remove(self._engine, each, self._ended(old, old_at, each))
        old.release(old_at, bits)

    def _store_named(self, event: BlocksStored) -> None:
        """Blocks that were stored before now also lie on another tier."""
        if self._recalled is None:
            self._recalled = OrderedDict()
        unknown = 0
        for name in event.hashes:
            run = self._runs[place(name)].get(name) or self._recall(name)
            if run is None:
                unknown += 1
                continue
            self._set_chunk(event.per_chunk, run.size)
            at = run.place_of(name)
            if not run.held_at(at) & TIER_BITS[event.tier]:
                run.hold(at, TIER_BITS[event.tier])
                self._share(run.inner(at, at + 1), event.tier)
                self._index.store(self._engine, event.tier, run.hashes_of(at))
        self.counts.stored += len(event.hashes) - unknown
        self.counts.orphaned += unknown > 0

    def _set_chunk(self, blocks: int, size: int) -> None:
        """Lower tiers give back this many of the engine's blocks together."""
        if blocks > 1:
            pool = self._tokens_per_block
            self._index.set_chunk(self._engine, lcm(blocks * size, pool) // pool)

    # --- further KV cache groups ------------------------------------------------------------------

    def _store_in(self, group: KvGroup, event: BlocksStored) -> None:
        """A further group stored blocks on the GPU, of which only the names count: the main group has them,
        too. What it holds on other tiers does not count: at worst, less is predicted."""
        index, size = self._index, event.tokens_per_block
        if event.tier is not Tier.GPU or size < 1:
            return
        groups = index.add_group(self._engine, group, size, self._tokens_per_block)
        self.complete = self.complete and groups.is_known
        if size % self._tokens_per_block:
            return  # several of its blocks may end at one of the pool's: nothing is predicted of it
        ends = [(name, self._end_of(name)) for name in event.hashes]
        index.store_group(self._engine, group, tuple([end for _, end in ends if end is not None]))
        if len(self._waiting) < MAX_WAITING:
            for name, end in ends:
                if end is None:
                    self._waiting.setdefault(name, set()).add(group)

    def _remove_from(self, group: KvGroup, event: BlocksRemoved) -> None:
        if event.tier is not Tier.GPU:
            return
        for name in self._waiting and event.hashes:
            waiting = self._waiting.get(name, set())
            waiting.discard(group)
            if not waiting:
                self._waiting.pop(name, None)
        groups = self._index.groups_of(self._engine)
        if groups is None or group.number not in groups.bits:
            return
        ends = [end for name in event.hashes if (end := self._end_of(name)) is not None]
        ends.reverse()  # engines evict from the end
        self._index.remove_group(self._engine, group, tuple(ends))
        if self._ends:
            for name in event.hashes:
                if name in self._ends and not self._index.in_groups(self._engine, self._ends[name]):
                    del self._ends[name]

    def _end_of(self, name: Name) -> BlockHash | None:
        """The pool block that ends with the engine's block; None if its content is not known."""
        run = self._runs[place(name)].get(name)
        return self._ends.get(name) if run is None else run.before(run.place_of(name) + 1)

    def _found(self, names: Iterable[Name]) -> None:
        """The main group stored these blocks: the further groups' blocks of these names are known now."""
        known = self._index.groups_of(self._engine)  # none after a flush, until events tell of them again
        for name in names:
            self._ends.pop(name, None)
            for group in self._waiting.pop(name, ()):
                if known is not None and group.number in known.bits:
                    end = self._end_of(name)
                    assert end is not None  # noqa: S101 - its run was stored
                    self._index.store_group(self._engine, group, (end,))

    # --- removed -----------------------------------------------------------------------------------

    def _remove(self, event: BlocksRemoved) -> None:
        bit = TIER_BITS[event.tier]
        ended: list[Sequence[BlockHash]] = []
        before, falls = 0, 0
        has_groups = self._index.groups_of(self._engine) is not None
        for name in event.hashes:
            here = self._runs[place(name)]
            run = here.get(name)
            if run is None:
                continue
            at = run.place_of(name)
            held = run.held_at(at)
            if not held & bit:
                continue
            ended.append(self._ended(run, at, event.tier))
            falls += at < before
            before = at
            if held == bit:
                if has_groups and self._index.in_groups(self._engine, end := run.before(at + 1)):
                    self._ends[name] = end
                del here[name]
                if self._recalled is not None and run.is_whole:
                    self._recalled[name] = run.hashes_of(at)
                    if len(self._recalled) > MAX_RECALLED:
                        self._recalled.popitem(last=False)
            run.release(at, bit)
            self.counts.removed += 1
        if falls > len(ended) // 2:
            # vLLM evicts a chain from its end. The index is faster with blocks in the order of the chain.
            ended.reverse()
        hashes = ended[0] if len(ended) == 1 else [block for each in ended for block in each]
        self._index.remove(self._engine, event.tier, hashes)

    def _ended(self, run: BlockRun, at: int, tier: Tier) -> Sequence[BlockHash]:
        """The entries that end when the tier drops the block: those that no other block shares."""
        hashes = run.hashes_of(at)
        if not run.shares:
            return hashes
        inner = run.inner(at, at + 1)
        ended = self._unshare(inner, tier)
        return hashes if len(ended) == len(inner) else [*ended, *hashes[len(inner) :]]

    def _share(self, inner: Sequence[BlockHash], tier: Tier) -> None:
        """One more block on the tier holds these entries."""
        one = _ONE[tier]
        for block in inner:
            here = self._holders[block >> KEY_SHIFT]
            here[block] = here.get(block, 0) + one

    def _unshare(self, inner: Sequence[BlockHash], tier: Tier) -> list[BlockHash]:
        """One block less on the tier holds these entries. Returns the entries that none holds now."""
        one = _ONE[tier]
        ended: list[BlockHash] = []
        for block in inner:
            here = self._holders[block >> KEY_SHIFT]
            left = here[block] - one
            if left:
                here[block] = left
            else:
                del here[block]
            if not left // one % _LIMIT:
                ended.append(block)
        return ended

    def _recall(self, name: Name) -> BlockRun | None:
        """A run of one block that was removed lately; None if it is not remembered."""
        hashes = self._recalled.pop(name, None) if self._recalled is not None else None
        if hashes is None:
            return None
        run = self._runs[place(name)][name] = BlockRun.of_block(name, hashes, self._tokens_per_block)
        return run
