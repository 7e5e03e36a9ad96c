"""The cache of an engine with sliding-window layers: groups of layers that share one pool of blocks.

The rules are vLLM's (vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py):

- One group of layers has full attention and holds every block of a prompt. The others have a window.
- A prompt is reused up to a boundary. Full attention needs all blocks before it, a window group the last
  `window_blocks` before it; the leading blocks count too if there are not as many.
- A running request holds its blocks of full attention, and in window groups those of its window.
- Window groups keep few blocks: the last window of each prompt, and the one before the point up to which
  full attention held more than the prompt could reuse. The others are free as soon as the window has left
  them. This is vLLM's default, `prefix_cache_retention_interval` 0.
- All groups evict from one list, the least recently used block first. A request that ends frees its
  window before its blocks of full attention, and of each the end before the beginning.

Three simplifications: window groups have equal windows, so they hold the same blocks, and these leave
together. A block that is computed again takes the place of its old copy. The window before the end of an
answer is kept, too.

`HybridModel` makes engines of `kvpin replay` serve such a model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from proxy.core.index.blocks import BlockHash, Chain
from proxy.replay.cache import Taken, TieredCache
from proxy.replay.simulated_engine import EngineModel, Listener, SimEngine
from proxy.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class TakenOfGroups(Taken):
    """The blocks that a starting request found, and those that were evicted for it.

    Attributes:
        out_of_window: blocks that left the window groups.
        boundaries: where windows are kept, in blocks of the prompt.
    """

    out_of_window: Sequence[BlockHash] = ()
    boundaries: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Filled:
    """The blocks that are new when a prefill ends, and those that were evicted for them.

    `new_in_window` and `out_of_window` are those of the window groups."""

    new: Sequence[BlockHash]
    new_in_window: Sequence[BlockHash] = ()
    evicted: Sequence[BlockHash] = ()
    out_of_window: Sequence[BlockHash] = ()


class _InWindow(NamedTuple):
    """A block as the window groups hold it: one block of the pool for each of them."""

    block: BlockHash


_Held = BlockHash | _InWindow


class HybridCache:
    """One engine's blocks; see `TieredCache` of `kvpin replay`. It has no host tier.

    The last blocks of a prompt that still runs are never evicted: if the pool is full of blocks in use, it
    takes more than its capacity. An engine would stop another request.
    """

    def __init__(self, gpu_blocks: int, groups: int, window_blocks: int) -> None:
        """`gpu_blocks`: blocks of the pool. `groups`: window groups. `window_blocks`: see the module."""
        self.gpu_blocks = gpu_blocks
        self.groups = groups
        self.window_blocks = window_blocks
        self._idle: OrderedDict[_Held, None] = OrderedDict()  # least recently used first
        self._used: dict[_Held, int] = {}  # running requests that use it
        self._asleep = self._awake = 0  # blocks of the pool that are idle, and used
        self._private = 0  # those of running requests that no match finds: being filled, tails, answers

    @property
    def held(self) -> int:
        """Blocks of the pool that a match could find."""
        return self._asleep + self._awake

    @property
    def occupied(self) -> int:
        """Blocks of the pool that are not empty."""
        return self.held + self._private

    @property
    def in_use(self) -> int:
        """Blocks of the pool that running requests hold."""
        return self._awake + self._private

    def match(
        self,
        chain: Chain,
        coming: AbstractSet[BlockHash] = frozenset(),
        ends: AbstractSet[BlockHash] = frozenset(),
    ) -> tuple[int, int]:
        """The boundary up to which a prompt can be reused, in blocks, and 0 for the host tier. Full attention
        counts as holding the blocks in `coming`, and windows as whole before the end of those in `ends`."""
        return self._reach(chain, coming, ends)[0], 0

    def _reach(
        self,
        chain: Chain,
        coming: AbstractSet[BlockHash] = frozenset(),
        ends: AbstractSet[BlockHash] = frozenset(),
    ) -> tuple[int, int]:
        """That boundary, and the one that full attention alone would allow."""
        hashes, full, run, whole = chain.hashes[: chain.reusable], 0, 0, 0
        for block in hashes:
            if not (self._has(block) or block in coming):
                break
            full += 1
        for at in range(full - 1, -1, -1):
            whole = self.window_blocks if hashes[at] in ends else max(whole - 1, 0)
            run = run + 1 if whole or self._has(_InWindow(hashes[at])) else 0
            if run == self.window_blocks:
                return at + run, full
        return run, full

    def take(self, chain: Chain, blocks: int) -> TakenOfGroups | None:
        """Takes room for a request of `blocks` blocks that begin with the chain; None if there is not
        enough."""
        hashes, (reused, full) = chain.hashes, self._reach(chain)
        found: list[_Held] = [*hashes[:reused], *self._window(hashes, reused)]
        asleep = sum(self._weight(each) for each in found if each in self._idle)
        fresh = blocks - reused + self._beside(blocks, reused)
        if self._awake + asleep + self._private + fresh > self.gpu_blocks:
            return None
        for each in found:
            self._use(each)
        self._private += fresh
        evicted, out_of_window = self._evict()
        boundaries = (chain.reusable, full)
        return TakenOfGroups(reused, 0, evicted, out_of_window=out_of_window, boundaries=boundaries)

    def fill(self, hashes: Sequence[BlockHash], since: int, boundaries: Sequence[int] = ()) -> Filled:
        """The blocks of a running prompt from `since` on are computed: matches find them from now on. Of
        blocks that the window has left, it finds the last ones before the `boundaries`."""
        end, window = len(hashes), set(self._window(hashes, len(hashes)))
        later = [_InWindow(block) for block in hashes[since:]]
        self._private -= end - since + self.groups * (self._of_window(end) - self._of_window(since))
        new = [block for block in hashes[since:] if self._use(block)]
        in_window = [each.block for each in later if each in window and self._use(each)]
        for each in self._window(hashes, since):
            if each not in window:
                self._leave(each)
        kept = {each for boundary in boundaries for each in self._window(hashes, boundary)} - window
        passed = [each for each in later if each in kept]
        in_window = [each.block for each in passed if self._pass(each)] + in_window
        return Filled(new, in_window, *self._evict())

    def release(self, hashes: Sequence[BlockHash], blocks: int) -> None:
        """The request has finished. Its blocks stay until others need the room."""
        for each in reversed(self._window(hashes, len(hashes))):
            self._leave(each)
        for block in reversed(hashes):
            self._leave(block)
        self._private -= blocks - len(hashes) + self._beside(blocks, len(hashes))

    def clear(self) -> None:
        """Drops everything. No request runs."""
        self._idle.clear()
        self._asleep = 0

    def needs(self, blocks: int) -> int:
        """Blocks of the pool for a request of `blocks` blocks."""
        return blocks + self._beside(blocks, 0)

    def _beside(self, blocks: int, filled: int) -> int:
        """Blocks of the pool that a request's window will take when its first `filled` blocks are there: a
        whole window, and one that is being filled."""
        return self.groups * (self._of_window(blocks) + 1 - self._of_window(filled))

    def _of_window(self, blocks: int) -> int:
        return min(blocks, self.window_blocks)

    def _window(self, hashes: Sequence[BlockHash], end: int) -> list[_InWindow]:
        """The window before a boundary."""
        return [_InWindow(block) for block in hashes[end - self._of_window(end) : end]]

    def _weight(self, held: _Held) -> int:
        return self.groups if isinstance(held, _InWindow) else 1

    def _has(self, held: _Held) -> bool:
        return held in self._used or held in self._idle

    def _use(self, held: _Held) -> bool:
        """A running request uses it. True if it is new."""
        used, weight = self._used, self._weight(held)
        if held in used:
            used[held] += 1
            return False
        used[held] = 1
        self._awake += weight
        if held in self._idle:
            del self._idle[held]
            self._asleep -= weight
            return False
        return True

    def _leave(self, held: _Held) -> None:
        """One request less uses it."""
        self._used[held] -= 1
        if not self._used[held]:
            del self._used[held]
            self._awake -= self._weight(held)
            self._idle[held] = None
            self._asleep += self._weight(held)

    def _pass(self, held: _Held) -> bool:
        """It was computed, and the window has left it. True if it is new."""
        if held in self._used:
            return False
        is_new = held not in self._idle
        self._idle[held] = None
        self._idle.move_to_end(held)
        self._asleep += self._weight(held) if is_new else 0
        return is_new

    def _evict(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Evicts what is too much. Returns what left full attention, and what left the window groups."""
        full, windows = list[BlockHash](), list[BlockHash]()
        while self._idle and self.occupied > self.gpu_blocks:
            held, _ = self._idle.popitem(last=False)
            self._asleep -= self._weight(held)
            if isinstance(held, _InWindow):
                windows.append(held.block)
            else:
                full.append(held)
        return full, windows


