"""Operations on the KV cache: flush, offload, restore, pin, statistics and snapshot."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from engine_adapter.torch_engine.kv_journal import Journal
from engine_adapter.torch_engine.kv_node import Node
from engine_adapter.torch_engine.kv_tree import KvTree
from engine_adapter.torch_engine.requests import PinLimitReached
from engine_adapter.types import BlocksStored, ExtraIds, KvTarget, Pinned, Tier, TokenIds


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The result of one slice of a flush, offload or restore, in blocks.

    Attributes:
        moved: blocks dropped or moved. bytes: their size.
        remaining: blocks that another call can still move.
        left: blocks that could not move, by reason: `in_use`, `pinned`, `no_room`.
    """

    moved: int
    bytes: int
    remaining: int
    left: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Pin:
    nodes: list[Node]
    expires: float


def block_keys(
    token_ids: TokenIds[int], extra_ids: ExtraIds[int] | None, start: int, end: int, tokens_per_block: int
) -> list[bytes]:
    """Keys (see `Node.key`) of the blocks `start` to `end` (exclusive) of a prompt."""
    return [block_key(token_ids, extra_ids, index, tokens_per_block) for index in range(start, end)]


def block_key(
    token_ids: TokenIds[int], extra_ids: ExtraIds[int] | None, index: int, tokens_per_block: int
) -> bytes:
    """Key (see `Node.key`) of block `index` of a prompt."""
    begin, end = index * tokens_per_block, (index + 1) * tokens_per_block
    tokens = token_ids[begin:end].tobytes()
    if extra_ids is None or not any(extra_ids[begin:end]):
        return tokens
    return tokens + extra_ids[begin:end].tobytes()


