"""What runs inside a fake engine: requests over a page cache, with answers that depend on the prompt."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.fake_engines.cache import CachePrompt, PageCache, RunningPrompt
from tests.fake_engines.text import words


def output_token(prompt: CachePrompt, at: int) -> int:
    """Token `at` of the answer: a function of all that the prompt's KV depends on but its salt."""
    key = repr((prompt.tokens, prompt.namespace.adapter, prompt.media, at))
    return words()[zlib.crc32(key.encode()) % len(words())]


@dataclass(slots=True)
class Generation:
    """A request that runs: what it reused, and its output as it comes."""

    cached_tokens: int
    prompt_tokens: int
    output: AsyncIterator[int]
    running: RunningPrompt


class EngineCore:
    """Requests over a cache. Belongs to the server's event loop; `hold` and `release` to anyone.

    Attributes:
        running, waiting: requests now.
        end_of_step: called after each step that may have changed the cache, as engines send events then.
    """

    def __init__(
        self, cache: PageCache, *, max_running: int = 8, end_of_step: Callable[[], None] = lambda: None
    ) -> None:
        self.cache = cache
        self.end_of_step = end_of_step
        self.running = self.waiting = 0
        self._turns = asyncio.Semaphore(max_running)
        self._held_after = 0
        self._gate = threading.Event()
        self._gate.set()

    def hold(self, *, after: int = 0) -> None:
        """Requests stand still once they have `after` tokens, until `release`."""
        self._held_after = after
        self._gate.clear()

    def release(self) -> None:
        """Ends `hold`; at the end of a test, too, as a held request has a thread waiting."""
        self._gate.set()

    async def turn(self, at: int = 0) -> None:
        """Waits while `hold` lasts; `at` tokens were made so far."""
        if at >= self._held_after and not self._gate.is_set():
            await asyncio.to_thread(self._gate.wait)

    def reset(self) -> bool:
        """Forgets all KV; False while requests run."""
        return self.running == 0 and self.cache.reset()

    @asynccontextmanager
    async def generate(
        self, prompt: CachePrompt, max_tokens: int, *, read: bool = True
    ) -> AsyncIterator[Generation]:
        """Runs a request; its pages are held until the block ends. `read` False: it reuses nothing."""
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