# --- engines of `kvpin replay` that serve a hybrid model ------------------------------------------------


class SimHybridCache(TieredCache):
    """A `HybridCache`, as a simulated engine uses it.

    Attributes:
        evicted: blocks that left full attention for the last fill.
        windows: what happened in the window groups, until it is read: whether the blocks are new, or gone.
    """

    def __init__(self, pool: HybridCache) -> None:
        super().__init__(pool.gpu_blocks)
        self.pool = pool
        self.evicted: Sequence[BlockHash] = ()
        self.windows: list[tuple[bool, Sequence[BlockHash]]] = []
        self._boundaries: list[Sequence[int]] = []  # of what is taken and not filled yet

    @property
    def held(self) -> int:
        """Blocks of the pool that a match could find."""
        return self.pool.held

    def match(
        self,
        chain: Chain,
        coming: AbstractSet[BlockHash] = frozenset(),
        ends: AbstractSet[BlockHash] = frozenset(),
    ) -> tuple[int, int]:
        """See `HybridCache`."""
        return self.pool.match(chain, coming, ends)

    def take(self, chain: Chain, blocks: int) -> Taken | None:
        """See `HybridCache`."""
        taken = self.pool.take(chain, blocks)
        if taken is not None:
            self._boundaries.append(taken.boundaries)
            self._note(is_new=False, hashes=taken.out_of_window)
        return taken

    def fill(self, hashes: Sequence[BlockHash], since: int) -> list[BlockHash]:
        """See `HybridCache`."""
        filled = self.pool.fill(hashes, since, self._boundaries.pop())
        self.evicted = filled.evicted
        self._note(is_new=True, hashes=filled.new_in_window)
        self._note(is_new=False, hashes=filled.out_of_window)
        return list(filled.new)

    def release(self, hashes: Sequence[BlockHash], blocks: int) -> None:
        """See `HybridCache`."""
        self.pool.release(hashes, blocks)

    def _note(self, *, is_new: bool, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self.windows.append((is_new, hashes))


class HybridEngine(SimEngine):
    """A simulated engine whose cache also evicts as it fills."""

    cache: SimHybridCache

    def _fill(self, hashes: Sequence[BlockHash], since: int) -> None:
        super()._fill(hashes, since)
        self._tell_evictions(self.cache.evicted[::-1])


@dataclass(frozen=True, slots=True)
class HybridModel(EngineModel):
    """Capacity and speed of an engine with groups of sliding-window layers.

    Attributes:
        window_groups: for each group of full attention. `gpu_tokens` is what the GPU holds in every group;
            the groups share this room. There is no host tier.
        window_tokens: of the window.
    """

    window_groups: int = 1
    window_tokens: int = 1024

    def blocks(self, tokens_per_block: int) -> tuple[int, int]:
        """Blocks of the pool; no host tier."""
        return self.gpu_tokens // tokens_per_block * (1 + self.window_groups), 0

    def cache(self, tokens_per_block: int, engines: int = 1) -> TieredCache:
        """An empty cache with the room of so many engines."""
        room = engines * self.blocks(tokens_per_block)[0]
        window_blocks = -(-(self.window_tokens - 1) // tokens_per_block)
        return SimHybridCache(HybridCache(room, self.window_groups, window_blocks))

    def engine(self, position: int, tokens_per_block: int, listener: Listener) -> SimEngine:
        """An idle engine."""
        return HybridEngine(position, self, tokens_per_block, listener)

    def fits(self, request: TraceRequest) -> bool:
        """True if the request fits into an empty engine."""
        cache = self.cache(request.chain.tokens_per_block)
        assert isinstance(cache, SimHybridCache)  # noqa: S101 - it makes no other
        return cache.pool.needs(self.blocks_of(request)) <= cache.gpu_blocks
