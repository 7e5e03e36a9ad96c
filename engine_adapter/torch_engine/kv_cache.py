"""The KV cache: the blocks of running sequences, and the blocks kept after them.

Pure: it decides, a `KvStorage` copies. A sequence begins with the longest cached prefix of its tokens and
grows by free blocks. Its full blocks enter the tree as soon as they are computed.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_adapter.torch_engine.kv_tree import Journal, KvTree, Node, block_key
from engine_adapter.torch_engine.requests import PinLimitReached
from engine_adapter.types import NOT_RETAINED, KvEvent, KvTarget, Pinned, Retention, Tier

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The result of one slice of a flush, offload or restore, in blocks."""

    moved: int  # blocks dropped or moved
    bytes: int  # their size
    remaining: int  # blocks that another call can still move
    left: dict[str, int]  # blocks that could not move, by reason: `in_use`, `pinned`, `no_room`


@dataclass(frozen=True, slots=True)
class _Pin:
    nodes: list[Node]
    expires: float


@dataclass(eq=False, slots=True)
class KvSequence:
    """The tokens of one request and where their KV lies."""

    # tokens, extra_ids: prompt and output so far.
    tokens: array[int]
    extra_ids: array[int] | None
    salt: str | None
    retention: Retention = NOT_RETAINED  # how long to retain these blocks after the end, and for whom
    reuses: bool = True  # whether it begins with cached blocks. All sequences leave theirs to others.
    # Extra id → [rows, hidden]; a fake id stands for row `id - vocab_size`.
    embeddings: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    root: Node | None = None  # of the tree, while it runs
    path: list[Node] = field(default_factory=list)  # the full blocks of the tree that the sequence holds
    # All reserved GPU slots, in order; the first `len(path)` belong to the tree.
    blocks: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0  # tokens whose KV lies in `blocks`
    count: int = 0  # tokens that the next step computes. Blocks are reserved for them.
    logits: int = 0  # after how many of the last of them logits are needed

    def __post_init__(self) -> None:
        self.tokens = array("i", self.tokens)  # copies, as they grow
        if self.extra_ids is not None:
            self.extra_ids = array("Q", self.extra_ids)

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self.tokens.append(token)
        if self.extra_ids is not None:
            self.extra_ids.append(0)

    @property
    def tip(self) -> Node:
        """The last block of `path`, or the root. Raises ValueError before the sequence has begun."""
        if self.path:
            return self.path[-1]
        if self.root is None:
            raise ValueError("the sequence has not begun")
        return self.root


