"""The timer of a request's life. Deadlines over real sockets: tests/flow/test_lives.py."""

import asyncio
from contextlib import suppress

import pytest

from proxy.core.life import Answering, Began, Cause, Entered, Life, Placed, Prepared, Rules, Sent, machine
from proxy.core.retry_budget import RetryBudget
from proxy.request import alarm
from proxy.request.alarm import Alarm


class World:
    """A life and its alarm, in a task of its own."""

    def __init__(self, rules, *events):
        self.rules, self.events = rules, events
        self.works = lambda: asyncio.sleep(60)

    async def live(self):
        now = asyncio.get_running_loop().time
        self.life = Life(self.rules, RetryBudget(), now())
        self.alarm = Alarm(self.life)
        self.alarm.set()
        for event in self.events:
            self.life.take(now(), event)
        try:
            await self.works()
        except asyncio.CancelledError:
            return self.alarm.interrupted()
        finally:
            self.alarm.stop()


ON_A = (Prepared(), Placed("a"), Entered(), Sent())


@pytest.mark.parametrize(
    ("rules", "events", "cause"),
    [
        (Rules(first_byte_s=0.03, queue_s=0.02), (), Cause.OUR_LIMIT),
        (Rules(first_byte_s=0.05), ON_A[:3], Cause.ENGINE_BUSY),
        (Rules(first_byte_s=0.05), ON_A, Cause.ENGINE_LATE),
        (Rules(idle_s=0.05), (*ON_A, Began()), Cause.ENGINE_SILENT),
        (Rules(total_s=0.05), (*ON_A, Began()), Cause.OUR_LIMIT),
        (Rules(total_s=0.05), (*ON_A, Began(is_socket=True)), Cause.OUR_LIMIT),
    ],
)
async def test_it_interrupts_the_task_when_a_state_lasts_too_long(rules, events, cause):
    world = World(rules, *events)
    task = asyncio.create_task(world.live())
    assert await asyncio.wait_for(task, 5) is cause
    assert not task.cancelling()


async def test_progress_puts_it_off():
    world, seen = World(Rules(idle_s=0.05), *ON_A, Began()), []

    def progress():
        seen.append(len(seen) + 1)
        return min(len(seen), 30), False

    task = asyncio.create_task(world.live())
    await asyncio.sleep(0)
    world.alarm.progress = progress
    assert await asyncio.wait_for(task, 5) is Cause.ENGINE_SILENT
    assert len(seen) > 30


async def test_a_client_that_leaves_as_well_is_the_cause():
    world = World(Rules())
    task = asyncio.create_task(world.live())
    await asyncio.sleep(0)
    world.alarm._cause = Cause.OUR_LIMIT
    world.alarm._cancel()
    task.cancel()
    assert await task is None
    assert task.cancelling() == 1


async def test_a_clean_up_that_hangs_is_interrupted_again(monkeypatch):
    monkeypatch.setattr(alarm, "CLEAN_UP_S", 0.02)
    world, cancels = World(Rules(total_s=0.02)), []

    async def hangs():
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(2):  # each takes an interruption of its own
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
                cancels.append(asyncio.current_task().cancelling())

    world.works = hangs
    task = asyncio.create_task(world.live())
    assert await asyncio.wait_for(task, 5) is Cause.OUR_LIMIT
    assert cancels == [2, 3]
    assert not task.cancelling()


@pytest.mark.parametrize("has_answer", [False, True])
async def test_a_lost_engine(monkeypatch, has_answer):
    monkeypatch.setattr(machine, "SILENCE_S", 0.05)
    world = World(Rules(), *ON_A, *([Began()] if has_answer else []))
    task = asyncio.create_task(world.live())
    await asyncio.sleep(0)
    world.alarm.engine_lost()
    assert await asyncio.wait_for(task, 5) is Cause.ENGINE_LOST


async def test_an_engine_that_is_lost_between_two_attempts_or_after_the_end_is_no_matter():
    world = World(Rules())
    task = asyncio.create_task(world.live())
    await asyncio.sleep(0)
    world.alarm.engine_lost()
    await asyncio.sleep(0.01)
    assert not isinstance(world.life.state, Answering)
    task.cancel()
    assert await task is None
    world.alarm.engine_lost()
    await asyncio.sleep(0.01)
