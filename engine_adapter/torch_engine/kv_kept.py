"""The blocks that requests asked to keep: they leave the cache after all others, for a while.

Bounded, so that no client can fill the cache with what it wants kept: beyond a share of the tier that blocks
are lost from, whoever keeps most gives its oldest back. An owner that keeps little loses none of it to
another that keeps much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import islice

from engine_adapter.torch_engine.kv_node import NEVER, Node
from engine_adapter.types import Retention

KEPT_SHARE = 0.5
"""Of the tier that blocks are lost from; the other half always goes to what was used last, by whomever."""


class KeptBlocks:
    """The kept blocks, by owner, in the order in which they become as any other.

    Args:
        room: blocks of the tier that blocks are lost from.
        freed: called with each block that is as any other again.
    """

    def __init__(self, room: int, freed: Callable[[Node], None]) -> None:
        self.limit = int(KEPT_SHARE * room)
        self._freed = freed
        self._owners: dict[Node, str | None] = {}
        self._books: dict[str | None, dict[Node, None]] = {}  # oldest first, and a child before its parent
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._owners)

    def nodes(self) -> set[Node]:
        """The kept blocks."""
        return set(self._owners)

    def by_owner(self) -> dict[str | None, int]:
        """How many blocks each owner keeps."""
        return {owner: len(book) for owner, book in self._books.items()}

    def keep(self, chain: Sequence[Node], retention: Retention, now: float) -> None:
        """Keeps a chain, from the root down, or as much of it as there is room for at all. A block that was
        kept already keeps the higher priority and the later end."""
        chain = chain[: self.limit]
        if not chain:
            return
        # Whole seconds: the ends of many requests are then looked for at once.
        until = math.ceil(now + retention.ttl_s) if retention.ttl_s < math.inf else math.inf
        for node in reversed(chain):
            self._leave_book(node)
            node.priority = max(node.priority, retention.priority)
            node.kept_until = max(node.kept_until, until)
            self._owners[node] = retention.owner
            self._books.setdefault(retention.owner, {})[node] = None
        self._next_end = min(self._next_end, until)
        while len(self._owners) > self.limit:
            self._shorten()

    def expire(self, now: float) -> None:
        """Ends what was kept until now."""
        if now < self._next_end:
            return
        for node in [node for node in self._owners if node.kept_until <= now]:
            self._free(node)
        self._next_end = min((node.kept_until for node in self._owners), default=math.inf)

    def forget(self, node: Node) -> None:
        """The block is gone; one that was not kept is fine."""
        self._leave_book(node)
        node.priority, node.kept_until = 0, NEVER

    def _shorten(self) -> None:
        """Who keeps most gives its oldest back, until another keeps as much or there is room."""
        sizes = nlargest(2, map(len, self._books.values()))
        largest = next(book for book in self._books.values() if len(book) == sizes[0])
        ahead = max(sizes[0] - sizes[1], 1) if len(sizes) > 1 else sizes[0]
        for node in list(islice(largest, min(ahead, len(self._owners) - self.limit))):
            self._free(node)

    def _free(self, node: Node) -> None:
        """The block is as any other, and those below it are, as they may never be worth more."""
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
        book = self._books[owner]
        del book[node]
        if not book:
            del self._books[owner]
