"""The cache of the mock engine for a hybrid model: `hybrid_cache.py`, with tokens, hashes and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hybrid_cache import Filled, HybridCache, TakenOfGroups

from proxy.core.index.blocks import BlockHash, Chain
from tests.fake_engines.cache import CachePrompt, PageCache, StoredRun
from tests.fake_engines.vllm import EventGroup


class GroupListener(Protocol):
    """Hears of every change, in order, with its KV cache group."""

    def stored(self, run: StoredRun, group: EventGroup) -> None:
        """The group holds these pages now."""

    def removed(self, hashes: tuple[int, ...], group: EventGroup) -> None:
        """These pages left the group."""

    def cleared(self) -> None:
        """All pages are gone."""


class HybridPages:
    """All pages of one engine: a `PageCache` whose groups share one pool.

    Groups are numbered as vLLM numbers those of Gemma 3, whose first layers have a window: window groups come
    first.
    """

    def __init__(
        self, pages: PageCache, capacity: int, listener: GroupListener, *, groups: int, window_tokens: int
    ) -> None:
        """`pages` gives pages their names, `capacity` is of the pool, `groups` are window groups."""
        self.pages = pages
        self.capacity = capacity
        self.listener = listener
        self.pool = HybridCache(capacity, groups, -(-(window_tokens - 1) // pages.page_size))
        self.windows = [EventGroup(at, "sliding_window", window_tokens) for at in range(groups)]
        self.full = EventGroup(groups)
        self.queries = self.hits = 0

    @property
    def used(self) -> int:
        """Pages of the pool that running requests use."""
        return self.pool.in_use

    def look_up(self, prompt: CachePrompt, *, read: bool, max_tokens: int) -> HybridRunning | None:
        """A request that holds the pages it found, and has room for the others; None if there is no room."""
        size, length = self.pages.page_size, len(prompt.tokens)
        hashes = self.extended(prompt, [])
        chain = Chain(tuple(hashes), length if read else 0, size)
        blocks = -(-(length + max_tokens) // size)
        taken = self.pool.take(chain, blocks)
        if taken is None:
            return None
        self.tell_evictions(taken)
        self.queries += length
        self.hits += taken.gpu * size
        own = list(prompt.tokens), hashes[: taken.gpu], blocks, taken.boundaries, hashes
        return HybridRunning(self, prompt, taken.gpu * size, *own)

    def extended(self, prompt: CachePrompt, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """The hashes of all full pages, after the first ones."""
        found = list(hashes)
        for at in range(len(found), len(prompt.tokens) // self.pages.page_size):
            found.append(self.pages.hash_of(prompt, at, found[-1] if found else None))
        return found

    def tell_evictions(self, change: TakenOfGroups | Filled) -> None:
        """Tells the listener what was evicted."""
        if change.evicted:
            self.listener.removed(tuple(change.evicted), self.full)
        for group in self.windows if change.out_of_window else ():
            self.listener.removed(tuple(change.out_of_window), group)

    def reset(self) -> bool:
        """Drops everything; False, without effect, while requests run."""
        if self.used:
            return False
        self.pool.clear()
        self.listener.cleared()
        return True


@dataclass(slots=True, eq=False)
class HybridRunning:
    """A running request and its pages; see `RunningPrompt`.

    Attributes:
        hashes: of its pages that are computed.
        blocks: pages for its prompt and its answer.
        boundaries: where windows are kept, in pages.
    """

    cache: HybridPages
    prompt: CachePrompt
    cached_tokens: int
    tokens: list[int]
    hashes: list[BlockHash]
    blocks: int
    boundaries: Sequence[int] = ()
    _known: list[BlockHash] = field(default_factory=list)

    def append(self, token: int) -> None:
        """Adds a decoded token. The KV of the token before it exists now."""
        self.tokens.append(token)
        self.store(len(self.tokens) - 1)

    def store(self, computed: int) -> None:
        """Stores the full pages of the first `computed` tokens that are not stored yet. Full attention tells
        of all of them, each window group of those that it keeps."""
        cache, since = self.cache, len(self.hashes)
        if computed // cache.pages.page_size <= since:
            return
        whole = CachePrompt(tuple(self.tokens[:computed]), self.prompt.namespace, self.prompt.media)
        self.hashes = self._known = cache.extended(whole, self._known)
        filled = cache.pool.fill(self.hashes, since, self.boundaries)
        run = cache.pages.run_of(whole, since, len(self.hashes), self.hashes)
        new = set(filled.new_in_window)
        kept = [at for at, page in enumerate(run.hashes) if page in new]
        # As vLLM: the tokens are those of all pages.
        in_window = replace(
            run, hashes=tuple(run.hashes[at] for at in kept), media=tuple(run.media[at] for at in kept)
        )
        for group in cache.windows:
            cache.listener.stored(in_window, group)
        cache.listener.stored(run, cache.full)
        cache.tell_evictions(filled)

    def close(self) -> None:
        """Ends the request. Its pages stay until others need the room."""
        self.cache.pool.release(self.hashes, self.blocks)
        self.blocks, self.hashes = 0, []
