"""Bursts of one new prefix, over real sockets: engines that compute side by side are not made to compute it
more than once."""

import asyncio
import math
from array import array
from contextlib import AsyncExitStack, aclosing
from time import monotonic

import pytest

from engine_adapter import Tier, common_prefix
from proxy.fleet import pool
from proxy.fleet.engine import EngineState
from proxy.prompt import Prompt
from tests.fakes import FakeEngine, client_of, event, proxy_over
from tests.kv_world import until

PREFIX, TAIL, BLOCK = 2000, 20, 16
BURST = 10
# What the prefix takes, as far as the proxy knows.
PREFILL_S = 60.0


class SideBySide(FakeEngine):
    """Computes prompts side by side; what one has computed others find once it has its first token, which
    comes when `gate` opens."""

    def __init__(self, engine_id="a"):
        super().__init__(engine_id, self.serve)
        self.gate = asyncio.Event()
        self.computed = 0
        self._kept = []

    async def serve(self, exchange):
        prompt = array("i", exchange.json["prompt"])
        cached = max((common_prefix(prompt, kept) // BLOCK * BLOCK for kept in self._kept), default=0)
        self.computed += len(prompt) - cached
        await self.gate.wait()
        self._kept.append(prompt)
        if exchange.json["stream"]:
            await exchange.stream(event({"choices": [{"text": "x"}]}), b"data: [DONE]\n\n")
        else:
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            await exchange.send({"choices": [{"text": "x"}], "usage": usage})


@pytest.fixture
async def engine():
    async with SideBySide() as engine:
        yield engine


def body(number, *, stream=True):
    tail = range(10_000 + TAIL * number, 10_000 + TAIL * (number + 1))
    return {"model": "m", "prompt": [*range(PREFIX), *tail], "stream": stream}


class Burst:
    def __init__(self, proxy, client):
        self.proxy, self.client = proxy, client
        self.asked = []

    def ask(self, *numbers, stream=True):
        for number in numbers:
            request = self.client.post("/v1/completions", json=body(number, stream=stream))
            self.asked.append(asyncio.create_task(request))

    def waiting(self, engine="a"):
        """Requests whose answer has not begun."""
        return len(self.proxy.fleet.engines[engine].unanswered)

    def queue_s(self, engine="a"):
        """Seconds of prefill that are expected there."""
        return self.proxy.fleet.engines[engine].ledger.view(monotonic()).queue_s

    async def predicted(self):
        """Tokens that were expected to be cached, of each request in turn."""
        return [
            int(answer.headers["x-kvpin-predicted-tokens"]) for answer in await asyncio.gather(*self.asked)
        ]

    async def answers(self):
        return [answer.status_code for answer in await asyncio.gather(*self.asked)]


@pytest.fixture
async def start(monkeypatch):
    """Makes a proxy over engines that compute a prefix within `prefill_s`, as far as the proxy knows; at the
    end no request may have left a trace. No engine is so busy that requests queue in the proxy."""
    monkeypatch.setattr(pool, "HOLD_S", math.inf)
    async with AsyncExitStack() as stack:

        async def start(*engines, prefill_s=PREFILL_S, **info):
            proxy = await stack.enter_async_context(proxy_over(reuse=True))
            for engine in engines:
                proxy.add(engine, gpu_blocks=10_000, **info)
            proxy.fleet.pools["m"].placer.rates.computed(PREFIX, prefill_s, 0)
            burst = Burst(proxy, await stack.enter_async_context(client_of(proxy)))
            bursts.append(burst)
            return burst

        bursts = []
        yield start
        for burst in bursts:
            await asyncio.gather(*burst.asked, return_exceptions=True)
            await burst.proxy.settled()


async def test_a_new_prefix_is_computed_once(engine, start):
    burst = await start(engine)
    burst.ask(*range(BURST))
    await until(lambda: burst.waiting() == BURST and engine.seen)
    engine.gate.set()
    assert await burst.answers() == [200] * BURST
    assert engine.computed == PREFIX + BURST * TAIL


async def test_engines_that_share_their_prefills_are_left_to_it(engine, start):
    burst = await start(engine, shares_prefill=True)
    burst.ask(*range(BURST))
    await until(lambda: len(engine.seen) == BURST)
    engine.gate.set()
    assert await burst.answers() == [200] * BURST
    assert engine.computed == BURST * (PREFIX + TAIL)


@pytest.mark.parametrize("leaves", ["the leader's engine fails it", "the leader's client leaves"])
async def test_one_of_those_that_wait_takes_the_place_of_one_that_fails(engine, start, leaves):
    burst = await start(engine)
    burst.ask(0)
    leader = await engine.request()
    burst.ask(1, 2, 3, 4)
    await until(lambda: burst.waiting() == 5)
    if "client" in leaves:
        burst.asked[0].cancel()
    else:
        leader.die()
    await engine.request(1)
    await until(lambda: burst.waiting() == 4)
    assert burst.queue_s() > PREFILL_S, "the prefix is computed again"
    engine.gate.set()
    del burst.asked[0]
    assert await burst.answers() == [200] * 4
    assert sorted(await burst.predicted()) == [0, PREFIX, PREFIX, PREFIX]
    assert engine.computed == 2 * (PREFIX + TAIL) + 3 * TAIL


async def test_what_the_leader_left_before_it_failed_is_found(engine, start):
    burst = await start(engine)
    burst.ask(0)
    leader = await engine.request()
    burst.ask(1)
    await until(lambda: burst.waiting() == 2)
    own = burst.proxy.fleet.pools["m"]
    hashes = own.chain(Prompt(array("i", range(PREFIX)))).hashes
    own.index.store("a", Tier.GPU, hashes[:50])
    leader.die()
    await engine.request(1)
    engine.gate.set()
    del burst.asked[0]
    assert await burst.predicted() == [50 * BLOCK]


async def test_a_lost_engine_is_not_waited_for(engine, start):
    async with SideBySide("b") as other:
        burst = await start(engine, other)
        spare = burst.proxy.fleet.engines["b"]
        spare.state = EngineState.DRAINING  # when idle, it would compute the prefix as well
        burst.ask(0)
        await engine.request()
        burst.ask(1, 2)
        await until(lambda: burst.waiting() == 3)
        spare.state = EngineState.READY
        burst.proxy.fleet.engines["a"].abandon()
        await until(lambda: burst.waiting("b") == 3)
        other.gate.set()
        assert await burst.answers() == [200] * 3
        assert (len(engine.seen), other.computed) == (1, PREFIX + 3 * TAIL)


@pytest.mark.parametrize("stream", [True, False])
async def test_nobody_waits_for_longer_than_is_to_be_expected(engine, start, stream):
    burst = await start(engine, prefill_s=0.05)
    burst.ask(0, stream=stream)
    await engine.request()
    burst.ask(1)
    await engine.request(1)
    assert not engine.gate.is_set()
    engine.gate.set()
    assert await burst.answers() == [200] * 2


async def test_a_stream_that_goes_on_holds_nobody_up(engine, start):
    burst = await start(engine)
    go_on = asyncio.Event()

    async def serve(exchange):
        await exchange.start()
        await exchange.chunk(event({"choices": [{"text": "x"}]}))
        await go_on.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    engine.script = serve
    streaming = burst.client.stream("POST", "/v1/completions", json=body(0))
    async with streaming as response, aclosing(response.aiter_bytes()) as chunks:
        await anext(chunks)
        burst.ask(1)
        await engine.request(1)
        go_on.set()
        assert await burst.answers() == [200]
        assert [chunk async for chunk in chunks] == [b"data: [DONE]\n\n"]
