"""Engines that answer errors: they get few requests for a while, and retries have a budget. Real sockets."""

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import httpx
import pytest

from proxy.core import audit
from proxy.core.life import RETRY_FLOOR, Rules
from proxy.steps.attempt import Attempts
from tests.fakes import (
    ASK,
    CHAT,
    DONE,
    STREAM,
    Exchange,
    answer,
    asked,
    is_openai_error,
)
from tests.kv_world import until


async def failing(exchange, status=500):
    await exchange.send({"message": "broken"}, status=status)


@asynccontextmanager
async def two(**options):
    async with asked(answer, answer, **options) as (proxy, client, bad, good):
        bad.script = failing
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
        bad.script = partial(failing, status=429)
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
        good.script = failing
        assert await statuses(client, 20) == [500] * 20
        assert all(not engine.is_allowed for engine in proxy.fleet.engines.values())
        good.script = answer
        assert set(await statuses(client, 4)) == {500, 200}


async def test_retries_do_not_multiply_the_load():
    async with two() as (bad, good, _, client):
        good.script = failing
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


async def hanging(exchange, chunks=()):
    if chunks:
        await exchange.start()
        for chunk in chunks:
            await exchange.chunk(chunk)
    await exchange.left.wait()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"id":\xb8^ns\xdc"x"}', "it holds no answer"),
        (b'{"choices":[{"mess', "it holds no answer"),
        (b"", "it is empty"),
    ],
)
async def test_an_engine_whose_answer_is_not_json_is_replaced(content, why):
    async with two() as (bad, good, proxy, client):
        bad.script = partial(Exchange.send, content=content)
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert proxy.fleet.engines["a"].last_error == (
            f"the engine's answer has not the form of {CHAT}: {why}"
        )
        good.script = bad.script
        assert (await client.post(CHAT, json=ASK)).status_code == 502


@pytest.mark.parametrize("more", [b'"logprob":-Infinity', b'"usage":1', b'"error":null'])
async def test_json_with_something_odd_beside_its_choices_is_passed_on(more):
    content = b'{"choices":[{"message":{"content":"hi"}}],%b}' % more
    async with two() as (bad, _, _, client):
        bad.script = partial(Exchange.send, content=content)
        response = await client.post(CHAT, json=ASK)
        assert (response.content, response.headers["x-kvpin-engine"]) == (content, "a")


async def test_an_engine_that_does_not_answer_in_time_is_replaced():
    async with two(rules=Rules(first_byte_s=0.1)) as (bad, _, proxy, client):
        bad.script = hanging
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert proxy.fleet.engines["a"].last_error == (
            "the engine did not answer within 0.1 s (timeouts.first_byte_s)"
        )
        await proxy.settled()
        assert counts(proxy) == [(0, 1), (1, 0)]


async def test_a_client_that_leaves_is_no_failure_of_the_engine():
    async with two() as (bad, _, proxy, client):
        bad.script = hanging
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=ASK, timeout=0.1)
        await proxy.settled()
        assert counts(proxy) == [(1, 0), (0, 0)]


async def test_nor_is_an_engine_that_does_not_end_its_answer():
    async with two(rules=Rules(idle_s=0.2)) as (bad, _, proxy, client):
        bad.script = partial(hanging, chunks=(DONE,))
        assert (await client.post(CHAT, json=STREAM)).content == DONE
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


async def test_no_request_is_retried_after_its_total_time():
    async def slowly_failing(exchange):
        await asyncio.sleep(0.1)
        await failing(exchange)

    async with two(rules=Rules(total_s=0.1)) as (bad, good, _, client):
        bad.script = slowly_failing
        assert (await client.post(CHAT, json=ASK)).status_code == 504
        assert (len(bad.seen), len(good.seen)) == (1, 0)


async def test_the_total_time_is_that_of_all_attempts():
    async with two(rules=Rules(first_byte_s=0.2, total_s=0.3)) as (bad, good, _, client):
        bad.script = good.script = hanging
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 504, "time_limit")
        assert response.headers["x-should-retry"] == "false"
        said = "the request took longer than 0.3 s, kvpin's limit (timeouts.total_s)"
        assert response.json()["error"]["message"] == said
        assert (len(bad.seen), len(good.seen)) == (1, 1)


@pytest.mark.parametrize(
    ("limit", "said", "code"),
    [
        ("idle_s", "nothing of the answer came for 0.5 s (timeouts.idle_s)", "engine_failed"),
        ("total_s", "the request took longer than 0.5 s, kvpin's limit (timeouts.total_s)", "time_limit"),
    ],
)
async def test_a_stream_that_stops_or_does_not_end_is_broken_off(limit, said, code):
    async with two(rules=Rules(**{limit: 0.5})) as (bad, _, proxy, client):
        bad.script = partial(hanging, chunks=(b"data: 1\n\n", b"data: 2\n\n"))
        text = b""
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
            async with client.stream("POST", CHAT, json=STREAM) as response:
                async for chunk in response.aiter_raw():
                    text += chunk
        error = json.loads(text.rpartition(b"data: ")[2])["error"]
        assert (error["message"], error["code"]) == (said, code)
        assert proxy.last.error == said
        assert counts(proxy) == [(0, 1), (0, 0)]
