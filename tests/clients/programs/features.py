"""Runs features of a client. For each it prints a JSON line: its name, and what went wrong if something did.

A program defines one coroutine function per feature, which takes the `World`, and calls `main()`.
Programs run in the client's own environment, so that this file needs the standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

TOOL_SCHEMA = {
    "type": "object",
    "properties": {"port": {"type": "string", "maxLength": 8}},
    "required": ["port"],
    "additionalProperties": False,
}
TOOL = {"name": "tide", "description": "Height of the tide", "parameters": TOOL_SCHEMA}
SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["Brest", "Lorient"]}, "open": {"type": "boolean"}},
    "required": ["port", "open"],
    "additionalProperties": False,
}
# A PNG of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
PIXEL_URL = f"data:image/png;base64,{PIXEL}"
TOO_LONG = "word " * 40_000
# A coding agent on a busy machine takes a minute to start.
LIMIT_S = 240
VECTOR = [0.25, -0.5, 1.0]
LONG = "The harbour opens at six. " * 40


@dataclass
class World:
    """Where a program finds kvpin, and what stands behind it.

    Attributes:
        url: kvpin's address, without a path.
        key: an API key.
        engine: `embedded`, `llama-server` or `fake`.
        model: the model to chat with.
        embedding_model: the model of embeddings.
        features: what to run, in this order.
        asynchronous: whether to use the client's asynchronous half, where it has two.
    """

    url: str
    key: str
    engine: str
    model: str
    embedding_model: str
    features: list[str]
    asynchronous: bool = False

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def is_fake(self) -> bool:
        return self.engine == "fake"

    def fresh(self, text: str = "Hello") -> str:
        """A prompt that no other feature sends."""
        return f"{text} {uuid.uuid4().hex}"

    def wish(self, scenario: str) -> tuple[str, str]:
        """A prompt that makes the fake engine do something, and its key."""
        key = uuid.uuid4().hex
        return f"do: {scenario} {key}", key


class EitherHalf:
    """The synchronous or asynchronous half of a client. Methods are called by their dotted name."""

    def __init__(self, world: World, half: Any) -> None:
        self._world = world
        self._client = half

    async def __call__(self, method: str, *args: Any, **fields: Any) -> Any:
        target: Any = self._client
        for name in method.split("."):
            target = getattr(target, name)
        got = target(*args, **fields)
        return await got if inspect.isawaitable(got) else got


async def each(stream: Any) -> AsyncIterator[Any]:
    """The items of a stream of either half, which is closed at the end."""
    try:
        if hasattr(stream, "__aiter__"):
            async for item in stream:
                yield item
        else:
            for item in stream:
                yield item
    finally:
        closed = stream.close()
        if inspect.isawaitable(closed):
            await closed


def main() -> None:
    """Runs the features of this program that the world on the command line asks for."""
    world = World(**json.loads(sys.argv[1]))
    asyncio.run(_run(world, vars(sys.modules["__main__"])))


async def _run(world: World, features: dict[str, Callable[[World], Awaitable[None]]]) -> None:
    for name in world.features:
        result: dict[str, Any] = {"feature": name}
        started = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT_S):
                await features[name](world)
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-4:])
            result |= {
                "error": f"{type(error).__name__}: {error}",
                "where": where,
                "status": status_of(error),
            }
        result["seconds"] = round(time.monotonic() - started, 2)
        print(json.dumps(result), flush=True)


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error of a client tells, itself or as its cause."""
    while error is not None:
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None


async def stoppable(world: World, ask: Callable[[str], Awaitable[str]]) -> tuple[str, str]:
    """A prompt, and a word of its answer. Some answers of random weights have no second word."""
    for _ in range(20):
        prompt = world.fresh()
        words = (await ask(prompt)).split()
        if len(words) > 1:
            return prompt, words[1]
    raise AssertionError("no answer has two words")
