"""The parts of the KV cache: tree nodes, pools of slots, and the order of eviction."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import count, islice
from typing import NamedTuple

from engine_adapter.types import ExtraIds, Retention, Tier, TokenIds

NEVER = -math.inf
GONE = -1
"""The slot of a node without a block: a dropped node, or a root."""


def block_key(
    token_ids: TokenIds[int], extra_ids: ExtraIds[int] | None, index: int, tokens_per_block: int
) -> bytes:
    """Key (see `Node.key`) of block `index` of a prompt."""
    part = slice(index * tokens_per_block, (index + 1) * tokens_per_block)
    tokens = token_ids[part].tobytes()
    if extra_ids is None or not any(extra_ids[part]):
        return tokens
    return tokens + extra_ids[part].tobytes()


class Value(NamedTuple):
    """The value of a block: the smallest is evicted first. A parent's is never below its child's."""

    priority: int
    last_used: int
    height: int  # minus the depth: of two blocks used at once, the deeper one is evicted first


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """One full block, identified by its content and its place in the tree. It lies in exactly one tier.

    Attributes:
        key: the exact content: int32 tokens, then uint64 extra ids if any of them is not 0.
        children: by key. A look-up compares content and trusts no hash.
        name: 64-bit hash of the chain, unique in this cache; only a name in events.
        slot: its place in the pool of `tier`, or GONE.
        refs: running sequences that contain this block. A block with refs lies on the GPU tier.
        pins: pins that protect it. A parent has at least the refs and pins of its child.
        priority: above 0 while it is retained (see below); a parent's is never below its child's.
        kept_until: when the retention ends.
        salt: the cache salt, of a root alone.
    """

    key: bytes
    name: int
    parent: Node | None
    slot: int
    salt: str | None = None
    tier: Tier = Tier.GPU
    children: dict[bytes, Node] = field(default_factory=dict)
    gpu_children: int = 0
    refs: int = 0
    pins: int = 0
    priority: int = 0
    kept_until: float = NEVER
    depth: int = field(init=False)
    last_used: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth = self.parent.depth + 1 if self.parent else 0
        self.last_used = self.parent.last_used if self.parent else 0

    @property
    def idle(self) -> bool:
        """True when no running sequence and no pin holds it."""
        return not (self.refs or self.pins)

    @property
    def evictable(self) -> bool:
        """True for an idle leaf. On the GPU tier, a leaf has no children there. On the host tier, it has no
        children at all: no look-up finds them below a dropped block."""
        below = self.gpu_children if self.tier is Tier.GPU else len(self.children)
        return self.slot != GONE and self.idle and not below

    def value(self) -> Value:
        """Its value on a tier where eviction loses it."""
        return Value(self.priority, self.last_used, -self.depth)

    def recency(self) -> Value:
        """Its value on a tier where eviction only moves it down. Retention does not count: it says nothing
        about how soon a block is needed."""
        return Value(0, self.last_used, -self.depth)


class BlockPool:
    """The slots of one tier. Low slots go first: while there is room, a prompt's blocks lie side by side."""

    __slots__ = ("_free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """Takes a free slot. The caller has checked that one is free."""
        return heapq.heappop(self._free)

    def take_many(self, number: int) -> array[int]:
        """Takes `number` free slots. The caller has checked that they are free."""
        return array("i", [self.take() for _ in range(number)])

    def give(self, slot: int) -> None:
        """Takes a slot back."""
        heapq.heappush(self._free, slot)


class LeafQueue:
    """Evictable leaves of one tier, least valuable first.

    A node is pushed whenever it may have become evictable or changed its value. Stale entries are skipped
    when they surface, and swept when they outnumber the others.
    """

    __slots__ = ("_heap", "_limit", "_serial", "_tier", "worth")

    def __init__(self, tier: Tier, worth: Callable[[Node], Value] = Node.value) -> None:
        """`worth` gives the value of a node on this tier."""
        self.worth = worth
        self._tier = tier
        self._heap: list[tuple[Value, int, Node]] = []
        self._serial = count()
        self._limit = 64

    def push(self, node: Node) -> None:
        """Adds an evictable node."""
        heapq.heappush(self._heap, (self.worth(node), next(self._serial), node))
        if len(self._heap) > self._limit:
            self._heap = [(self.worth(node), next(self._serial), node) for node in self.nodes()]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def pop(self, below: Value | None = None) -> Node | None:
        """Removes and returns the least valuable leaf with a value under `below`; None when there is none."""
        while self._heap:
            value, _, node = self._heap[0]
            current = self._holds(value, node)
            if current and below is not None and value >= below:
                return None
            heapq.heappop(self._heap)
            if current:
                return node
        return None

    def nodes(self) -> set[Node]:
        """All nodes that repeated calls of `pop` would return."""
        return {node for value, _, node in self._heap if self._holds(value, node)}

    def _holds(self, value: Value, node: Node) -> bool:
        return node.tier is self._tier and node.evictable and self.worth(node) == value


# --- retention: the blocks that requests asked to keep leave the cache after all others, for a while ----
# Retention is limited to a share of the tier where eviction loses KV, so that no client can fill the cache.
# At the limit, the owner with most retained blocks loses its oldest retention. An owner with few loses
# none.

KEPT_SHARE = 0.5
"""Share of the tier where eviction loses KV. The other half goes to the blocks used last, of any owner."""


class KeptBlocks:
    """The kept blocks, by owner, in the order in which they lose their retention.

    Args:
        room: blocks of the tier where eviction loses KV.
        freed: called with each block that loses its retention and stays cached.
    """

    def __init__(self, room: int, freed: Callable[[Node], None]) -> None:
        self.limit = int(KEPT_SHARE * room)
        self._freed = freed
        self._owners: dict[Node, str | None] = {}
        self._books: dict[str | None, dict[Node, None]] = {}  # oldest first, and a child before its parent
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._owners)

    def keep(self, chain: Sequence[Node], retention: Retention, now: float) -> None:
        """Retains a chain, from the root down, as far as the limit reaches. A block that is retained already
        gets the higher priority and the later end."""
        chain = chain[: self.limit]
        if not chain:
            return
        # Whole seconds, so that one look finds the ends of many requests.
        until = math.ceil(now + retention.ttl_s) if retention.ttl_s < math.inf else math.inf
        for node in reversed(chain):
            self._leave_book(node)
            node.priority = max(node.priority, retention.priority)
            node.kept_until = max(node.kept_until, until)
            self._owners[node] = retention.owner
            self._books.setdefault(retention.owner, {})[node] = None
        self._next_end = min(self._next_end, until)
        while len(self._owners) > self.limit:
            self._shorten()

    def fitting(self, chain: Sequence[Node]) -> Sequence[Node]:
        """The part of a chain, from the root down, that can be retained with no loss of another retention."""
        fresh = (index for index, node in enumerate(chain) if node not in self._owners)
        return chain[: next(islice(fresh, self.limit - len(self), None), len(chain))]

    def expire(self, now: float) -> None:
        """Ends the retentions whose time has passed."""
        if now < self._next_end:
            return
        for node in [node for node in self._owners if node.kept_until <= now]:
            self._free(node)
        self._next_end = min((node.kept_until for node in self._owners), default=math.inf)

    def forget(self, node: Node) -> None:
        """Forgets a block that left the cache. A block without retention is ignored."""
        self._leave_book(node)
        node.priority, node.kept_until = 0, NEVER

    def _shorten(self) -> None:
        """The owner with most blocks loses its oldest, until another has as many or the limit is met."""
        sizes = nlargest(2, map(len, self._books.values()))
        largest = next(book for book in self._books.values() if len(book) == sizes[0])
        ahead = max(sizes[0] - sizes[1], 1) if len(sizes) > 1 else sizes[0]
        for node in list(islice(largest, min(ahead, len(self._owners) - self.limit))):
            self._free(node)

    def _free(self, node: Node) -> None:
        """Ends the retention of a block and of the blocks below it: a child never outranks its parent."""
        if node not in self._owners:
            return
        found, seen = [node], 0
        while seen < len(found):
            found += [child for child in found[seen].children.values() if child in self._owners]
            seen += 1
        for each in reversed(found):
            self.forget(each)
            self._freed(each)

    def _leave_book(self, node: Node) -> None:
        if node not in self._owners:
            return
        owner = self._owners.pop(node)
        book = self._books[owner]
        del book[node]
        if not book:
            del self._books[owner]
