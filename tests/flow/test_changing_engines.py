"""Engines that seem to be another process at each attempt."""

import asyncio

import pytest

from engine_adapter import EngineChanged
from proxy.fleet.engine import EngineState
from tests.fakes import ASK, CHAT, STREAM, answer, asked
from tests.kv_world import until


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
