"""Collects the KV events of a step: blocks stored and removed, joined into runs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine_adapter.torch_engine.kv_node import Node
from engine_adapter.types import BlocksRemoved, BlocksStored, KvEvent, Tier


@dataclass(slots=True)
class _Change:
    """Consecutive nodes that were stored in a tier, or removed from it."""

    tier: Tier
    stored: bool
    salt: str | None
    nodes: list[Node] = field(default_factory=list)


class Journal:
    """Collects changes. Consecutive blocks of one chain become one event."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._changes: list[_Change] = []

    def stored(self, tier: Tier, node: Node, salt: str | None) -> None:
        """`node`, of a chain under `salt`, now lies in `tier`."""
        last = self._changes[-1] if self._changes else None
        if last is None or not last.stored or last.tier is not tier or last.nodes[-1] is not node.parent:
            last = _Change(tier, stored=True, salt=salt)
            self._changes.append(last)
        last.nodes.append(node)

    def removed(self, tier: Tier, node: Node) -> None:
        """`node` no longer lies in `tier`."""
        last = self._changes[-1] if self._changes else None
        if last is None or last.stored or last.tier is not tier:
            last = _Change(tier, stored=False, salt=None)
            self._changes.append(last)
        last.nodes.append(node)

    def drain(self) -> list[KvEvent]:
        """The events since the last call."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return [self._stored(change) if change.stored else _removed(change) for change in changes]

    def drain_stored(self) -> list[BlocksStored]:
        """Like `drain`, for a journal without removals."""
        changes, self._changes = self._changes, []
        return [self._stored(change) for change in changes]

    def _stored(self, change: _Change) -> BlocksStored:
        size = self._tokens_per_block
        nodes = change.nodes
        parent = nodes[0].parent
        at_root = parent is None or parent.parent is None
        extras: array[int] | None = None
        if any(len(node.key) > 4 * size for node in nodes):
            extras = array("Q", b"".join(node.extra_ids(size) or bytes(8 * size) for node in nodes))
        return BlocksStored(
            tier=change.tier,
            parent=None if at_root or parent is None else parent.name,
            hashes=tuple(node.name for node in nodes),
            token_ids=array("i", b"".join(node.tokens(size) for node in nodes)),
            tokens_per_block=size,
            extra_ids=extras,
            salt=change.salt if at_root else None,
        )


def _removed(change: _Change) -> BlocksRemoved:
    return BlocksRemoved(change.tier, tuple(node.name for node in change.nodes))
