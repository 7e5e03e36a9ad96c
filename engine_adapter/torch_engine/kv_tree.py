"""The prefix tree over two tiers: finds, holds, stores and moves blocks, and tells of it in events.

Its parts come first: tree nodes, pools of slots, the order of eviction, retention.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from engine_adapter.errors import EngineError
from engine_adapter.types import BlocksRemoved, BlocksStored, ExtraIds, KvEvent, Retention, Tier, TokenIds

if TYPE_CHECKING:
    from engine_adapter.torch_engine.attention import KvStorage

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
    """One full block, identified by its content and its place in the tree. It lies in exactly one tier."""

    key: bytes  # the exact content: int32 tokens, then uint64 extra ids if any of them is not 0
    name: int  # 64-bit hash of the chain, unique in this cache; only a name in events
    parent: Node | None
    slot: int  # its place in the pool of `tier`, or GONE
    salt: str | None = None  # the cache salt, of a root alone
    tier: Tier = Tier.GPU
    # By key. A look-up compares content and trusts no hash.
    children: dict[bytes, Node] = field(default_factory=dict)
    gpu_children: int = 0
    refs: int = 0  # running sequences that contain this block. A block with refs lies on the GPU tier.
    pins: int = 0  # pins that protect it. A parent has at least the refs and pins of its child.
    priority: int = 0  # above 0 while it is retained (see below); a parent's is never below its child's
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
    """Evictable leaves of one tier, least valuable first. A node is pushed whenever it may have become
    evictable or changed its value. Stale entries are skipped when they surface, and swept when they outnumber
    the others."""

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
# At the limit, prompts whose next turn is expected lose theirs, then the owner with most retained blocks
# loses its oldest. An owner with few loses none.

KEPT_SHARE = 0.5
"""Share of the tier where eviction loses KV. The other half goes to the blocks used last, of any owner."""
EXPECTED = object()
"""The owner of prompts whose next turn is expected."""


class KeptBlocks:
    """The kept blocks, by owner, in the order in which they lose their retention."""

    def __init__(self, room: int, freed: Callable[[Node], None]) -> None:
        """`room`: blocks of the tier where eviction loses KV. `freed` is called with each block that loses
        its retention and stays cached."""
        self.limit = int(KEPT_SHARE * room)
        self._freed = freed
        self._owners: dict[Node, object] = {}
        self._books: dict[object, dict[Node, None]] = {}  # oldest first, and a child before its parent
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._owners)

    def keep(
        self, chain: Sequence[Node], retention: Retention, now: float, *, is_expected: bool = False
    ) -> None:
        """Retains a chain, from the root down, as far as the limit reaches. A block that is retained already
        gets the higher priority and the later end. `is_expected`: no client asked for it, so that it gives
        way to all that clients ask for."""
        if not (chain := chain[: self.limit]):
            return
        # Whole seconds, so that one look finds the ends of many requests.
        until = math.ceil(now + retention.ttl_s) if retention.ttl_s < math.inf else math.inf
        for node in reversed(chain):
            node.priority = max(node.priority, retention.priority)
            node.kept_until = max(node.kept_until, until)
            if is_expected and self._owners.get(node, EXPECTED) is not EXPECTED:
                continue
            owner = EXPECTED if is_expected else retention.owner
            self._leave_book(node)
            self._owners[node] = owner
            self._books.setdefault(owner, {})[node] = None
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
        """Expected turns lose their oldest blocks, else the owner with most does, until another has as many
        or the limit is met."""
        sizes = nlargest(2, map(len, self._books.values()))
        book = next(book for book in self._books.values() if len(book) == sizes[0])
        ahead = max(sizes[0] - sizes[1], 1) if len(sizes) > 1 else sizes[0]
        if (expected := self._books.get(EXPECTED)) is not None:
            book, ahead = expected, len(expected)
        for node in list(islice(book, min(ahead, len(self._owners) - self.limit))):
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
        del self._books[owner][node]
        if not self._books[owner]:
            del self._books[owner]


# --- the tree -------------------------------------------------------------------------------------------


class CopyFailed(EngineError):
    """Blocks could not be copied between the tiers. The tree holds only blocks whose KV is right."""


class Journal:
    """Collects the KV events of a step. Consecutive blocks of one chain become one event."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._runs: list[tuple[bool, Tier, list[Node]]] = []  # stored or removed

    def stored(self, tier: Tier, node: Node) -> None:
        """`node` now lies in `tier`."""
        self._add(True, tier, node)

    def removed(self, tier: Tier, node: Node) -> None:
        """`node` no longer lies in `tier`."""
        self._add(False, tier, node)

    def drain(self) -> list[KvEvent]:
        """The events since the last call."""
        runs, self._runs = self._runs, []
        return [
            self._event(tier, nodes) if stored else BlocksRemoved(tier, tuple(node.name for node in nodes))
            for stored, tier, nodes in runs
        ]

    def _add(self, stored: bool, tier: Tier, node: Node) -> None:
        last = self._runs[-1] if self._runs else None
        if last is None or last[:2] != (stored, tier) or (stored and last[2][-1] is not node.parent):
            self._runs.append((stored, tier, []))
        self._runs[-1][2].append(node)

    def _event(self, tier: Tier, nodes: list[Node]) -> BlocksStored:
        size = self._tokens_per_block
        extras: array[int] | None = None
        if any(len(node.key) > 4 * size for node in nodes):
            extras = array("Q", b"".join(node.key[4 * size :] or bytes(8 * size) for node in nodes))
        parent = nodes[0].parent
        return BlocksStored(
            tier=tier,
            parent=parent.name if parent is not None and parent.parent is not None else None,
            hashes=tuple(node.name for node in nodes),
            token_ids=array("i", b"".join(node.key[: 4 * size] for node in nodes)),
            tokens_per_block=size,
            extra_ids=extras,
            salt=parent.salt if parent is not None else None,
        )


