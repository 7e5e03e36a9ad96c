"""Two `kvpin serve` in front of the same engines, which send no events."""

import asyncio
from contextlib import AsyncExitStack, ExitStack

import httpx
import pytest

from tests.fakes import FakeEngine, answer
from tests.kv_world import tokens
from tests.live.answers import becomes
from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live


class Slow(FakeEngine):
    """Answers completions when `gate` opens."""

    def __init__(self, engine_id):
        super().__init__(engine_id, self.serve)
        self.gate = asyncio.Event()
        self.gate.set()

    async def serve(self, exchange):
        if exchange.body:
            await self.gate.wait()
        await answer(exchange)


@pytest.fixture
def start():
    """Starts processes, and ends them in the end."""
    with ExitStack() as processes:
        yield processes


async def test_they_act_as_one_and_a_killed_ones_requests_vanish(start, tmp_path):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Slow(name)) for name in ("a", "b")]
        flags = [f"--engine=openai-compatible={engine.url},id={engine.id}" for engine in engines]
        flags, quick = ["--exchange", f"unix:{tmp_path / 'bus'}", *flags], {"tokenised": False}
        one = await asyncio.to_thread(start.enter_context, running_kvpin(tmp_path / "1.log", *flags, **quick))
        two = await asyncio.to_thread(start.enter_context, running_kvpin(tmp_path / "2.log", *flags, **quick))

        def peers(kvpin):
            return kvpin.admin("GET", "stats").json()["exchange"]["peers"]

        def in_flight(kvpin):
            return sum(engine["in_flight"] for engine in kvpin.engines().values())

        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        body = {"model": "m", "prompt": tokens(400), "max_tokens": 1}
        served = await client.post(f"{one.base_url}/completions", json=body)
        home = served.headers["x-kvpin-engine"]
        await becomes(lambda: two.engines()[home]["blocks"]["gpu"] == 25)
        again = await client.post(f"{two.base_url}/completions", json=body)
        assert again.headers["x-kvpin-engine"] == home
        assert again.headers["x-kvpin-predicted-tokens"] == "384"

        for engine in engines:
            engine.gate.clear()
        running = asyncio.ensure_future(client.post(f"{one.base_url}/completions", json=body))
        await becomes(lambda: in_flight(two) == 1)
        await asyncio.to_thread(one.kill)
        with pytest.raises(httpx.TransportError):
            await running
        await becomes(lambda: in_flight(two) == 0)
        await becomes(lambda: peers(two) == [])
        assert "another kvpin is lost" in two.log.read_text()
        for engine in engines:
            engine.gate.set()
        assert (await client.post(f"{two.base_url}/completions", json=body)).status_code == 200
