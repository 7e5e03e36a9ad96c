"""An adapter in front of a real llama-server, and requests through its holds."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from engine_adapter import (
    BlocksRemoved,
    BlocksStored,
    HttpTransport,
    JsonBody,
    KvTarget,
    Tier,
    ViewCurrent,
    make_adapter,
)
from engine_adapter.types import token_array
from tests.engines import engine_spec

PATH = "/v1/completions"
WAIT_S = 20.0


async def blocks_in(events) -> dict[Tier, int]:
    """Blocks on each tier, by the events of a new follower."""
    blocks = {tier: set() for tier in Tier}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, BlocksStored):
                blocks[event.tier].update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                blocks[event.tier].difference_update(event.hashes)
            elif isinstance(event, ViewCurrent):
                break
    return {tier: len(names) for tier, names in blocks.items() if names}


def prompt_of(seed: int, count: int = 100, head: int = 0):
    """`count` plain tokens; prompts of one `head` share that many leading ones."""
    shared, own = random.Random(0), random.Random(seed)  # noqa: S311 - the same tokens each time
    ids = [shared.randrange(300, 4000) for _ in range(head)]
    return token_array(ids + [own.randrange(300, 4000) for _ in range(count - head)])


# A prompt, and the same without its middle.
START, GONE, REST = (prompt_of(seed, count) for seed, count in ((1, 60), (2, 100), (3, 300)))
LONG, SHORTER = START + GONE + REST, START + REST


class World:
    """Asks an adapter's server as the proxy does."""

    def __init__(self, adapter, transport):
        self.adapter, self.transport = adapter, transport

    def hold(self, tokens, salt=None, path=PATH, **fields):
        """The hold of a request for `tokens`; None is a prompt nobody knows."""
        prompt = list(tokens) if tokens is not None else [1, 2, 3]
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
        target = KvTarget(tokens, None, salt) if tokens is not None else None
        return self.adapter.hold(path, JsonBody(json.dumps(body).encode()), target)

    async def sent(self, hold, path=PATH):
        request = self.adapter.prepare("POST", path, {"content-type": "application/json"}, hold.body)
        return await self.transport.send(request)

    async def ask(self, tokens, salt=None, **fields):
        """(text, cached tokens reported, cached tokens said before)."""
        async with self.hold(tokens, salt, **fields) as hold:
            text = (await self.answer(hold))["choices"][0]["text"]
            return text, hold.answer.cached_tokens(), hold.cached_tokens

    async def answer(self, hold, path=PATH):
        """The answer to a held request, as its client gets it."""
        async with await self.sent(hold, path) as response:
            raw = await response.read()
        if hold.answer is not None:
            raw = hold.answer.feed(raw) + hold.answer.finish()
        return json.loads(raw)

    async def do(self, verb, **target):
        """The last word of an operation."""
        return [step async for step in self.adapter.operate(verb, KvTarget(**target))][-1]

    async def slots(self):
        return (await self.adapter.stats())["slots"]

    async def lengths(self):
        return sorted(slot["tokens"] for slot in await self.slots())

    async def files(self):
        return (await self.adapter.stats())["files"]["saved"]

    async def until(self, condition):
        """Polls the slots until `condition` holds of them."""
        async with asyncio.timeout(WAIT_S):
            while not condition(await self.slots()):  # noqa: ASYNC110 - another process changes them
                await asyncio.sleep(0.01)

    async def until_idle(self):
        await self.until(lambda slots: all(slot["operation"] is None for slot in slots))

    async def held(self) -> dict[Tier, int]:
        return await blocks_in(self.adapter.events())


@asynccontextmanager
async def slot_world(url: str, name: str = "one", **spec) -> AsyncIterator[World]:
    """A connected adapter for the server at `url`."""
    adapter = make_adapter(engine_spec("llama_server", url, name, **spec))
    transport = HttpTransport()
    try:
        await adapter.connect()
        yield World(adapter, transport)
    finally:
        await adapter.aclose()
        await transport.aclose()
