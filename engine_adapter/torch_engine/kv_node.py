"""The parts of the KV cache: tree nodes, pools of slots, and the order of eviction."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from engine_adapter.torch_engine.kv_leftovers import Leftovers
from engine_adapter.types import Tier

NEVER = -math.inf
GONE = -1
"""The slot of a node without a block: a dropped node, or a root."""


class Value(NamedTuple):
    """The value of a block: the smallest is evicted first. A parent's is never below its child's."""

    priority: int
    last_used: int
    height: int  # minus the depth: of two blocks used at once, the deeper one is evicted first


class Node:
    """One full block, identified by its content and its place in the tree. It lies in exactly one tier.

    Attributes:
        key: the exact content: int32 tokens, then uint64 extra ids if any of them is not 0.
        children: by key. A look-up compares content and trusts no hash.
        leftovers: slots with the beginning of a child, by its tokens; see `kv_leftovers.py`.
        name: 64-bit hash of the chain, unique in this cache; only a name in events.
        slot: its place in the pool of `tier`, or GONE.
        refs: running sequences that contain this block. A block with refs lies on the GPU tier.
        pins: pins that protect it. A parent has at least the refs and pins of its child.
        priority: above 0 while it is retained (see `kv_kept.py`); a parent's is never below its child's.
        kept_until: when the retention ends.
    """

    __slots__ = (
        "children",
        "depth",
        "gpu_children",
        "kept_until",
        "key",
        "last_used",
        "leftovers",
        "name",
        "parent",
        "pins",
        "priority",
        "refs",
        "slot",
        "tier",
    )

    def __init__(self, key: bytes, name: int, parent: Node | None, slot: int) -> None:
        self.key = key
        self.name = name
        self.parent = parent
        self.slot = slot
        self.tier = Tier.GPU
        self.children: dict[bytes, Node] = {}
        self.leftovers: dict[bytes, int] = {}
        self.gpu_children = 0
        self.refs = 0
        self.pins = 0
        self.depth: int = parent.depth + 1 if parent else 0
        self.priority: int = 0
        self.kept_until: float = NEVER
        self.last_used: int = parent.last_used if parent else 0

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

    @property
    def value(self) -> Value:
        """Its value on a tier where eviction loses it."""
        return Value(self.priority, self.last_used, -self.depth)

    @property
    def recency(self) -> Value:
        """Its value on a tier where eviction only moves it down. Retention does not count: it says nothing
        about how soon a block is needed."""
        return Value(0, self.last_used, -self.depth)

    def tokens(self, tokens_per_block: int) -> bytes:
        """The token ids, as int32 bytes."""
        return self.key[: 4 * tokens_per_block]

    def extra_ids(self, tokens_per_block: int) -> bytes:
        """The extra ids, as uint64 bytes; empty when all are 0."""
        return self.key[4 * tokens_per_block :]


def by_value(node: Node) -> Value:
    """See `Node.value`."""
    return node.value


def by_recency(node: Node) -> Value:
    """See `Node.recency`."""
    return node.recency


class BlockPool:
    """The slots of one tier. Low slots go first: while there is room, a prompt's blocks lie side by side.
    Slots that hold leftovers go last, the oldest first."""

    __slots__ = ("_free", "_leftovers", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._leftovers = Leftovers()

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free) + len(self._leftovers)

    def take(self) -> int:
        """Takes a free slot. The caller has checked that one is free."""
        return heapq.heappop(self._free) if self._free else self._leftovers.take_oldest()

    def take_many(self, number: int) -> array[int]:
        """Takes `number` free slots. The caller has checked that they are free."""
        return array("i", [self.take() for _ in range(number)])

    def give(self, slot: int) -> None:
        """Takes a slot back."""
        heapq.heappush(self._free, slot)

    def leave(self, slot: int, parent: Node, tokens: bytes) -> None:
        """Takes a slot back that holds the beginning of a block: the text `tokens` below `parent`."""
        if not self._leftovers.add(slot, parent, tokens):
            self.give(slot)

    def forget_leftovers(self) -> None:
        """Forgets the content of all free slots."""
        while self._leftovers:
            self.give(self._leftovers.take_oldest())

    def free_slots(self) -> list[int]:
        """The free slots, in no particular order."""
        return self._free + self._leftovers.slots()


class LeafQueue:
    """Evictable leaves of one tier, least valuable first.

    A node is pushed whenever it may have become evictable or changed its value. Stale entries are skipped
    when they surface, and swept when they outnumber the others.
    """

    __slots__ = ("_heap", "_limit", "_serial", "_tier", "worth")

    def __init__(self, tier: Tier, worth: Callable[[Node], Value] = by_value) -> None:
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
            self._sweep()

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

    def _sweep(self) -> None:
        self._heap = [(self.worth(node), next(self._serial), node) for node in self.nodes()]
        heapq.heapify(self._heap)
        self._limit = 2 * len(self._heap) + 64