@dataclass(slots=True)
class _Moves:
    """A batch of blocks that move or are dropped together."""

    copies: dict[int, int] = field(default_factory=dict)  # host slot → GPU slot; the last one counts
    offloaded: list[Node] = field(default_factory=list)
    dropped: list[tuple[Tier, Node]] = field(default_factory=list)


class KvTree:
    """Nodes by cache salt, their slots and their order of eviction. Pure except for the copier.

    Attributes:
        idle: GPU blocks that can be evicted, at once or after the leaves below them.
        leaves: evictable blocks by tier, and what each is worth there.
        totals: blocks evicted from the GPU tier, offloaded and restored since the start.
    """

    def __init__(
        self, *, gpu_blocks: int, host_blocks: int, tokens_per_block: int, copier: KvStorage
    ) -> None:
        self.gpu = BlockPool(gpu_blocks)
        self.host = BlockPool(host_blocks)
        self.tokens_per_block = tokens_per_block
        self.journal = Journal(tokens_per_block)
        self.roots: dict[str | None, Node] = {}
        self.totals = {"evicted": 0, "offloaded": 0, "restored": 0}
        self.idle = self._tick = 0
        self._names: set[int] = set()
        self._copier = copier
        # With a host tier, the GPU tier loses nothing by evicting: retention counts on the host tier only.
        self.leaves = {
            Tier.GPU: LeafQueue(Tier.GPU, Node.recency if host_blocks else Node.value),
            Tier.HOST: LeafQueue(Tier.HOST),
        }
        self.kept = KeptBlocks(host_blocks or gpu_blocks, self._offer)

    # --- finding ---------------------------------------------------------------------------------

    def walk(self, start: Node, keys: Iterable[bytes]) -> list[Node]:
        """The longest chain of cached blocks below `start` with these keys."""
        chain: list[Node] = []
        for key in keys:
            if (child := start.children.get(key)) is None:
                break
            chain.append(child)
            start = child
        return chain

    def below(self, roots: Iterable[Node]) -> Iterator[Node]:
        """All blocks below these nodes, parents first."""
        stack = [child for root in roots for child in root.children.values()][::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    # --- holding ---------------------------------------------------------------------------------

    def hold_root(self, salt: str | None) -> Node:
        """The root of a salt, which stays until `release_root`."""
        root = self.roots.get(salt)
        if root is None:
            frame = b"none" if salt is None else b"salt" + salt.encode(errors="surrogatepass")
            root = self.roots[salt] = Node(b"", xxhash.xxh3_64_intdigest(frame), None, GONE, salt)
        root.refs += 1
        return root

    def release_root(self, root: Node) -> None:
        """Undoes one `hold_root`. A root without holders and blocks is forgotten."""
        root.refs -= 1
        self._prune(root)

    def hold(self, node: Node, *, pin: bool = False) -> None:
        """Holds a block for a running sequence, or by a pin. The caller holds its ancestors too."""
        self.idle -= node.idle and node.tier is Tier.GPU
        node.pins += pin
        node.refs += not pin

    def release(self, node: Node, *, pin: bool = False) -> None:
        """Undoes one `hold`, also of a block that was dropped. Release children before their parents."""
        node.pins -= pin
        node.refs -= not pin
        if node.idle and node.slot != GONE:
            self.idle += node.tier is Tier.GPU
            self._offer(node)

    def touch(self, chain: Iterable[Node]) -> None:
        """Marks a chain, from the root down, as used now."""
        self._tick += 1
        for node in chain:
            node.last_used = self._tick
            self._offer(node)

    def _offer(self, node: Node) -> None:
        if node.evictable:
            self.leaves[node.tier].push(node)

    # --- storing ---------------------------------------------------------------------------------

    def insert(self, parent: Node, key: bytes, slot: int) -> Node:
        """Stores the block in `slot` of the GPU tier as a child of `parent`; returns its node, held. If the
        tree has that content on the GPU tier, its block is used and `slot` becomes free. If it has it on the
        host tier, the block moves up into `slot`."""
        node = parent.children.get(key)
        if node is None:
            node = Node(key, self._name(parent, key), parent, slot)
            parent.children[key] = node
            parent.gpu_children += 1
            node.refs = 1
            self.journal.stored(Tier.GPU, node)
            return node
        self.hold(node)
        if node.tier is Tier.GPU:
            self.gpu.give(slot)
        else:
            self._rise(node, slot)
            self.journal.stored(Tier.GPU, node)
            self.journal.removed(Tier.HOST, node)
        return node

    def _name(self, parent: Node, key: bytes) -> int:
        """A hash of the chain that no other node has: a hash in use is hashed again."""
        name = xxhash.xxh3_64_intdigest(parent.name.to_bytes(8, "little") + key)
        while name in self._names:
            name = xxhash.xxh3_64_intdigest(name.to_bytes(8, "little"))
        self._names.add(name)
        return name

    # --- moving ----------------------------------------------------------------------------------

    def make_room(self, count: int, below: Value | None = None) -> bool:
        """Evicts idle leaves with a value under `below` until `count` GPU slots are free. With `below`, a
        retained one stays if the host tier has no room for it. Evicts nothing if that cannot be enough.
        Returns whether there is room."""
        if self.gpu.free >= count:
            return True
        if self.gpu.free + self.idle < count:
            return False
        moves, staying = _Moves(), list[Node]()
        while self.gpu.free < count:
            victim = self.leaves[Tier.GPU].pop(below)
            if victim is None:
                break
            if not self._sink(victim, moves):
                if below is not None and victim.value() >= below:
                    staying.append(victim)
                    continue
                self._drop(victim, moves)
            self.totals["evicted"] += 1
        for node in staying:
            self._offer(node)
        self._carry_out(moves)
        return self.gpu.free >= count

    def offload(self, nodes: Iterable[Node], limit: int) -> int:
        """Moves at most `limit` idle GPU blocks to the host tier. The most valuable go first, so that none
        evicts another of them. Stops when there is no room. Returns how many moved."""
        moves = _Moves()
        for node in sorted(nodes, key=Node.value, reverse=True)[:limit]:
            if not self._sink(node, moves):
                break
        self._carry_out(moves)
        return len(moves.offloaded)

    def restore(self, nodes: Sequence[Node], slots: Sequence[int] | None = None) -> None:
        """Moves host blocks, parents first, to the GPU tier: into `slots` if given, else into free ones."""
        if not nodes:
            return
        taken: Sequence[int] = self.gpu.take_many(len(nodes)) if slots is None else ()
        slots = slots or taken
        try:
            self._copier.copy_to_gpu([node.slot for node in nodes], slots)
        except Exception as error:
            for slot in taken:
                self.gpu.give(slot)
            raise CopyFailed(f"copying {len(nodes)} blocks to the GPU failed: {error}") from error
        for node, slot in zip(nodes, slots, strict=True):
            self._rise(node, slot)
            self.journal.stored(Tier.GPU, node)
            self._offer(node)
        for node in nodes:
            self.journal.removed(Tier.HOST, node)
        self.totals["restored"] += len(nodes)

    def drop(self, nodes: Iterable[Node]) -> int:
        """Drops idle blocks with all blocks below them. Returns how many were dropped."""
        moves = _Moves()
        for node in nodes:
            if node.slot != GONE:
                self._drop(node, moves)
        self._carry_out(moves)
        return len(moves.dropped)

    def _sink(self, node: Node, moves: _Moves) -> bool:
        """Moves an idle GPU block to the host tier; if that is full, in place of a leaf of less value."""
        if not self.host.free:
            leaf = self.leaves[Tier.HOST].pop(below=node.value())
            if leaf is None:
                return False
            self._drop(leaf, moves)
        slot = self.host.take()
        moves.copies[slot] = node.slot
        moves.offloaded.append(node)
        self.gpu.give(node.slot)
        self.idle -= 1
        node.tier, node.slot = Tier.HOST, slot
        self._lose_gpu_child(node)
        self._offer(node)
        return True

    def _rise(self, node: Node, slot: int) -> None:
        """Enters that a host block now lies in `slot` of the GPU tier."""
        self.host.give(node.slot)
        node.tier, node.slot = Tier.GPU, slot
        self.idle += node.idle
        if node.parent is not None:
            node.parent.gpu_children += 1

    def _drop(self, top: Node, moves: _Moves) -> None:
        """Drops an idle block and all blocks below it (idle too), deepest first."""
        for node in reversed([top, *self.below([top])]):
            moves.dropped.append((node.tier, node))
            if node.tier is Tier.GPU:
                self.gpu.give(node.slot)
                self.idle -= 1
                self._lose_gpu_child(node)
            else:
                self.host.give(node.slot)
            node.slot = GONE
            self.kept.forget(node)
            self._names.discard(node.name)
            if (parent := node.parent) is not None:
                del parent.children[node.key]
                self._offer(parent)
                self._prune(parent)

    def _lose_gpu_child(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.gpu_children -= 1
            self._offer(node.parent)

    def _prune(self, root: Node) -> None:
        if root.parent is None and not root.children and not root.refs:
            del self.roots[root.salt]

    def _carry_out(self, moves: _Moves) -> None:
        """Copies the blocks that moved and journals it: stored on the host tier first, then removed above."""
        try:
            if moves.copies:
                self._copier.copy_to_host(array("i", moves.copies.values()), array("i", moves.copies))
        except Exception as error:
            self._lose(moves)
            raise CopyFailed(f"copying {len(moves.copies)} blocks to the host failed: {error}") from error
        self.totals["offloaded"] += len(moves.offloaded)
        for node in sorted(moves.offloaded, key=Node.value, reverse=True):
            self.journal.stored(Tier.HOST, node)
        for node in moves.offloaded:
            self.journal.removed(Tier.GPU, node)
        for tier, node in moves.dropped:
            self.journal.removed(tier, node)

    def _lose(self, moves: _Moves) -> None:
        """Drops the blocks whose copy failed, with all below them: their host slots hold other bytes."""
        moved = set(moves.offloaded)
        for node in moves.offloaded:
            if node.slot != GONE:
                self._drop(node, moves)
        for tier, node in moves.dropped:
            self.journal.removed(Tier.GPU if node in moved else tier, node)
