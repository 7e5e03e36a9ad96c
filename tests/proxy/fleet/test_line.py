import asyncio

import pytest

from proxy.core.admission import Pace
from proxy.errors import Overloaded
from proxy.fleet.line import Line
from proxy.settings import LimitSettings


class World:
    """A line before one engine that takes `room` requests."""

    def __init__(self, **limits):
        self.line, self.room, self.served = Line(LimitSettings(**limits)), 0, []

    def send(self, name, tenant="a", *, priority=0, tokens=1, size=1, deadline_s=None):
        async def go():
            await self.line.wait(
                tenant,
                priority=priority,
                tokens=tokens,
                size=size,
                deadline_s=deadline_s,
                may_go=lambda: self.room > 0,
            )
            self.room -= 1  # in the same step: its engine counts it
            self.served.append(name)

        return asyncio.create_task(go())


async def test_each_goes_when_there_is_room_and_no_more_than_that():
    world = World()
    tasks = [world.send(name) for name in "abc"]
    await asyncio.sleep(0)
    assert (len(world.line), world.served) == (3, [])
    world.room = 2
    await asyncio.gather(*tasks[:2])
    assert (world.served, world.room, len(world.line)) == (["a", "b"], 0, 1)
    world.room = 1
    await tasks[2]
    assert (world.served, len(world.line)) == (["a", "b", "c"], 0)


async def test_other_bounds_hold_from_the_next_request_on():
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


async def test_a_request_goes_at_once_where_there_is_room_by_now():
    world = World()
    world.room = 1
    await world.send("a")
    assert world.served == ["a"]


async def test_one_that_leaves_while_it_is_called_gives_its_turn_on():
    world = World()
    first, second = world.send("first"), world.send("second")
    await asyncio.sleep(0)
    world.room = 1
    world.line._call_next()
    first.cancel()
    await second
    assert world.served == ["second"]
    assert len(world.line) == 0


async def test_one_that_leaves_before_leaves_nothing():
    world = World()
    first, second = world.send("first"), world.send("second")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    world.room = 1
    await second
    assert (world.served, len(world.line)) == (["second"], 0)


async def test_nobody_waits_longer_than_the_limit():
    world = World(queue_s=0.05)
    with pytest.raises(Overloaded, match=r"has waited 0.05 s for one; the limit is 0.05 s") as caught:
        await world.send("a")
    assert caught.value.headers == {"retry-after": "1"}
    assert len(world.line) == 0


async def test_nor_than_its_client_waits():
    with pytest.raises(Overloaded, match=r"the limit is 0.02 s"):
        await World().send("a", deadline_s=0.02)


class SteadyPace(Pace):
    """Two tokens a second."""

    def wait_s(self, now, tokens):
        return tokens / 2


async def test_a_wait_that_would_be_too_long_is_refused_at_once():
    world = World(queue_s=10)
    world.line._pace = SteadyPace()
    waits = world.send("a", tokens=10)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="would wait about 30 s for one; the limit is 10 s") as caught:
        await world.send("b", tokens=50)
    assert caught.value.headers == {"retry-after": "20"}
    world.room = 1
    await waits


async def test_where_the_line_is_full_the_greedy_one_is_refused():
    world = World(queue_requests=2)
    greedy = [world.send(f"g{n}", "greedy") for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many requests wait"):
        await greedy[2]
    modest = world.send("m", "modest")
    with pytest.raises(Overloaded, match="too many requests wait"):
        await greedy[1]
    world.room = 2
    await asyncio.gather(greedy[0], modest)
    assert world.served == ["g0", "m"]


async def test_a_line_of_no_places_refuses_all():
    with pytest.raises(Overloaded, match="too many requests wait"):
        await World(queue_requests=0).send("a")


async def test_other_bounds_hold_for_requests_that_come_later():
    world = World(queue_requests=2)
    waiting = [world.send(name) for name in "ab"]
    await asyncio.sleep(0)
    world.line.bound(LimitSettings(queue_requests=1))
    assert len(world.line) == 2
    with pytest.raises(Overloaded):
        await world.send("c")
    for task in waiting:
        task.cancel()
