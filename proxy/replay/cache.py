"""The caches of simulated engines: blocks on the GPU and in a host tier, and with sliding-window layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.index.blocks import BlockHash, Chain

if TYPE_CHECKING:
    from proxy.replay.trace import TraceRequest


# --- the cache of a simulated engine: blocks on the GPU, and a host tier of its own ---------------------
# As in real engines, blocks of running requests stay. Of the others the least recently used is evicted
# first, and the end of a prompt before its beginning. Blocks evicted from the GPU go to the host tier, and
# stay there when they are restored.


@dataclass(frozen=True, slots=True)
class Taken:
    """The blocks that a starting request found, and those that were evicted for it.

    Attributes:
        gpu: leading blocks of its chain found on the GPU.
        host: further blocks found on the host tier, which must be restored.
        evicted: blocks that left the GPU.
        out_of_window: blocks that left the window groups, see `hybrid_cache`.
        gone: blocks that left the host tier.
        boundaries: where windows are kept, in blocks of the prompt.
    """

    gpu: int
    host: int
    evicted: Sequence[BlockHash]
    out_of_window: Sequence[BlockHash] = ()
    gone: Sequence[BlockHash] = ()
    boundaries: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Filled:
    """The blocks that are new when a prefill ends, and those that were evicted for them.

    `new_in_window` and `out_of_window` are those of the window groups, see `hybrid_cache`."""

    new: Sequence[BlockHash]
    new_in_window: Sequence[BlockHash] = ()
    evicted: Sequence[BlockHash] = ()
    out_of_window: Sequence[BlockHash] = ()


class TieredCache:
    """One engine's blocks. A request takes its blocks when its prefill starts, fills them when that ends, and
    releases them when it has finished. One prefill runs at a time."""

    def __init__(self, gpu_blocks: int, host_blocks: int = 0) -> None:
        self.gpu_blocks = gpu_blocks
        self.host_blocks = host_blocks
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._used: dict[BlockHash, int] = {}  # running requests that use a block
        self._private = 0  # blocks of running requests that no match finds: being filled, tails, answers
        self._host: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first

    @property
    def held(self) -> int:
        """Blocks on the GPU that a match could find."""
        return len(self._idle) + len(self._used)

    @property
    def occupied(self) -> int:
        """Blocks on the GPU that are not empty."""
        return self.held + self._private

    def match(
        self,
        chain: Chain,
        coming: AbstractSet[BlockHash] = frozenset(),
        ends: AbstractSet[BlockHash] = frozenset(),
    ) -> tuple[int, int]:
        """Leading blocks of the chain on the GPU, and those only on the host tier. Blocks in `coming` count
        as on the GPU; `ends` are for `HybridCache`."""
        gpu = host = 0
        for block in chain.hashes:
            if block in self._used or block in self._idle or block in coming:
                gpu += 1
            elif block in self._host:
                host += 1
            else:
                break
        return gpu, host

    def take(self, chain: Chain, blocks: int) -> Taken | None:
        """Takes room for a request of `blocks` blocks that begin with the chain; None if there is not
        enough."""
        gpu, host = self.match(chain)
        used, idle = self._used, self._idle
        found = chain.hashes[: gpu + host]
        asleep = sum(block in idle for block in found)
        fresh = blocks - gpu
        if len(used) + asleep + self._private + fresh > self.gpu_blocks:
            return None
        for block in found:
            if block in used:
                used[block] += 1
            elif block in idle:
                del idle[block]
                used[block] = 1
        surplus = self.occupied + fresh - self.gpu_blocks
        evicted = [idle.popitem(last=False)[0] for _ in range(surplus)]
        self._private += fresh
        return Taken(gpu, host, evicted, gone=self._lower(evicted, found))

    def fill(
        self,
        hashes: Sequence[BlockHash],
        since: int,
        boundaries: Sequence[int] = (),
    ) -> Filled:
        """The prefill has ended: matches find the chain from now on. Its blocks before `since` were found on
        the GPU; `boundaries` are for `HybridCache`."""
        used = self._used
        new = [block for block in hashes[since:] if block not in used]
        for block in new:
            used[block] = 1
        self._private -= len(new)
        return Filled(new)

    def release(self, hashes: Sequence[BlockHash], blocks: int) -> None:
        """The request has finished. Its blocks stay until others need the room."""
        used, idle = self._used, self._idle
        for block in reversed(hashes):
            users = used[block] - 1
            if users:
                used[block] = users
            else:
                del used[block]
                idle[block] = None
        self._private -= blocks - len(hashes)

    def needs(self, blocks: int) -> int:
        """Blocks on the GPU for a request of `blocks` blocks."""
        return blocks

    def _lower(self, evicted: Sequence[BlockHash], found: Sequence[BlockHash]) -> list[BlockHash]:
        """Writes evicted blocks to the host tier and marks those found there as used. Returns the blocks that
        the host tier evicted."""
        host = self._host
        if not self.host_blocks:
            return []
        for block in evicted:
            host[block] = None
            host.move_to_end(block)
        for block in reversed(found):
            if block in host:
                host.move_to_end(block)
        return [host.popitem(last=False)[0] for _ in range(len(host) - self.host_blocks)]


# --- answers --------------------------------------------------------------------------------------------
# The blocks that answers leave in a cache. A recording tells them as blocks of the prompt that goes on.


def answer_blocks(requests: Sequence[TraceRequest]) -> list[tuple[BlockHash, ...]]:
    """The full blocks after the prompt that each request's answer completes, in the order of the requests;
    none where no later prompt goes on with the answer.

    The last token of an answer is never computed, so that it fills no block.
    """
    found: list[tuple[BlockHash, ...]] = [()] * len(requests)
    last_of, ending = dict[str, int](), dict[BlockHash, int]()
    for at, request in enumerate(requests):
        hashes = request.chain.hashes
        if request.session is not None:
            before = last_of.get(request.session)
            last_of[request.session] = at
        else:
            before = next((ending[block] for block in reversed(hashes) if block in ending), None)
            if hashes:
                ending[hashes[-1]] = at
        if before is not None:
            found[before] = found[before] or _between(requests[before], hashes)
    return found


def _between(request: TraceRequest, later: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
    """The blocks of a later prompt that the request's answer completes; none if it does not go on."""
    own = len(request.chain.hashes)
    full = (request.n_tokens + request.output_tokens - 1) // request.chain.tokens_per_block
    return tuple(later[own:full]) if tuple(later[:own]) == request.chain.hashes else ()


