import asyncio

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.lmcache import pins
from engine_adapter.lmcache.pins import TimedPins
from tests.engine_adapter.lmcache.conftest import PROMPT


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_pin_ends_when_its_time_is_up(lmcache, coordinator, scope):
    held = TimedPins()
    await held.add(coordinator, scope, PROMPT, "s", 0.05)
    assert (len(held), len(lmcache.pins)) == (1, 6)
    await until(lambda: not held and not lmcache.pins)


async def test_a_pin_can_be_ended_before_and_once(lmcache, coordinator, scope):
    held = TimedPins()
    pin_id = await held.add(coordinator, scope, PROMPT, "s", 60)
    other = await held.add(coordinator, scope, PROMPT, "s", 60)
    assert set(lmcache.pins.values()) == {2}
    assert await held.remove(pin_id)
    assert not await held.remove(pin_id)
    assert (len(held), set(lmcache.pins.values())) == (1, {1})
    assert await held.remove(other)
    assert lmcache.pins == {}


async def test_the_end_is_tried_until_it_is_heard(lmcache, coordinator, scope, monkeypatch):
    monkeypatch.setattr(pins, "_RETRY_S", 0.02)
    held = TimedPins()
    lmcache_error = await held.add(coordinator, scope, PROMPT, "", 0.02)
    lmcache.coordinator_error = 503
    await asyncio.sleep(0.1)
    assert len(held) == 1
    with pytest.raises(EngineUnavailable):
        await held.remove(lmcache_error)
    lmcache.coordinator_error = None
    await until(lambda: not held and not lmcache.pins)


async def test_closing_ends_all(lmcache, coordinator, scope):
    held = TimedPins()
    for salt in ("s", "t"):
        await held.add(coordinator, scope, PROMPT, salt, 60)
    await held.aclose()
    assert lmcache.pins == {}
    lmcache.coordinator_error = 503
    await held.aclose()


async def test_closing_does_not_wait_for_a_coordinator_that_is_gone(lmcache, coordinator, scope):
    held = TimedPins()
    await held.add(coordinator, scope, PROMPT, "", 60)
    lmcache.coordinator_error = 503
    await held.aclose()
    assert len(held) == 0
