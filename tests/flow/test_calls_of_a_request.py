"""The cost of a request, counted in calls of kvpin's functions: a busy machine does not change them.

`benchmarks/call_count.py` says which functions these are. Whoever raises a limit says why in the commit.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import engine_adapter
import proxy
from tests.fakes import ASK, CHAT, FakeEngine, client_of, proxy_over

OURS = tuple(str(Path(package.__file__).parent) for package in (proxy, engine_adapter))
PIECE = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
LAST = b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
REPEATS = 8


async def calls_of(work: Callable[[], Awaitable[object]]) -> int:
    """Calls of kvpin's functions while `work` runs; a coroutine that goes on counts again."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(note)
    try:
        await work()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
async def engines():
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        yield a, b


async def test_a_small_chat(engines):
    async with proxy_over(*engines) as proxy, client_of(proxy) as client:

        async def ask():
            assert (await client.post(CHAT, json=ASK)).status_code == 200

        for _ in range(REPEATS):
            await ask()
        assert min([await calls_of(ask) for _ in range(REPEATS)]) <= 300


async def test_a_piece_of_a_stream(engines):
    """A piece comes once the client has the one before it, so that each is read by itself."""
    has_one = asyncio.Event()

    async def script(exchange):
        await exchange.start()
        for _ in range(exchange.json["n_pieces"]):
            has_one.clear()
            await exchange.chunk(PIECE)
            await has_one.wait()
        await exchange.chunk(LAST)
        await exchange.end()

    engines[0].script = engines[1].script = script
    async with proxy_over(*engines) as proxy, client_of(proxy) as client:

        async def ask(pieces):
            body = {**ASK, "stream": True, "temperature": 0, "n_pieces": pieces}
            async with client.stream("POST", CHAT, json=body) as response:
                async for _ in response.aiter_raw():
                    has_one.set()

        await ask(1)
        few, many = [await calls_of(lambda pieces=pieces: ask(pieces)) for pieces in (10, 160)]
        assert (many - few) / 150 <= 9
