"""Operations on the KV cache: flush, offload, restore, pin, statistics and snapshot."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from engine_adapter.torch_engine.kv_node import Node, block_key
from engine_adapter.torch_engine.kv_tree import Journal, KvTree
from engine_adapter.torch_engine.requests import PinLimitReached
from engine_adapter.types import KvEvent, KvTarget, Pinned, Tier


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


class KvAdmin:
    """An operator's work on a `KvTree`, done in slices so that running requests go on between them.

    Attributes:
        pinned_blocks: blocks under at least one pin.
    """

    def __init__(self, tree: KvTree, block_bytes: int, pin_share: float) -> None:
        """Pins hold at most `pin_share` of the GPU tier."""
        self.tree = tree
        self.pinned_blocks = 0
        self._block_bytes = block_bytes
        self._pin_limit = int(pin_share * tree.gpu.total)
        self._pins: dict[str, _Pin] = {}

    def flush(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Drops blocks with all blocks below them; ends the pins on them."""
        nodes = self._scope(target)
        if target.token_ids is not None:
            top = next((node for node in nodes if not node.refs), None)
            nodes = [node for node in nodes if node.refs]
            if top is not None:
                nodes += [top, *self.tree.below([top])]
        going = [node for node in reversed(nodes) if not node.refs]
        self._unpin_any(going)
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
            self.tree.touch(nodes)
        going = [node for node in nodes if node.tier is Tier.HOST]
        going.sort(key=lambda node: self.tree.worth(Tier.GPU, node), reverse=True)
        batch = going[:max_blocks]
        for node in batch:  # what makes room on the GPU must not push them out of the host tier
            self.tree.hold(node)
        try:
            if batch:
                self.tree.make_room(
                    min(len(batch), self.tree.gpu.free + self.tree.idle),
                    below=self.tree.worth(Tier.GPU, batch[-1]),
                )
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
            self.tree.pin(node)
        self.pinned_blocks = total
        pin_id = uuid.uuid4().hex
        self._pins[pin_id] = _Pin(nodes, now + ttl_s)
        return Pinned(pin_id, len(nodes), ttl_s)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False when no pin has that id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        for node in reversed(pin.nodes):
            self.tree.unpin(node)
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
        root = tree.roots.get(target.cache_salt)
        if root is None:
            return []
        if target.token_ids is None:
            return list(tree.below([root]))
        size = tree.tokens_per_block
        return tree.walk(
            root,
            (
                block_key(target.token_ids, target.extra_ids, index, size)
                for index in range(len(target.token_ids) // size)
            ),
        )

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
