"""Follows an adapter's events as kvpin does, to compare what they say with what an engine reuses."""

from __future__ import annotations

import asyncio
import random
from array import array
from contextlib import aclosing, asynccontextmanager

from engine_adapter import ViewCurrent
from proxy.core.index.blocks import chain, namespace_root
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView

PAGE = 16
WAIT_S = 20.0


def tokens_of(seed, count):
    source = random.Random(f"{seed}")  # noqa: S311 - no secret
    return [source.randrange(100, 4000) for _ in range(count)]


async def complete(control, tokens, **fields):
    """Reused tokens, as reported."""
    request = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0} | fields
    answer = await control.call("POST", "/v1/completions", json=request)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def operated(adapter, verb, target):
    return [progress async for progress in adapter.operate(verb, target)]


class Follower:
    """An index fed by the adapter's events."""

    def __init__(self, adapter, tokens_per_block):
        self.index, self.events = PrefixIndex(), []
        self._adapter, self._size = adapter, tokens_per_block
        self._changed = asyncio.Event()
        self.index.add_engine("e")
        self.view = EngineView("e", self.index, self._root, PAGE)

    @staticmethod
    def _root(salt, lora):
        return namespace_root("m", lora=lora, salt=salt)

    async def run(self):
        async with aclosing(self._adapter.events()) as events:
            async for event in events:
                self.view.apply(event)
                self.events.append(event)
                self._changed.set()

    def held(self, tokens, salt=None):
        """Tokens of a prompt that the index predicts as reused."""
        hashes = chain(self._root(salt, None), array("i", tokens), None, PAGE).hashes
        match = self.index.match(hashes).get("e")
        return 0 if match is None else match.gpu * PAGE // self._size * self._size

    def would_reuse(self, tokens, salt=None):
        return min(self.held(tokens, salt), (len(tokens) - 1) // self._size * self._size)

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_held(self, tokens, salt=None):
        """Waits until all full blocks of the prompt are held."""
        await self.until(lambda: self.held(tokens, salt) == len(tokens) // self._size * self._size)

    async def until_current(self):
        await self.until(lambda: any(isinstance(event, ViewCurrent) for event in self.events))


async def check_predictions(follower, control, *, longest):
    """Prompts share prefixes and salts and exceed the cache: every prediction is exact."""
    source = random.Random(7)  # noqa: S311 - no secret
    for _ in range(60):
        tokens = tokens_of(source.randrange(4), 700)[: source.randrange(1, longest)]
        tokens += tokens_of(source.randrange(3), source.randrange(1, 200))
        salt = source.choice([None, "a", "b"])
        predicted = follower.would_reuse(tokens, salt)
        assert await complete(control, tokens, **({"cache_salt": salt} if salt else {})) == predicted
        await follower.until_held(tokens, salt)


@asynccontextmanager
async def following(adapter):
    info = await adapter.connect()
    follower = Follower(adapter, info.tokens_per_block)
    task = asyncio.create_task(follower.run())
    try:
        await follower.until_current()
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
