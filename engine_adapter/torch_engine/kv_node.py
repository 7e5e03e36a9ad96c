"""The parts of the KV cache: a tree node, a pool of slots, and the order of eviction."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from engine_adapter.types import Tier

NEVER = -math.inf
GONE = -1
"""Slot of a node that no longer holds a block, and of a root, which never does."""


class Value(NamedTuple):
    """What a block is worth; the smallest goes first. A parent is never worth less than its child."""

    priority: int
    last_used: int
    height: int  # minus the depth: of two blocks used together, the deeper one goes first


class Node:
    """One full block, known by its content and its place in the tree; it lies in exactly one tier.

    Attributes:
        key: the content, exactly: int32 tokens, then uint64 extra ids if any of them is not 0.
        children: by key; a look-up compares content, so that no hash is trusted.
        name: 64-bit hash of the chain, unique in this cache; a name in events and nothing else.
        slot: where it lies in the pool of `tier`, or GONE.
        refs: running sequences whose prompt or output goes through it; then it lies on the GPU tier.
        pins: pins that protect it. Refs and pins of a child are also held by its parent.
        priority: above 0 while it is kept (see `kv_kept.py`); a parent's is never below its child's.
        kept_until: when that ends.
    """

    __slots__ = (
        "children",
        "depth",
        "gpu_children",
        "kept_until",
        "key",
        "last_used",
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
        self.gpu_children = 0
        self.refs = 0
        self.pins = 0
        self.depth: int = parent.depth + 1 if parent else 0
        self.priority: int = 0
        self.kept_until: float = NEVER
        self.last_used: int = parent.last_used if parent else 0

    @property
    def idle(self) -> bool:
        """True when nobody needs it to stay where it is."""
        return not (self.refs or self.pins)

    @property
    def evictable(self) -> bool:
        """True for an idle leaf: on the GPU tier one without children there, on the host tier one without
        any (what hangs below a dropped block could never be found again)."""
        below = self.gpu_children if self.tier is Tier.GPU else len(self.children)
        return self.slot != GONE and self.idle and not below

    @property
    def value(self) -> Value:
        """What it is worth where leaving means that it is lost; see `Value`."""
        return Value(self.priority, self.last_used, -self.depth)

    @property
    def recency(self) -> Value:
        """What it is worth where it only moves down a tier: that it is to be kept says nothing of how soon
        it is needed."""
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
    """The slots of one tier. Low ones are handed out first, so that sequences tend to lie in one piece."""

    __slots__ = ("_free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self) -> int:
        """A free slot; the caller knows that there is one."""
        return heapq.heappop(self._free)

    def take_many(self, number: int) -> array[int]:
        """So many free slots; the caller knows that they are there."""
        return array("i", [heapq.heappop(self._free) for _ in range(number)])

    def give(self, slot: int) -> None:
        """Takes a slot back."""
        heapq.heappush(self._free, slot)

    def free_slots(self) -> list[int]:
        """The free slots, in no order."""
        return list(self._free)


class LeafQueue:
    """Evictable leaves of one tier, least valuable first.

    A node is pushed whenever it may have become evictable or changed its value; entries that no longer
    hold are skipped when they surface, and swept when they are the greater part.
    """

    __slots__ = ("_heap", "_limit", "_serial", "_tier", "worth")

    def __init__(self, tier: Tier, worth: Callable[[Node], Value] = by_value) -> None:
        """`worth` says what a node is worth on this tier."""
        self.worth = worth
        self._tier = tier
        self._heap: list[tuple[Value, int, Node]] = []
        self._serial = count()
        self._limit = 64

    def push(self, node: Node) -> None:
        """Makes an evictable node known."""
        heapq.heappush(self._heap, (self.worth(node), next(self._serial), node))
        if len(self._heap) > self._limit:
            self._sweep()

    def pop(self, below: Value | None = None) -> Node | None:
        """Takes out the least valuable leaf, if it is worth less than `below`; None when there is none."""
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
        """The nodes that `pop` would return if asked often enough."""
        return {node for value, _, node in self._heap if self._holds(value, node)}

    def _holds(self, value: Value, node: Node) -> bool:
        return node.tier is self._tier and node.evictable and self.worth(node) == value

    def _sweep(self) -> None:
        self._heap = [(self.worth(node), next(self._serial), node) for node in self.nodes()]
        heapq.heapify(self._heap)
        self._limit = 2 * len(self._heap) + 64