class KvAdmin:
    """An operator's work on a `KvTree`, done in slices so that running requests go on between them."""

    def __init__(self, tree: KvTree, block_bytes: int, pin_share: float) -> None:
        """Pins hold at most `pin_share` of the GPU tier."""
        self._tree = tree
        self._block_bytes = block_bytes
        self._pin_limit = int(pin_share * tree.gpu.total)
        self._pins: dict[str, _Pin] = {}
        self._pinned = 0

    def flush(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Drops blocks with all blocks below them and all leftovers; ends the pins on the blocks."""
        self._tree.gpu.forget_leftovers()
        nodes = self._scope(target)
        if target.token_ids is not None:
            top = next((node for node in nodes if not node.refs), None)
            nodes = [node for node in nodes if node.refs]
            if top is not None:
                nodes += [top, *self._tree.below([top])]
        going = [node for node in reversed(nodes) if not node.refs]
        self._unpin_any(going)
        moved = self._tree.drop(going[:max_blocks])
        return self._result(moved, remaining=len(going) - moved, in_use=len(nodes) - len(going))

    def offload(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Moves idle blocks to the host tier, most valuable first. Their children stay."""
        nodes = [node for node in self._scope(target) if node.tier is Tier.GPU]
        going = [node for node in nodes if node.idle]
        in_use = sum(1 for node in nodes if node.refs)
        limit = min(max_blocks, len(going))
        moved = self._tree.offload(going, limit)
        remaining = len(going) - moved
        no_room = remaining if moved < limit else 0
        return self._result(
            moved,
            remaining=remaining - no_room,
            in_use=in_use,
            pinned=len(nodes) - in_use - len(going),
            no_room=no_room,
        )

    def restore(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Moves blocks to the GPU tier, parents first. Evicts only blocks of less value. A target with token
        ids counts as used now."""
        nodes = self._scope(target)
        if target.token_ids is not None:
            self._tree.touch(nodes)
        going = [node for node in nodes if node.tier is Tier.HOST]
        going.sort(key=lambda node: self._tree.worth(Tier.GPU, node), reverse=True)
        batch = going[:max_blocks]
        if batch:
            self._tree.make_room(
                min(len(batch), self._tree.gpu.free + self._tree.idle),
                below=self._tree.worth(Tier.GPU, batch[-1]),
            )
        moving = batch[: self._tree.gpu.free]
        self._tree.restore(moving)
        remaining = len(going) - len(moving)
        no_room = remaining if len(moving) < len(batch) else 0
        return self._result(len(moving), remaining=remaining - no_room, no_room=no_room)

    def pin(self, target: KvTarget, ttl_s: float, now: float) -> Pinned:
        """Protects the cached blocks of a target; raises PinLimitReached beyond the pins' share."""
        nodes = self._scope(target)
        total = self._pinned + sum(1 for node in nodes if not node.pins)
        if total > self._pin_limit:
            raise PinLimitReached(
                f"this pin would bring the pinned blocks to {total}; at most {self._pin_limit} of "
                f"{self._tree.gpu.total} may be pinned (--pin-share): unpin others first"
            )
        for node in nodes:
            self._tree.pin(node)
        self._pinned = total
        pin_id = uuid.uuid4().hex
        self._pins[pin_id] = _Pin(nodes, now + ttl_s)
        return Pinned(pin_id, len(nodes), ttl_s)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False when no pin has that id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        for node in reversed(pin.nodes):
            self._tree.unpin(node)
            self._pinned -= not node.pins
        return True

    def expire_pins(self, now: float) -> None:
        """Ends the pins whose time to live has passed."""
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires <= now]:
            self.unpin(pin_id)

    @property
    def pinned_blocks(self) -> int:
        """Blocks under at least one pin."""
        return self._pinned

    def stats(self, now: float) -> dict[str, Any]:
        """The cache's part of `GET /kv/stats`; free + cached + active = total."""
        tree = self._tree
        pinned = {node for pin in self._pins.values() for node in pin.nodes}
        cached = tree.idle + sum(1 for node in pinned if node.tier is Tier.GPU and not node.refs)
        gpu, host, totals = tree.gpu, tree.host, tree.totals
        in_host = host.total - host.free
        return {
            "tokens_per_block": tree.tokens_per_block,
            "block_bytes": self._block_bytes,
            "gpu": {
                "total": gpu.total,
                "free": gpu.free,
                "cached": cached,
                "active": gpu.total - gpu.free - cached,
            },
            "host": {
                "total": host.total,
                "free": host.free,
                "cached": in_host,
                "bytes": in_host * self._block_bytes,
            },
            "kept_blocks": len(tree.kept),
            "pinned_blocks": self._pinned,
            "pins": [
                {"pin_id": pin_id, "blocks": len(pin.nodes), "expires_in_s": max(0.0, pin.expires - now)}
                for pin_id, pin in self._pins.items()
            ],
            "blocks": {
                "evicted": totals.evicted,
                "offloaded": totals.offloaded,
                "restored": totals.restored,
            },
        }

    def snapshot(self) -> list[BlocksStored]:
        """All cached blocks, parents first."""
        journal = Journal(self._tree.tokens_per_block)
        for node in self._tree.below(self._tree.roots.values()):
            journal.stored(node.tier, node, self._tree.salt_of(node))
        return journal.drain_stored()

    def _scope(self, target: KvTarget) -> list[Node]:
        """The cached blocks of a target, parents first."""
        tree = self._tree
        if target.token_ids is None and target.cache_salt is None:
            return list(tree.below(tree.roots.values()))
        root = tree.roots.get(target.cache_salt)
        if root is None:
            return []
        if target.token_ids is None:
            return list(tree.below([root]))
        size = tree.tokens_per_block
        keys = block_keys(target.token_ids, target.extra_ids, 0, len(target.token_ids) // size, size)
        return tree.walk(root, keys)

    def _unpin_any(self, nodes: list[Node]) -> None:
        """Ends every pin on one of these blocks."""
        met = {node for node in nodes if node.pins}
        if met:
            for pin_id in [pin_id for pin_id, pin in self._pins.items() if not met.isdisjoint(pin.nodes)]:
                self.unpin(pin_id)

    def _result(
        self, moved: int, *, remaining: int, in_use: int = 0, pinned: int = 0, no_room: int = 0
    ) -> SliceResult:
        left = {"in_use": in_use, "pinned": pinned, "no_room": no_room}
        return SliceResult(moved, moved * self._block_bytes, remaining, left)
