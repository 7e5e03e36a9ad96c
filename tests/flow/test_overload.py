"""Engines that are too busy, and tenants over their limits, over real sockets."""

import asyncio
from contextlib import asynccontextmanager
from time import monotonic

from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import LimitSettings
from tests.fakes import ASK, CHAT, answer, asked, is_openai_error
from tests.kv_world import until

# A turn of its tenant each.
LONG = {"model": "m", "messages": [{"role": "user", "content": "x" * 8000}], "max_tokens": 1024}
KEYS = [ApiKey.of(name, name) for name in ("greedy", "modest")]


class Busy:
    """A proxy whose engine computes two requests until `release`, and reports that many more wait there."""

    def __init__(self, proxy, client, engine):
        self.proxy, self.client, self.engine = proxy, client, engine
        self.backlog = proxy.fleet.engines["a"].ledger.backlog
        self.released = asyncio.Event()

    async def script(self, exchange):
        await self.released.wait()
        await answer(exchange)

    async def fill(self):
        self.engine.script = self.script
        self.running = [self.send() for _ in range(2)]
        await until(lambda: len(self.engine.seen) == 2)
        self.backlog.reported(500)
        self.backlog.began(monotonic())

    def send(self, body=ASK, tenant="greedy", path=CHAT, **headers):
        headers = {"authorization": f"Bearer {tenant}", **headers}
        return asyncio.create_task(self.client.post(path, json=body, headers=headers))

    async def until_waiting(self, count):
        await until(lambda: len(self.line) == count)

    @property
    def line(self):
        return self.proxy.fleet.pools["m"].line

    def metric(self, name):
        text = self.proxy.metrics.render().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def busy(**queue):
    options = {"tenants": Tenants(KEYS), "queue": LimitSettings(**queue)}
    async with asked(answer, **options) as (proxy, client, engine):
        world = Busy(proxy, client, engine)
        await world.fill()
        yield world
        world.released.set()
        for response in await asyncio.gather(*world.running):
            assert response.status_code == 200
        await proxy.settled()
        assert len(world.line) == 0


async def test_a_request_waits_here_until_its_engine_is_less_busy():
    async with busy() as world:
        waits = world.send()
        await world.until_waiting(1)
        assert (len(world.engine.seen), world.metric("kvpin_queue_requests{")) == (2, 1)
        world.backlog.reported(0)
        world.released.set()
        assert (await waits).status_code == 200
        waited = [record.queued_s for record in world.proxy.requests if record.queued_s is not None]
        assert len(waited) == 1
        assert world.metric("kvpin_queued_seconds_count{") == 1
        assert world.metric("kvpin_refused_total{") == 0


async def test_a_modest_tenant_does_not_wait_for_all_of_a_greedy_one():
    async with busy() as world:
        greedy = [world.send(LONG | {"user": f"g{n}"}) for n in range(4)]
        await world.until_waiting(4)
        modest = world.send(LONG | {"user": "m"}, "modest")
        urgent = world.send(LONG | {"user": "now", "priority": -5})
        await world.until_waiting(6)
        world.backlog.reported(0)
        world.released.set()
        await asyncio.gather(*greedy, modest, urgent)
        sent = [exchange.json for exchange in world.engine.seen[2:]]
        assert not any("priority" in each for each in sent)
        order = [each["user"] for each in sent]
        assert order.index("now") == 0  # of its tenant's
        assert order.index("m") <= 2
        assert [name for name in order if name.startswith("g")] == ["g0", "g1", "g2", "g3"]


async def test_who_would_wait_too_long_is_told_when_to_come_back():
    async with busy(queue_s=0.05) as world:
        refused = await world.send()
        assert is_openai_error(refused, 503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        message = {"model": "m", "max_tokens": 1, "messages": ASK["messages"]}
        refused = await world.send(message, path="/v1/messages")
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert world.proxy.last.queued_s > 0
        assert world.metric('kvpin_refused_total{reason="busy"}') == 2
        assert len(world.engine.seen) == 2


async def test_a_client_that_gives_up_sooner_is_told_sooner():
    async with busy() as world:
        refused = await world.send(**{"x-stainless-timeout": "0.05"})
        assert is_openai_error(refused, 503, "overloaded")
        assert "the limit is 0.05 s" in refused.json()["error"]["message"]


async def test_a_client_that_leaves_the_line_leaves_nothing():
    async with busy() as world:
        leaves = world.send()
        await world.until_waiting(1)
        leaves.cancel()
        await world.until_waiting(0)
        await until(lambda: any(record.status == 499 for record in world.proxy.requests))


async def test_the_line_goes_on_when_the_engine_is_lost():
    async with busy() as world:
        waits = world.send()
        await world.until_waiting(1)
        engine = world.proxy.fleet.engines["a"]
        world.proxy.fleet.leave(engine)
        assert is_openai_error(await waits, 503, "no_engine")
        world.running.clear()
