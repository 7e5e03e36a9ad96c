"""Engines that are too busy, and tenants over their limits, over real sockets."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic

import pytest

from proxy.core.admission import MAX_LOOKS, Pace
from proxy.core.quotas import TenantLimits
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import LimitSettings
from tests.fakes import ASK, CHAT, FakeEngine, answer, asked, client_of, is_openai_error, proxy_over
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
        urgent = world.send(LONG | {"user": "now"}, **{"x-kvpin-priority": "-1"})
        await world.until_waiting(6)
        world.backlog.reported(0)
        world.released.set()
        await asyncio.gather(*greedy, modest, urgent)
        order = [exchange.json["user"] for exchange in world.engine.seen[2:]]
        assert order.index("now") == 0  # of its tenant's
        assert order.index("m") <= 2
        assert [name for name in order if name.startswith("g")] == ["g0", "g1", "g2", "g3"]


async def test_a_priority_orders_its_tenants_requests_and_does_not_reach_the_engine():
    async with busy() as world:
        plain = world.send(LONG | {"user": "later"})
        await world.until_waiting(1)
        urgent = world.send(LONG | {"user": "now", "priority": -5})
        await world.until_waiting(2)
        world.backlog.reported(0)
        world.released.set()
        await asyncio.gather(plain, urgent)
        sent = [exchange.json for exchange in world.engine.seen[2:]]
        assert [each["user"] for each in sent] == ["now", "later"]
        assert not any("priority" in each for each in sent)


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


@asynccontextmanager
async def ada_on_busy_a(**queue):
    """A busy world whose engine "a" alone serves the adapter "ada", beside an idle engine "b"."""
    async with busy(**queue) as world, FakeEngine("b") as other:
        engine = world.proxy.fleet.engines["a"]
        engine.info = replace(engine.info, loras=frozenset({"ada"}))
        world.proxy.add(other)
        world.other = other
        yield world


async def test_many_requests_for_an_adapter_on_a_busy_engine_hold_up_no_others():
    async with ada_on_busy_a() as world:
        adas = [world.send(ASK | {"model": "ada"}, tenant) for tenant in ("greedy", "modest") * MAX_LOOKS]
        await world.until_waiting(len(adas))
        for tenant in ("greedy", "modest"):
            assert (await world.send(tenant=tenant)).status_code == 200
        assert len(world.line) == len(adas)
        assert len(world.other.seen) == 2
        world.backlog.reported(0)
        world.released.set()
        assert {response.status_code for response in await asyncio.gather(*adas)} == {200}
        assert len(world.other.seen) == 2


async def test_a_long_wait_for_an_adapter_is_not_told_to_those_that_need_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(Pace, "per_s", lambda *_: 1.0)  # token a second
    async with ada_on_busy_a(queue_s=300) as world:
        first = world.send(ASK | {"model": "ada"})
        await world.until_waiting(1)
        refused = await world.send(ASK | {"model": "ada"})
        assert is_openai_error(refused, 503, "overloaded")
        assert "would wait about" in refused.json()["error"]["message"]
        for _ in range(3):
            assert (await world.send()).status_code == 200
        world.backlog.reported(0)
        world.released.set()
        assert (await first).status_code == 200


async def test_the_line_goes_on_when_the_engine_is_lost():
    async with busy() as world:
        waits = world.send()
        await world.until_waiting(1)
        engine = world.proxy.fleet.engines["a"]
        world.proxy.fleet.leave(engine)
        assert is_openai_error(await waits, 503, "no_engine")
        world.running.clear()


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (TenantLimits(requests_per_minute=1), "requests_per_minute = 1"),
        (TenantLimits(tokens_per_minute=2), "tokens_per_minute = 2"),
    ],
)
async def test_a_tenant_over_its_limit_is_told_when_to_come_back(limits, name):
    async with asked(answer, tenants=Tenants(KEYS, {"greedy": limits})) as (proxy, client, engine):
        greedy = {"authorization": "Bearer greedy"}
        assert (await client.post(CHAT, json=ASK, headers=greedy)).status_code == 200
        refused = await client.post(CHAT, json=ASK, headers=greedy)
        assert is_openai_error(refused, 429, "rate_limit_exceeded")
        assert name in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 30
        assert proxy.last.status == 429
        assert 'kvpin_refused_total{reason="limit"} 1' in proxy.metrics.render().decode()
        refused = await client.post("/v1/messages", json={**ASK, "max_tokens": 1}, headers=greedy)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        other = await client.post(CHAT, json=ASK, headers={"authorization": "Bearer modest"})
        assert other.status_code == 200
        assert len(engine.seen) == 2


async def test_requests_at_a_time_are_counted_until_their_end():
    limits = {"greedy": TenantLimits(concurrent_requests=1)}
    async with (
        FakeEngine("a") as engine,
        proxy_over(tenants=Tenants(KEYS, limits)) as proxy,
        client_of(proxy) as client,
    ):
        proxy.add(engine, runs_several=False)
        world = Busy(proxy, client, engine)
        engine.script = world.script
        first = world.send()
        await until(lambda: engine.seen)
        assert is_openai_error(await world.send(), 429, "rate_limit_exceeded")
        world.released.set()
        assert (await first).status_code == 200
        assert (await world.send()).status_code == 200
        # The choices of one request are one request.
        assert (await world.send(ASK | {"n": 3})).status_code == 200
        assert len(engine.seen) == 5
