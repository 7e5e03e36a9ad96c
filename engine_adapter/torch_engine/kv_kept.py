"""Retention: the blocks that requests asked to keep leave the cache after all others, for a while.

Retention is limited to a share of the tier where eviction loses KV, so that no client can fill the cache. At
the limit, the owner with most retained blocks loses its oldest retention. An owner with few loses none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import islice

from engine_adapter.torch_engine.kv_node import NEVER, Node
from engine_adapter.types import Retention

KEPT_SHARE = 0.5
"""Share of the tier where eviction loses KV. The other half goes to the blocks used last, of any owner."""


class KeptBlocks:
    """The kept blocks, by owner, in the order in which they lose their retention.

    Args:
        room: blocks of the tier where eviction loses KV.
        freed: called with each block that loses its retention and stays cached.
    """

    def __init__(self, room: int, freed: Callable[[Node], None]) -> None:
        self.limit = int(KEPT_SHARE * room)
        self._freed = freed
        self._owners: dict[Node, str | None] = {}
        self._books: dict[str | None, dict[Node, None]] = {}  # oldest first, and a child before its parent
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._owners)

    def keep(self, chain: Sequence[Node], retention: Retention, now: float) -> None:
        """Retains a chain, from the root down, as far as the limit reaches. A block that is retained already
        gets the higher priority and the later end."""
        chain = chain[: self.limit]
        if not chain:
            return
        # Whole seconds, so that one look finds the ends of many requests.
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
        """The owner with most blocks loses its oldest, until another has as many or the limit is met."""
        sizes = nlargest(2, map(len, self._books.values()))
        largest = next(book for book in self._books.values() if len(book) == sizes[0])
        ahead = max(sizes[0] - sizes[1], 1) if len(sizes) > 1 else sizes[0]
        for node in list(islice(largest, min(ahead, len(self._owners) - self.limit))):
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
        book = self._books[owner]
        del book[node]
        if not book:
            del self._books[owner]
