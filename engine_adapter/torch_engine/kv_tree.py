"""The prefix tree over two tiers: finds, holds, stores and moves blocks, and tells of it in events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from engine_adapter.errors import EngineError
from engine_adapter.torch_engine.kv_node import GONE, BlockPool, KeptBlocks, LeafQueue, Node, Value
from engine_adapter.types import BlocksRemoved, BlocksStored, KvEvent, Tier

if TYPE_CHECKING:
    from engine_adapter.torch_engine.attention import KvStorage


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
            last = stored, tier, []
            self._runs.append(last)
        last[2].append(node)

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
        kept: retained blocks.
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
        self.idle = 0
        self._names: set[int] = set()
        self._copier = copier
        # With a host tier, the GPU tier loses nothing by evicting: retention counts on the host tier only.
        self._leaves = {
            Tier.GPU: LeafQueue(Tier.GPU, Node.recency if host_blocks else Node.value),
            Tier.HOST: LeafQueue(Tier.HOST),
        }
        self.kept = KeptBlocks(host_blocks or gpu_blocks, self._offer)
        self._tick = 0

    # --- finding ---------------------------------------------------------------------------------

    def walk(self, start: Node, keys: Iterable[bytes]) -> list[Node]:
        """The longest chain of cached blocks below `start` with these keys."""
        chain: list[Node] = []
        for key in keys:
            child = start.children.get(key)
            if child is None:
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

    def worth(self, tier: Tier, node: Node) -> Value:
        """The value of a block on a tier."""
        return self._leaves[tier].worth(node)

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

    def hold(self, node: Node) -> None:
        """Holds a block for a running sequence."""
        self._leave_idle(node)
        node.refs += 1

    def release(self, node: Node) -> None:
        """Undoes one `hold`. Release children before their parents."""
        node.refs -= 1
        self._enter_idle(node)

    def pin(self, node: Node) -> None:
        """Protects a block. The caller pins its ancestors too."""
        self._leave_idle(node)
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Undoes one `pin`, also of a block that was dropped."""
        node.pins -= 1
        self._enter_idle(node)

    def touch(self, chain: Iterable[Node]) -> None:
        """Marks a chain, from the root down, as used now."""
        self._tick += 1
        for node in chain:
            node.last_used = self._tick
            self._offer(node)

    def _leave_idle(self, node: Node) -> None:
        if node.idle and node.tier is Tier.GPU:
            self.idle -= 1

    def _enter_idle(self, node: Node) -> None:
        if node.idle and node.slot != GONE:
            if node.tier is Tier.GPU:
                self.idle += 1
            self._offer(node)

    def _offer(self, node: Node) -> None:
        if node.evictable:
            self._leaves[node.tier].push(node)

    # --- storing ---------------------------------------------------------------------------------

    def insert(self, parent: Node, key: bytes, slot: int) -> Node:
        """Stores the block in `slot` of the GPU tier as a child of `parent`; returns its node, held.

        If the tree has that content on the GPU tier, its block is used and `slot` becomes free. If it has
        it on the host tier, the block moves up into `slot`.
        """
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
        retained one stays if the host tier has no room for it.

        Evicts nothing if that cannot be enough. Returns whether there is room.
        """
        if self.gpu.free >= count:
            return True
        if self.gpu.free + self.idle < count:
            return False
        moves, staying = _Moves(), list[Node]()
        while self.gpu.free < count:
            victim = self._leaves[Tier.GPU].pop(below)
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
            leaf = self._leaves[Tier.HOST].pop(below=node.value())
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
        if node.idle:
            self.idle += 1
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
            parent = node.parent
            if parent is not None:
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
