"""The KV cache: the blocks of running sequences, and the blocks kept after them.

Pure: it decides, a `KvStorage` copies. A sequence begins with the longest cached prefix of its tokens and
grows by free blocks. Its full blocks enter the tree as soon as they are computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_adapter.torch_engine.kv_admin import KvAdmin
from engine_adapter.torch_engine.kv_node import Node, block_key
from engine_adapter.torch_engine.kv_tree import KvTree
from engine_adapter.types import NOT_RETAINED, KvTarget, Retention, Tier

if TYPE_CHECKING:
    from engine_adapter.torch_engine.storage import KvStorage


@dataclass(eq=False, slots=True)
class KvSequence:
    """The tokens of one request and where their KV lies.

    Attributes:
        tokens, extra_ids: prompt and output so far.
        computed: tokens whose KV lies in `blocks`.
        blocks: all reserved GPU slots, in order; the first `len(path)` belong to the tree.
        path: the full blocks of the tree that the sequence holds.
        retention: how long to retain these blocks after the end, and for whom.
        reuses: whether it begins with cached blocks. All sequences leave theirs to others.
        root: of the tree, while it runs.
    """

    tokens: array[int]
    extra_ids: array[int] | None
    salt: str | None
    retention: Retention = NOT_RETAINED
    reuses: bool = True
    root: Node | None = None
    path: list[Node] = field(default_factory=list)
    blocks: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0

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


class KvCache(KvAdmin):
    """The blocks of both tiers in a prefix tree. Not thread-safe: use it through `Engine.call`."""

    def __init__(
        self,
        *,
        gpu_blocks: int,
        host_blocks: int,
        tokens_per_block: int,
        block_bytes: int,
        copier: KvStorage,
        pin_share: float,
    ) -> None:
        """Pins hold at most `pin_share` of the GPU tier."""
        self.tokens_per_block = tokens_per_block
        tree = KvTree(
            gpu_blocks=gpu_blocks, host_blocks=host_blocks, tokens_per_block=tokens_per_block, copier=copier
        )
        super().__init__(tree, block_bytes, pin_share)
        self._now = 0.0

    def begin(self, sequence: KvSequence, *, spare: int = 0) -> bool:
        """Reserves blocks for all tokens of a sequence; its cached prefix is reused, host blocks of it are
        restored. Needs room for `spare` more blocks, but does not reserve them.

        `computed` then counts the reused tokens. The last token is never among them. Without room, returns
        False and changes nothing.
        """
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
        """Replaces reserved blocks by blocks that other sequences have computed since `begin`.

        Works only at a block boundary, and never covers the last token.
        """
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
        """Releases the blocks of a sequence: full blocks stay cached, others become free. Twice is fine.

        Its retention starts at the time of the last `expire`.
        """
        root = sequence.root
        if root is None:
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
        self.tree.kept.keep(chain, retention, now)
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