class KvCache:
    """The blocks of both tiers in a prefix tree. Not thread-safe: use it through `EngineCore.call`."""

    def __init__(self, tree: KvTree, *, block_bytes: int, pin_share: float) -> None:
        """Pins hold at most `pin_share` of the GPU tier."""
        self.tree = tree
        self.tokens_per_block = tree.tokens_per_block
        self.pinned_blocks = 0  # under at least one pin
        self._block_bytes = block_bytes
        self._pin_limit = int(pin_share * tree.gpu.total)
        self._pins: dict[str, _Pin] = {}
        self._now = 0.0

    # --- sequences -------------------------------------------------------------------------------

    def begin(self, sequence: KvSequence, *, spare: int = 0) -> bool:
        """Reserves blocks for all tokens of a sequence; its cached prefix is reused, host blocks of it are
        restored. Needs room for `spare` more blocks, but does not reserve them. `computed` then counts the
        reused tokens. The last token is never among them. Without room, returns False and changes nothing."""
        root = self.tree.hold_root(sequence.salt)
        path = self.tree.walk(root, self._keys_after(sequence, 0)) if sequence.reuses else []
        for node in path:
            self.tree.hold(node)
        sequence.root, sequence.path = root, path  # from here on, `end` undoes it if a copy fails
        on_host = [node for node in path if node.tier is Tier.HOST]
        fresh = self._blocks_for(len(sequence.tokens)) - len(path)
        needed = fresh + len(on_host)
        if needed + spare > self.tree.gpu.free + self.tree.idle:
            self._let_go(sequence, root)
            return False
        self.tree.make_room(needed)
        self.tree.restore(on_host)
        self.tree.touch(path)
        sequence.blocks = array("i", [node.slot for node in path]) + self.tree.gpu.take_many(fresh)
        sequence.computed = len(path) * self.tokens_per_block
        return True

    def extend(self, sequence: KvSequence) -> None:
        """Replaces reserved blocks by blocks that other sequences have computed since `begin`. Works only at
        a block boundary, and never covers the last token."""
        size = self.tokens_per_block
        held = len(sequence.path)
        if sequence.computed != held * size or not sequence.reuses:
            return
        more = self.tree.walk(sequence.tip, self._keys_after(sequence, held))
        for index, node in enumerate(more, start=held):
            if node.tier is Tier.HOST:
                self.tree.restore([node], [sequence.blocks[index]])
            else:
                self.tree.gpu.give(sequence.blocks[index])
                sequence.blocks[index] = node.slot
            self.tree.hold(node)
            sequence.path.append(node)
            sequence.computed += size

    def reserve(self, sequence: KvSequence, tokens: int) -> bool:
        """Reserves blocks for the first `tokens` tokens. Without room, returns False and changes nothing."""
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if not self.tree.make_room(missing):
            return False
        sequence.blocks += self.tree.gpu.take_many(missing)
        return True

    def advance(self, sequence: KvSequence, count: int) -> None:
        """Counts `count` more tokens as computed. Blocks that are full now enter the tree, for all to use."""
        sequence.computed += count
        while (index := len(sequence.path)) < sequence.computed // self.tokens_per_block:
            node = self.tree.insert(sequence.tip, self.key_of(sequence, index), sequence.blocks[index])
            sequence.blocks[index] = node.slot
            sequence.path.append(node)

    def end(self, sequence: KvSequence) -> None:
        """Releases the blocks of a sequence: full blocks stay cached, others become free. Twice is fine. Its
        retention starts at the time of the last `expire`."""
        if (root := sequence.root) is None:
            return
        for slot in sequence.blocks[len(sequence.path) :]:
            self.tree.gpu.give(slot)
        self.tree.touch(sequence.path)
        if sequence.retention.priority > 0:
            self.tree.kept.keep(sequence.path, sequence.retention, self._now)
        self._let_go(sequence, root)

    def _let_go(self, sequence: KvSequence, root: Node) -> None:
        for node in reversed(sequence.path):
            self.tree.release(node)
        self.tree.release_root(root)
        sequence.root, sequence.path, sequence.blocks, sequence.computed = None, [], array("i"), 0

    def await_turn(self, target: KvTarget, retention: Retention, now: float) -> None:
        """Retains the blocks of a prompt that has ended, as far as nothing else loses its retention for it:
        its next turn is expected soon."""
        chain = self.tree.kept.fitting(self._scope(target))
        for node in chain:
            self.tree.hold(node)
        self.tree.kept.keep(chain, retention, now, is_expected=True)
        for node in reversed(chain):
            self.tree.release(node)

    def key_of(self, sequence: KvSequence, index: int) -> bytes:
        """Key (see `Node.key`) of block `index` of a sequence."""
        return block_key(sequence.tokens, sequence.extra_ids, index, self.tokens_per_block)

    def _keys_after(self, sequence: KvSequence, start: int) -> Iterator[bytes]:
        """Keys of the reusable blocks from `start` on. The last token is always recomputed."""
        end = (len(sequence.tokens) - 1) // self.tokens_per_block
        return (self.key_of(sequence, index) for index in range(start, end))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    def expire(self, now: float) -> None:
        """Ends the pins and retentions whose time has passed. `now` is `time.monotonic()`."""
        self._now = now
        self.expire_pins(now)
        self.tree.kept.expire(now)

    # --- an operator's work, in slices so that running requests go on between them ----------------

    def flush(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Drops blocks with all blocks below them; ends the pins on them."""
        nodes = self._scope(target)
        if target.token_ids is not None:
            top = next((node for node in nodes if not node.refs), None)
            nodes = [node for node in nodes if node.refs]
            if top is not None:
                nodes += [top, *self.tree.below([top])]
        going = [node for node in reversed(nodes) if not node.refs]
        if pinned := {node for node in going if node.pins}:
            for pin_id in [key for key, pin in self._pins.items() if not pinned.isdisjoint(pin.nodes)]:
                self.unpin(pin_id)
        moved = self.tree.drop(going[:max_blocks])
        return self._result(moved, remaining=len(going) - moved, in_use=len(nodes) - len(going))

    def offload(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Moves idle blocks to the host tier, most valuable first. Their children stay."""
        nodes = [node for node in self._scope(target) if node.tier is Tier.GPU]
        going = [node for node in nodes if node.idle]
        in_use = sum(1 for node in nodes if node.refs)
        limit = min(max_blocks, len(going))
        moved = self.tree.offload(going, limit)
        remaining = len(going) - moved
        no_room = remaining if moved < limit else 0
        pinned = len(nodes) - in_use - len(going)
        remaining -= no_room
        return self._result(moved, remaining=remaining, in_use=in_use, pinned=pinned, no_room=no_room)

    def restore(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Moves blocks to the GPU tier, parents first. Evicts only blocks of less value. A target with token
        ids counts as used now."""
        nodes = self._scope(target)
        if target.token_ids is not None:
            self.tree.touch(nodes)
        worth = self.tree.leaves[Tier.GPU].worth
        going = sorted((node for node in nodes if node.tier is Tier.HOST), key=worth, reverse=True)
        batch = going[:max_blocks]
        for node in batch:  # what makes room on the GPU must not push them out of the host tier
            self.tree.hold(node)
        try:
            if batch:
                room = min(len(batch), self.tree.gpu.free + self.tree.idle)
                self.tree.make_room(room, below=worth(batch[-1]))
            moving = batch[: self.tree.gpu.free]
            self.tree.restore(moving)
        finally:
            for node in reversed(batch):
                self.tree.release(node)
        remaining = len(going) - len(moving)
        no_room = remaining if len(moving) < len(batch) else 0
        return self._result(len(moving), remaining=remaining - no_room, no_room=no_room)

    def pin(self, target: KvTarget, ttl_s: float, now: float) -> Pinned:
        """Protects the cached blocks of a target; raises PinLimitReached beyond the pins' share."""
        self.expire_pins(now)
        nodes = self._scope(target)
        total = self.pinned_blocks + sum(1 for node in nodes if not node.pins)
        if total > self._pin_limit:
            raise PinLimitReached(
                f"this pin would bring the pinned blocks to {total}; at most {self._pin_limit} of "
                f"{self.tree.gpu.total} may be pinned (--pin-share): unpin others first"
            )
        for node in nodes:
            self.tree.hold(node, pin=True)
        self.pinned_blocks = total
        pin_id = uuid.uuid4().hex
        self._pins[pin_id] = _Pin(nodes, now + ttl_s)
        return Pinned(pin_id, len(nodes), ttl_s)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False when no pin has that id."""
        if (pin := self._pins.pop(pin_id, None)) is None:
            return False
        for node in reversed(pin.nodes):
            self.tree.release(node, pin=True)
            self.pinned_blocks -= not node.pins
        return True

    def expire_pins(self, now: float) -> None:
        """Ends the pins whose time to live has passed."""
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires <= now]:
            self.unpin(pin_id)

    def stats(self, now: float) -> dict[str, Any]:
        """The cache's part of `GET /kv/stats` (docs/engines/embedded.md). `now` is `time.monotonic()`."""
        self.expire_pins(now)
        tree = self.tree
        pinned = {node for pin in self._pins.values() for node in pin.nodes}
        cached = tree.idle + sum(1 for node in pinned if node.tier is Tier.GPU and not node.refs)
        gpu, host = tree.gpu, tree.host
        in_gpu, in_host = gpu.total - gpu.free, host.total - host.free
        return {
            "tokens_per_block": tree.tokens_per_block,
            "block_bytes": self._block_bytes,
            "gpu": {"total": gpu.total, "free": gpu.free, "cached": cached, "active": in_gpu - cached},
            "host": {
                "total": host.total,
                "free": host.free,
                "cached": in_host,
                "bytes": in_host * self._block_bytes,
            },
            "kept_blocks": len(tree.kept),
            "pinned_blocks": self.pinned_blocks,
            "pins": [
                {"pin_id": pin_id, "blocks": len(pin.nodes), "expires_in_s": max(0.0, pin.expires - now)}
                for pin_id, pin in self._pins.items()
            ],
            "blocks": dict(tree.totals),
        }

    def snapshot(self) -> list[KvEvent]:
        """All cached blocks, parents first."""
        journal = Journal(self.tree.tokens_per_block)
        for node in self.tree.below(self.tree.roots.values()):
            journal.stored(node.tier, node)
        return journal.drain()

    def _scope(self, target: KvTarget) -> list[Node]:
        """The cached blocks of a target, parents first."""
        tree = self.tree
        if target.token_ids is None and target.cache_salt is None:
            return list(tree.below(tree.roots.values()))
        if (root := tree.roots.get(target.cache_salt)) is None:
            return []
        if target.token_ids is None:
            return list(tree.below([root]))
        tokens, extra_ids, size = target.token_ids, target.extra_ids, tree.tokens_per_block
        keys = (block_key(tokens, extra_ids, index, size) for index in range(len(tokens) // size))
        return tree.walk(root, keys)

    def _result(
        self, moved: int, *, remaining: int, in_use: int = 0, pinned: int = 0, no_room: int = 0
    ) -> SliceResult:
        left = {"in_use": in_use, "pinned": pinned, "no_room": no_room}
        return SliceResult(moved, moved * self._block_bytes, remaining, left)
