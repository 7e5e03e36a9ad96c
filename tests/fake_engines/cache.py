"""A prefix cache of pages, as in vLLM, SGLang and TensorRT-LLM. Their fakes share it.

A page holds `page_size` tokens. Its identity is a hash of the page before it, its tokens, the keys beside
them,
and for a prompt's first page the namespace. A request reuses full pages, but never its last token: `floor((n
- 1) / page) * page` tokens. Full pages of a prompt are stored at once, pages filled by decoding as they fill.
When room is needed, the least recently used leaf that no request uses is evicted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prompts of different namespaces share nothing."""

    salt: str | None = None
    lora: str | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, audio or video in a prompt, with `length` placeholder tokens from `offset`."""

    identity: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class CachePrompt:
    """A prompt with everything its KV depends on."""

    tokens: tuple[int, ...]
    namespace: Namespace = Namespace()
    media: tuple[Media, ...] = ()

    def media_of(self, start: int, end: int) -> tuple[tuple[str, int], ...]:
        """The items in tokens `start` to `end`: identity, and offset from `start`, which may be negative."""
        return tuple(
            (item.identity, item.offset - start)
            for item in self.media
            if item.offset < end and item.offset + item.length > start
        )


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Stored pages; each is the child of the one before it.

    Attributes:
        parent: hash of the page before the first, None at the start of a prompt.
        hashes: one per page, uint64.
        tokens: of all pages.
        media: one entry per page, from `CachePrompt.media_of`.
        namespace: the prompt's.
    """

    parent: int | None
    hashes: tuple[int, ...]
    tokens: tuple[int, ...]
    media: tuple[tuple[tuple[str, int], ...], ...]
    namespace: Namespace


def signed(name: int) -> int:
    """A page's hash as a signed 64-bit number, as some engines write it."""
    return name - 2**64 if name >= 2**63 else name


class CacheListener(Protocol):
    """Hears of every change, in order."""

    def stored(self, run: StoredRun) -> None: ...

    def removed(self, hashes: tuple[int, ...]) -> None: ...

    def cleared(self) -> None: ...


