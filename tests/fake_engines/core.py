"""The inside of a fake engine: requests over a page cache. Answers depend on the prompt."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.engines import served
from tests.fake_engines.cache import CachePrompt, PageCache, RunningPrompt
from tests.fake_engines.publisher import Publisher
from tests.fake_engines.text import words

_MAX_RUNNING = 8


def output_token(prompt: CachePrompt, at: int) -> int:
    """Token `at` of the answer, a function of everything the prompt's KV depends on except its salt."""
    key = repr((prompt.tokens, prompt.namespace.lora, prompt.media, at))
    return words()[zlib.crc32(key.encode()) % len(words())]


@dataclass(slots=True)
class Generation:
    """A running request: its reuse, and its output token by token."""

    cached_tokens: int
    prompt_tokens: int
    output: AsyncIterator[int]
    running: RunningPrompt


class EngineCore:
    """Runs requests over a cache, on the server's event loop. Any thread may call `hold` and `release`.

    Attributes:
        running, waiting: requests now.
        end_of_step: called after each step that may have changed the cache; engines send events then.
    """

    def __init__(self, cache: PageCache, *, end_of_step: Callable[[], None] = lambda: None) -> None:
        self.cache = cache
        self.end_of_step = end_of_step
        self.running = self.waiting = 0
        self._turns = asyncio.Semaphore(_MAX_RUNNING)
        self._held_after = 0
        self._gate = threading.Event()
        self._gate.set()

    def hold(self, *, after: int = 0) -> None:
        """Stops requests after `after` tokens until `release`."""
        self._held_after = after
        self._gate.clear()

    def release(self) -> None:
        """Ends `hold`. Call it before a test ends, because a held request keeps a thread waiting."""
        self._gate.set()

    async def turn(self, at: int = 0) -> None:
        """Waits while held; the request has made `at` tokens."""
        if at >= self._held_after and not self._gate.is_set():
            await asyncio.to_thread(self._gate.wait)

    def reset(self) -> bool:
        """Drops all KV; False while requests run."""
        return self.running == 0 and self.cache.reset()

    @asynccontextmanager
    async def generate(
        self, prompt: CachePrompt, max_tokens: int, *, read: bool = True
    ) -> AsyncIterator[Generation]:
        """Runs a request and holds its pages until the block ends. With `read` False it reuses nothing."""
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        running = self.cache.begin(prompt, read=read)
        self.end_of_step()
        try:
            output = self._output(prompt, max_tokens, running)
            yield Generation(running.cached_tokens, len(prompt.tokens), output, running)
        finally:
            running.close()
            self.running -= 1
            self._turns.release()

    async def _output(
        self, prompt: CachePrompt, max_tokens: int, running: RunningPrompt
    ) -> AsyncIterator[int]:
        for at in range(max_tokens):
            await self.turn(at)
            token = output_token(prompt, at)
            running.append(token)
            self.end_of_step()
            yield token


@dataclass(frozen=True, slots=True)
class Running:
    """A fake engine on real sockets."""

    url: str
    fake: Any

    @property
    def core(self) -> EngineCore:
        """Of the first rank."""
        return self.fake.cores[0]

    @property
    def publisher(self) -> Publisher:
        """Of the first rank."""
        return self.fake.publishers[0]


@contextmanager
def running(fake: Any) -> Iterator[Running]:
    """The fake on a free port; it is closed at the end."""
    with ExitStack() as stack:
        stack.callback(fake.close)
        yield Running(stack.enter_context(served(fake.app)), fake)