# --- hybrid cache ---------------------------------------------------------------------------------------
# The cache of an engine with sliding-window layers: groups of layers that share one pool of blocks.
#
# The rules are vLLM's (vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py):
#
# - One group of layers has full attention and holds every block of a prompt. The others have a window.
# - A prompt is reused up to a boundary. Full attention needs all blocks before it, a window group the last
#   `window_blocks` before it; the leading blocks count too if there are not as many.
# - A running request holds its blocks of full attention, and in window groups those of its window.
# - Window groups keep few blocks: the last window of each prompt, and the one before the point up to which
#   full attention held more than the prompt could reuse. The others are free as soon as the window has left
#   them. This is vLLM's default, `prefix_cache_retention_interval` 0.
# - All groups evict from one list, the least recently used block first. A request that ends frees its
#   window before its blocks of full attention, and of each the end before the beginning.
#
# Three simplifications: window groups have equal windows, so they hold the same blocks, and these leave
# together. A block that is computed again takes the place of its old copy. The window before the end of an
# answer is kept, too.


class _InWindow(NamedTuple):
    """A block as the window groups hold it: one block of the pool for each of them."""

    block: BlockHash


_Held = BlockHash | _InWindow


class HybridCache:
    """One engine's blocks; see `TieredCache`. It has no host tier.

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

    def take(self, chain: Chain, blocks: int) -> Taken | None:
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
        return Taken(reused, 0, *self._evict(), boundaries=(chain.reusable, full))

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
