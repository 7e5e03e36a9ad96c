"""Adapters that are asked for and not known: who waits, and how long."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from proxy.fleet import monitor as monitor_module
from proxy.fleet.engine import EngineState
from tests.proxy.fleet.test_monitor import World


@pytest.fixture
async def world():
    world = World(interval_s=30.0)
    yield world
    await world.tasks.stop()


async def test_those_that_wait_for_a_look_that_was_not_done_look_themselves(world, monkeypatch):
    monkeypatch.setattr(monitor_module, "LOOK_UP_S", 0.3)
    engine, adapter = world.add(loads_loras=True)
    async with asyncio.timeout(20):
        while engine.state is not EngineState.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await world.fleet.look_up()  # within the next 0.3 s, all that come wait for the next look
    adapter.info = now = replace(adapter.info, loras=frozenset({"ada"}))

    async def connect():
        await asyncio.sleep(0.2)
        return now

    adapter.connect = connect
    first = asyncio.create_task(world.fleet.look_up())
    await asyncio.sleep(0.02)
    second = asyncio.create_task(world.fleet.look_up())
    await asyncio.sleep(0.35)  # the look has begun, and answers both
    first.cancel()
    assert await second
    assert world.fleet.pools["m"].lora_of("ada") == "ada"  # else it is a 404


async def test_an_engine_that_hangs_holds_up_a_look_no_longer_than_its_limit(world):
    """Fails: those that ask in the middle of a look wait for its end, for the pause, and for their own."""
    world.monitor.timeout_s = 1.0
    engine, adapter = world.add(loads_loras=True)
    async with asyncio.timeout(20):
        while engine.state is not EngineState.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def connect():
        await asyncio.Event().wait()

    adapter.connect = connect
    first = asyncio.create_task(world.fleet.look_up())
    await asyncio.sleep(0.1)
    began = asyncio.get_running_loop().time()
    await world.fleet.look_up()
    took_s = asyncio.get_running_loop().time() - began
    await first
    assert took_s < 1.0 + monitor_module.LOOK_UP_S + 0.2, f"{took_s:.1f} s"
