import asyncio

import pytest

from proxy.core.admission import Needs, Pace
from proxy.errors import Overloaded
from proxy.fleet import wait_queue
from proxy.fleet.wait_queue import Line
from proxy.settings import LimitSettings

ANY, ON_A = Needs(), Needs(home="a")


class World:
    """A line before two engines. Engine "a" takes `room` requests; "b" takes those that `b` says."""

    def __init__(self, **limits):
        self.room, self.b, self.lost, self.served = 0, 0, set(), []
        self.line = Line(self.engines_for, self.is_free, LimitSettings(**limits))

    def engines_for(self, needs):
        return frozenset("ab" if needs.home is None else needs.home) - self.lost

    def is_free(self, engine):
        return (self.room if engine == "a" else self.b) > 0

    def send(self, name, tenant="a", needs=ANY, *, priority=0, tokens=1, size=1, deadline_s=None):
        def may_go():
            engines = self.engines_for(needs)
            return not engines or any(map(self.is_free, engines))

        async def go():
            numbers = {"priority": priority, "tokens": tokens, "size": size, "deadline_s": deadline_s}
            await self.line.wait(tenant, needs, **numbers, may_go=may_go)
            # In the same step: its engine counts it.
            if self.room > 0:
                self.room -= 1
            else:
                self.b -= 1
            self.served.append(name)

        return asyncio.create_task(go())


async def test_other_bounds_hold_from_the_next_request_on(virtual_time):
    world = World(queue_requests=10, queue_bytes=10)
    tasks = [world.send(name, size=4) for name in "ab"]
    await asyncio.sleep(0)
    world.line.bound(LimitSettings(queue_requests=3, queue_bytes=100, queue_s=0.1))
    tasks.append(world.send("c", size=4))
    await asyncio.sleep(0)
    assert len(world.line) == 3
    with pytest.raises(Overloaded, match="too many requests wait"):
        await world.send("d", size=4)
    with pytest.raises(Overloaded, match="the limit is"):
        await tasks.pop()
    for task in tasks:
        task.cancel()


async def test_one_that_leaves_while_it_is_called_gives_its_turn_on():
    world = World()
    first, second = world.send("first"), world.send("second")
    await asyncio.sleep(0)
    world.room = 1
    world.line.call_next()
    first.cancel()
    await second
    assert world.served == ["second"]
    assert len(world.line) == 0


@pytest.fixture
def steady(monkeypatch):
    """Two tokens a second leave for each set of engines."""
    monkeypatch.setattr(Pace, "per_s", lambda *_: 2.0)


async def test_nobody_is_refused_while_an_engine_is_free(steady):
    """Others wait for the best of its slots, and leave slowly."""
    world = World(queue_s=10)
    waits = world.send("a", needs=ON_A, tokens=19)
    await asyncio.sleep(0)
    world.b = 1
    await world.send("b", tokens=1_000_000)
    world.room = 1
    await waits
    assert world.served == ["b", "a"]


async def test_a_wait_for_another_engine_is_not_expected_of_those_that_need_not_wait_for_it(steady):
    world = World(queue_s=10)
    stuck = [world.send("s", tenant, ON_A, tokens=5) for tenant in "xyz"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="would wait about 13 s"):
        await world.send("s", "x", ON_A, tokens=11)
    waits = world.send("waits", "w", tokens=15)  # nobody waits for b
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="would wait about 15 s"):
        await world.send("waits", "x", tokens=15)
    with pytest.raises(Overloaded, match="would wait about 11 s"):  # two sets of engines, 4 tokens a second
        await world.send("s", "v", ON_A, tokens=15)
    world.b, world.room = 1, 3
    await asyncio.gather(waits, *stuck)


async def test_those_compete_that_one_engine_can_take():
    world = World()
    assert not world.line.competes(ANY)
    waits = world.send("waits", needs=ON_A)
    await asyncio.sleep(0)
    assert world.line.competes(ANY)
    assert world.line.competes(ON_A)
    assert not world.line.competes(Needs(home="b"))
    world.room = 1
    await waits


async def test_the_paces_of_engines_that_left_are_forgotten(virtual_time, monkeypatch):
    monkeypatch.setattr(wait_queue, "MAX_PACES", 2)
    world = World()
    for home in "bcdefg":
        waits = world.send(home, needs=Needs(home=home))
        await asyncio.sleep(0)
        world.b = 1
        await waits
    assert len(world.line._paces) <= 3
