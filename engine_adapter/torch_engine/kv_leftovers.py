"""Leftovers: blocks that requests left partly filled.

Only full blocks enter the tree. The slot of a block that is not full becomes free when its request ends, but
the KV in it stays right until another request takes the slot. Until then, a prompt that goes on alike copies
it instead of computing it again. So an identical prompt computes one token, whatever its length.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from engine_adapter.types import Tier

if TYPE_CHECKING:
    from engine_adapter.torch_engine.kv_node import Node

TOKEN_BYTES = 4  # of the int32 tokens in a key
_SEARCHED = 32
"""Blocks that a search compares, the latest first. A system prompt may have thousands of children."""


class Leftovers:
    """Free slots that hold the beginning of a block of text, identified by its parent and its tokens."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Node, bytes]] = {}  # slot → parent and tokens; the oldest first

    def __len__(self) -> int:
        return len(self._parts)

    def slots(self) -> list[int]:
        """Their slots, the oldest first."""
        return list(self._parts)

    def add(self, slot: int, parent: Node, tokens: bytes) -> bool:
        """Adds the beginning `tokens` of a block below `parent`; False if another slot has the same."""
        known = parent.leftovers.get(tokens)
        if known is not None:
            self._parts[known] = self._parts.pop(known)
            return False
        parent.leftovers[tokens] = slot
        self._parts[slot] = parent, tokens
        return True

    def take_oldest(self) -> int:
        """Forgets the oldest and returns its slot."""
        slot = next(iter(self._parts))
        parent, tokens = self._parts.pop(slot)
        del parent.leftovers[tokens]
        return slot


def find_beginning(parent: Node, wanted: bytes, tokens_per_block: int) -> tuple[int, int] | None:
    """The slot of the block below `parent` with most of the tokens `wanted` at its beginning, and how many of
    them; None if no block begins alike. Searches the full blocks of text on the GPU tier, and leftovers."""
    best = (0, 0)
    full = (
        (child.key, child.slot)
        for child in islice(reversed(parent.children.values()), _SEARCHED)
        if child.tier is Tier.GPU and len(child.key) == TOKEN_BYTES * tokens_per_block
    )
    for key, slot in chain(full, islice(reversed(parent.leftovers.items()), _SEARCHED)):
        best = max(best, (_shared(key, wanted), slot))
    count, slot = best
    return (slot, count) if count else None


def _shared(key: bytes, wanted: bytes) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(key, wanted, strict=False))
    differs = next((at for at, (one, other) in pairs if one != other), min(len(key), len(wanted)))
    return differs // TOKEN_BYTES