class Silent:
    """A `CacheListener` for engines without events."""

    def stored(self, run: StoredRun) -> None: ...

    def removed(self, hashes: tuple[int, ...]) -> None: ...

    def cleared(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Page:
    hash: int
    parent: _Page | None
    users: int = 0
    children: int = 0


class PageCache:
    """All pages of one engine.

    Attributes:
        queries: prompt tokens looked up so far.
        hits: those that were found.
    """

    def __init__(
        self,
        page_size: int,
        capacity: int,
        listener: CacheListener | None = None,
        *,
        shares_prefill: bool = True,
    ) -> None:
        """`capacity` is in pages. `shares_prefill`: pages of a prompt can be reused as soon as its prefill
        begins. If False, the engine stores them when it is over."""
        self.page_size = page_size
        self.capacity = capacity
        self.listener: CacheListener = listener or Silent()
        self.queries = self.hits = 0
        self._shares_prefill = shares_prefill
        self._pages: dict[int, _Page] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def used(self) -> int:
        """Pages that running requests use."""
        return sum(page.users > 0 for page in self._pages.values())

    def match(self, prompt: CachePrompt) -> int:
        """Tokens that a request would reuse now; changes nothing."""
        return len(self._matched(prompt)) * self.page_size

    def begin(self, prompt: CachePrompt, *, read: bool = True) -> RunningPrompt:
        """Starts a request: reuses held pages if `read`, and stores the rest of its full pages if they can be
        shared already."""
        matched = self._matched(prompt) if read else []
        self.queries += len(prompt.tokens)
        self.hits += len(matched) * self.page_size
        running = RunningPrompt(self, prompt, len(matched) * self.page_size, list(prompt.tokens))
        for page in matched:
            running.hold(page)
        if self._shares_prefill:
            running.store(len(prompt.tokens))
        return running

    def run_of(self, prompt: CachePrompt, first: int, last: int, hashes: Sequence[int]) -> StoredRun:
        """Pages `first` to `last` of a prompt with these page hashes, as an event reports them."""
        size = self.page_size
        return StoredRun(
            hashes[first - 1] if first else None,
            tuple(hashes[first:last]),
            prompt.tokens[first * size : last * size],
            tuple(prompt.media_of(at * size, (at + 1) * size) for at in range(first, last)),
            prompt.namespace,
        )

    def reset(self) -> bool:
        """Drops everything; False, without effect, while requests run."""
        if self.used:
            return False
        self._pages.clear()
        self.listener.cleared()
        return True

    def hash_of(self, prompt: CachePrompt, at: int, parent: int | None) -> int:
        """Hash of page `at`, whose parent's hash is `parent`."""
        start, end = at * self.page_size, (at + 1) * self.page_size
        namespace = prompt.namespace if parent is None else None
        key = repr((parent, namespace, prompt.tokens[start:end], prompt.media_of(start, end)))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")

    def get(self, name: int) -> _Page | None:
        """The page of that hash."""
        return self._pages.get(name)

    def put(self, name: int, parent: _Page | None) -> _Page | None:
        """A new page; None if there is no room."""
        if len(self._pages) >= self.capacity and not self._evict_one():
            return None
        page = self._pages[name] = _Page(name, parent)
        if parent is not None:
            parent.children += 1
        return page

    def touch(self, page: _Page) -> None:
        """Marks it as just used."""
        self._pages[page.hash] = self._pages.pop(page.hash)

    def _matched(self, prompt: CachePrompt) -> list[_Page]:
        pages: list[_Page] = []
        for at in range((len(prompt.tokens) - 1) // self.page_size):
            page = self.get(self.hash_of(prompt, at, pages[-1].hash if pages else None))
            if page is None:
                break
            pages.append(page)
        return pages

    def _evict_one(self) -> bool:
        leaf = next((page for page in self._pages.values() if not page.users and not page.children), None)
        if leaf is None:
            return False
        del self._pages[leaf.hash]
        if leaf.parent is not None:
            leaf.parent.children -= 1
        self.listener.removed((leaf.hash,))
        return True


@dataclass(slots=True, eq=False)
class RunningPrompt:
    """A running request and its pages.

    Attributes:
        cached_tokens: reused prompt tokens.
        tokens: the prompt and the decoded tokens.
    """

    cache: PageCache
    prompt: CachePrompt
    cached_tokens: int
    tokens: list[int]
    _pages: list[_Page] = field(default_factory=list)

    @property
    def hashes(self) -> list[int]:
        """Hashes of its pages, from the first on."""
        return [page.hash for page in self._pages]

    def append(self, token: int) -> None:
        """Adds a decoded token. The KV of the token before it exists now."""
        self.tokens.append(token)
        self.store(len(self.tokens) - 1)

    def store(self, computed: int) -> None:
        """Stores the full pages of the first `computed` tokens that are not stored yet."""
        cache, first = self.cache, len(self._pages)
        last = computed // cache.page_size
        if first >= last:
            return
        whole = CachePrompt(tuple(self.tokens), self.prompt.namespace, self.prompt.media)
        new_from: int | None = None
        for at in range(first, last):
            parent = self._pages[-1] if self._pages else None
            name = cache.hash_of(whole, at, parent.hash if parent is not None else None)
            page = cache.get(name)
            if page is None:
                page = cache.put(name, parent)
                new_from = at if new_from is None else new_from
            if page is None:
                break  # no room: the rest is computed but not stored
            self.hold(page)
        if new_from is not None and len(self._pages) > new_from:
            cache.listener.stored(cache.run_of(whole, new_from, len(self._pages), self.hashes))

    def hold(self, page: _Page) -> None:
        """Protects a page from eviction until `close`."""
        page.users += 1
        self._pages.append(page)

    def close(self) -> None:
        """Ends the request. Its first page becomes the most recently used, so leaves are evicted first."""
        for page in reversed(self._pages):
            page.users -= 1
            self.cache.touch(page)
        self._pages.clear()
