"""Engines that answer errors: they get few requests for a while, and retries have a budget. Real sockets."""

import asyncio
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from engine_adapter import EngineChanged
from proxy.core import audit
from proxy.core.life import RETRY_FLOOR, Rules
from proxy.fleet.engine import EngineState
from proxy.steps.attempt import Attempts
from tests.fakes import ASK, CHAT, STREAM, answer, asked, is_openai_error
from tests.kv_world import until
from tests.scripts import hangs, sends

FAILING = sends({"message": "broken"}, 500)


@asynccontextmanager
async def two(**options):
    async with asked(answer, answer, **options) as (proxy, client, bad, good):
        bad.script = FAILING
        yield bad, good, proxy, client
        await proxy.settled()


def counts(proxy):
    """Requests that each engine served, and that failed there."""
    return [(engine.served, engine.failed) for engine in proxy.fleet.engines.values()]


async def statuses(client, count):
    return [(await client.post(CHAT, json=ASK)).status_code for _ in range(count)]


async def test_an_engine_that_refuses_all_gets_little_and_all_again_once_it_is_well(monkeypatch):
    monkeypatch.setattr(audit, "OPEN_S", 0.2)
    monkeypatch.setattr(audit, "MAX_OPEN_S", 0.2)
    async with two() as (bad, _, proxy, client):
        bad.script = sends({"message": "broken"}, 429)
        engine = proxy.fleet.engines["a"]
        assert await statuses(client, 40) == [200] * 40
        # It looks idle, and was asked every second time; each of these was tried twice.
        assert len(bad.seen) < 20
        bad.script = answer
        async with asyncio.timeout(20):
            while engine.breaker is not None:
                await client.post(CHAT, json=ASK)
        before = len(bad.seen)
        assert await statuses(client, 10) == [200] * 10
        assert len(bad.seen) - before == 5


async def test_where_all_fail_all_are_still_asked(monkeypatch):
    monkeypatch.setattr(audit, "OPEN_S", 60)
    async with two(rules=Rules(retries=0)) as (_, good, proxy, client):
        good.script = FAILING
        assert await statuses(client, 20) == [500] * 20
        assert all(not engine.is_allowed for engine in proxy.fleet.engines.values())
        good.script = answer
        assert set(await statuses(client, 4)) == {500, 200}


async def test_retries_do_not_multiply_the_load():
    async with two() as (bad, good, _, client):
        good.script = FAILING
        began = monotonic()
        assert await statuses(client, 100) == [500] * 100
        retried = len(bad.seen) + len(good.seen) - 100
        assert retried <= RETRY_FLOOR + 0.2 * 100 + 1 + (monotonic() - began)  # one a second


async def test_a_request_outlives_the_doubt_whether_its_only_engine_is_the_same_process():
    """Before, all that waited for the check were a 502: 235 at once on a busy machine."""
    async with asked(answer) as (proxy, client, server):
        engine = proxy.fleet.engines["a"]
        engine.doubt()
        asking = [asyncio.create_task(client.post(CHAT, json=ASK)) for _ in range(3)]
        await until(lambda: len(engine.leases) == len(asking))
        await asyncio.sleep(0.05)
        engine.connections += 1  # the check ends: it may be another process
        engine.sure.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3
        assert len(server.seen) == len(asking)


async def test_an_engine_that_does_not_answer_in_time_is_replaced():
    async with two(rules=Rules(first_byte_s=1.0)) as (bad, _, proxy, client):
        bad.script = hangs(headers=None)
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert proxy.fleet.engines["a"].last_error == (
            "the engine did not answer within 1 s (timeouts.first_byte_s)"
        )
        await proxy.settled()
        assert counts(proxy) == [(0, 1), (1, 0)]


async def test_a_client_that_leaves_is_no_failure_of_the_engine():
    async with two() as (bad, _, proxy, client):
        bad.script = hangs(headers=None)
        leaves = asyncio.create_task(client.post(CHAT, json=ASK))
        await bad.request()
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await proxy.settled()
        assert counts(proxy) == [(1, 0), (0, 0)]


async def test_an_engine_without_room_blames_nobody_and_is_overloaded(monkeypatch):
    @asynccontextmanager
    async def never(*_args, **_fields):
        await asyncio.sleep(60)
        yield

    async with two(rules=Rules(first_byte_s=0.1)) as (bad, good, proxy, client):
        monkeypatch.setattr(Attempts, "_hold", never)
        response = await client.post(CHAT, json=ASK)
        assert response.status_code == 503
        said = "the engine had no room for the request within 0.1 s (timeouts.first_byte_s)"
        assert said in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"
        assert bad.seen + good.seen == []
        assert {engine.last_error for engine in proxy.fleet.engines.values()} == {None}


async def test_the_total_time_is_that_of_all_attempts():
    async with two(rules=Rules(first_byte_s=1.0, total_s=1.5)) as (bad, good, _, client):
        bad.script = good.script = hangs(headers=None)
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 504, "time_limit")
        assert response.headers["x-should-retry"] == "false"
        said = "the request took longer than 1.5 s, kvpin's limit (timeouts.total_s)"
        assert response.json()["error"]["message"] == said
        assert (len(bad.seen), len(good.seen)) == (1, 1)


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_request_that_got_nothing_outlives_the_restart_of_its_only_engine(body):
    async with asked(answer, wait_s=5.0) as (proxy, client, *_):
        engine = proxy.fleet.engines["a"]
        engine.doubt()
        asking = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(3)]
        await until(lambda: len(engine.leases) == len(asking))
        await asyncio.sleep(0.05)
        engine.state = EngineState.DOWN
        engine.has_gone()  # as `Monitor._lose`
        engine.abandon()
        await asyncio.sleep(0.3)
        engine.state = EngineState.READY
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [200] * 3


async def test_an_engine_that_changes_at_each_attempt_does_not_fail_what_another_one_could_answer(
    monkeypatch,
):
    """The engine that got nothing may be tried again; but not thrice, where another one is well."""
    async with asked(answer, answer) as (proxy, client, _odd, good):
        engines = proxy.fleet.engines

        async def confirm(connections):
            raise EngineChanged("another process may have taken the engine's place")

        monkeypatch.setattr(engines["a"], "confirm", confirm)
        busy = asyncio.Event()

        async def slow(exchange):
            await busy.wait()
            await answer(exchange)

        good.script = slow  # it looks busy, so the odd one looks better
        asking = [asyncio.create_task(client.post(CHAT, json=ASK)) for _ in range(8)]
        await asyncio.sleep(0.3)
        busy.set()
        answers = await asyncio.gather(*asking)
        assert [each.status_code for each in answers] == [200] * 8
