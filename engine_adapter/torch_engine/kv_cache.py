"""The KV cache: which blocks hold what. Pure: it decides, a `BlockCopier` copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_adapter.types import BlocksStored, KvTarget, Pinned


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice of a flush, offload or restore did, in blocks.

    Attributes:
        moved: blocks dropped or moved. bytes: their size.
        remaining: blocks another call can still move.
        left: blocks that had to stay, by reason: `in_use`, `pinned`, `no_room`.
    """

    moved: int
    bytes: int
    remaining: int
    left: dict[str, int]


class KvCache:
    """Blocks of two tiers in a prefix tree. Not thread-safe: use it through `Engine.call`."""

    def stats(self, now: float) -> dict[str, Any]:
        """`tokens_per_block`, `block_bytes`, `gpu`, `host`, `pinned_blocks`, `pins`, `blocks` as in
        `GET /kv/stats` of docs/engines/embedded.md. `now` is `time.monotonic()`."""
        raise NotImplementedError

    def flush(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Forgets blocks, and what hangs below them; ends the pins it meets."""
        raise NotImplementedError

    def offload(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Moves blocks to the host tier."""
        raise NotImplementedError

    def restore(self, target: KvTarget, max_blocks: int) -> SliceResult:
        """Moves blocks to the GPU tier."""
        raise NotImplementedError

    def pin(self, target: KvTarget, ttl_s: float, now: float) -> Pinned:
        """Protects the cached blocks of a target; raises RequestRefused beyond 80% of the pool."""
        raise NotImplementedError

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False when there is none of that id."""
        raise NotImplementedError

    def snapshot(self) -> list[BlocksStored]:
        """All the cache holds, parents first. Raises nothing."""
        raise NotImplementedError
