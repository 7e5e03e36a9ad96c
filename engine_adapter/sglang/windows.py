"""What an SGLang's sliding windows hold, which its events do not tell.

SGLang keeps a model's full attention and its sliding windows in one radix tree, and reports a page when full
attention stores or drops it. A prompt can be reused up to a boundary if full attention holds all pages before
it, and the windows hold those of the last window. The windows hold (SGLang 0.5.23, seen on a real server):

- those before the end of each run that a request adds to the tree;
- those before the page at which a request left what the tree holds: it computes them again, and keeps them.

Both places are in the events, as the end and the parent of a run; a run may hold a prompt and its answer.
Windows have a pool of their own. If it is the smaller one, SGLang drops the windows that were used longest
ago, and no event says so.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvGroup,
    Tier,
    TokenIds,
    ViewCurrent,
    ViewLost,
    ViewResumed,
)

_Name = int | bytes
_MAX_ASKED = 64
# Tokens after which SGLang moves the window of a running request on (SGLANG_SWA_EVICTION_INTERVAL).
_MOVED_ON = 128


class Windows:
    """Adds to an SGLang's events those of its sliding windows, as a KV cache group of their own."""

    def __init__(self, window: int | None, page: int, capacity: int | None) -> None:
        """All are in tokens: the window, None where unknown; a page; what the windows' pool holds, None if it
        is no smaller than that of full attention. If the window is unknown, no view is complete."""
        self._group = None if window is None else KvGroup(1, Attention.WINDOW, window)
        self._page = page
        self._need = 0 if window is None else -(-(window - 1) // page)
        self._capacity = None if capacity is None else capacity // page
        # Page → the page before it, and how many pages there are up to its end.
        self._pages: dict[_Name, tuple[_Name | None, int]] = {}
        # Pages that the windows hold, those used longest ago first.
        self._held: dict[_Name, None] = {}
        self._asked: deque[TokenIds[int]] = deque(maxlen=_MAX_ASKED)
        self._is_sure = window is not None

    def asked(self, token_ids: TokenIds[int]) -> None:
        """Notes a prompt that the server gets. A run may tell of a prompt and its answer together."""
        self._asked.append(token_ids)

    def follow(self, event: KvEvent) -> Iterator[KvEvent]:
        """The event, and those that it means for the windows."""
        match event:
            case ViewCurrent(complete=complete):
                event = ViewCurrent(complete=complete and self._is_sure)
            case ViewLost() | ViewResumed() | CacheCleared():
                self._pages.clear()
                self._held.clear()
                self._is_sure = self._group is not None
        yield event
        match event:
            case CacheCleared() if not self._is_sure:
                yield ViewCurrent(complete=False)
            case BlocksStored(tier=Tier.GPU) if self._group is not None:
                yield from self._store(self._group, event)
            case BlocksRemoved(tier=Tier.GPU, hashes=names) if self._group is not None:
                for name in names:
                    self._pages.pop(name, None)
                yield from self._drop(self._group, [name for name in names if name in self._held])

    def _store(self, group: KvGroup, event: BlocksStored) -> Iterator[KvEvent]:
        """A request added a run to the tree. Its windows are whole before the run and at its end."""
        before = event.parent
        first = 0 if before is None else self._pages.get(before, (None, 0))[1]
        for at, name in enumerate(event.hashes, first + 1):
            self._pages[name] = before, at
            before = name
        used = self._before(event.parent, self._need)
        if not self._held.keys() >= set(used):
            # Computed again up to a whole page, of which SGLang keeps one page more.
            used = self._before(event.parent, self._need + 1)
        used += self._before(before, first + len(event.hashes) - self._kept_from(first, event))
        yield from self._make_room(group, len(event.hashes), set(used))
        new = tuple([name for name in dict.fromkeys(used) if name not in self._held])
        for name in used:
            self._held.pop(name, None)
            self._held[name] = None
        if new:
            yield BlocksStored(Tier.GPU, event.parent, new, array("i"), self._page, group=group)

    def _kept_from(self, first: int, event: BlocksStored) -> int:
        """The first page of the window that is kept at the end of a run, which begins after `first` pages.

        The window of a prompt stays until an answer is so long that SGLang moves it on."""
        page, last = self._page, first + len(event.hashes)
        start, end = first * page, last * page
        for prompt in reversed(self._asked):
            length = len(prompt)
            within = min(length, end)
            if start < length < end + page and prompt[start:within] == event.token_ids[: within - start]:
                if end + page - length < _MOVED_ON - 2 * page:
                    return max((length - 1) // page - self._need, 0)
                break
        return max(last - self._need, 0)

    def _before(self, name: _Name | None, count: int) -> list[_Name]:
        """The last `count` pages up to the end of this one, in order."""
        names = list[_Name]()
        while name in self._pages and len(names) < count:
            names.append(name)
            name, _ = self._pages[name]
        names.reverse()
        return names

    def _make_room(self, group: KvGroup, pages: int, kept: set[_Name]) -> Iterator[KvEvent]:
        """Before the window left them, the run's pages took as many of the windows' pool."""
        if self._capacity is None or len(self._held) + pages <= self._capacity:
            return
        more = len(self._held) + pages - self._capacity
        dropped = [*islice((name for name in self._held if name not in kept), more)]
        if self._is_sure:
            self._is_sure = False
            yield ViewCurrent(complete=False)
        yield from self._drop(group, dropped)

    def _drop(self, group: KvGroup, names: list[_Name]) -> Iterator[KvEvent]:
        for name in names:
            del self._held[name]
        if names:
            yield BlocksRemoved(Tier.GPU, tuple(names), group)


def window_of(source: str | None) -> int | None:
    """Tokens of a model's sliding window. `source` is a directory or a hub id, whose `config.json` on this
    machine is read; None if that is not there, or names none."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow, and for these models alone

    if source is None:
        return None
    path: object = Path(source) / "config.json"
    try:
        if not Path(source).is_dir():
            path = try_to_load_from_cache(source, "config.json")
        config = json.loads(Path(path).read_bytes()) if isinstance(path, str | Path) else {}
    except (OSError, ValueError):
        return None
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    window = config.get("sliding_window") if isinstance(config, dict) else None
    return window if isinstance(window, int) and window > 0 else None
