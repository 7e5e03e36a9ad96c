"""Slots of a real server are saved while nobody needs them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.session import dirty_slots, save_all, write_back
from engine_adapter.llama_server.slot_io import read_slots
from engine_adapter.llama_server.slots import SlotOperation
from engine_adapter.llama_server.turns import Ask
from tests.engine_adapter.llama_server.scheduler_world import scheduler_world, stopped
from tests.engine_adapter.llama_server.slot_world import prompt_of

SAVE = SlotOperation.SAVE


@pytest.fixture
def world(scheduler):
    # A prefill of 1,000 tokens is worth a second, whatever this machine needs for it.
    scheduler.contents.rates.prefill_s = lambda tokens: tokens / 1000
    return scheduler


@asynccontextmanager
async def writing_back(world):
    task = asyncio.create_task(write_back(world.scheduler))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@asynccontextmanager
async def no_directory(world):
    """While this lasts, no save succeeds."""
    place = world.server.save_dir
    place.rename(place.with_suffix(".gone"))
    try:
        yield
    finally:
        place.with_suffix(".gone").rename(place)


class TestWriteBack:
    async def test_idle_slots_are_saved_the_one_unused_for_longest_first(self, world):
        for seed in (1, 2):
            await world.ask(prompt_of(seed))
        async with writing_back(world):
            await world.until(lambda: world.contents.counts.saves == 2)
        await world.idle()
        assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(1), prompt_of(2)]
        assert (world.contents.counts.write_backs, world.contents.counts.saves) == (2, 2)
        await world.check()

    async def test_again_when_they_have_grown(self, world):
        async with writing_back(world):
            for saves, count in enumerate((100, 150), 1):
                lease = await world.ask(prompt_of(1, 150)[:count], max_tokens=1)
                await world.until(lambda saves=saves: world.contents.counts.saves == saves)
                assert [len(entry.tokens) for entry in world.entries()] == [count]
        await world.idle()
        assert world.table[lease.slot].saved == 150

    async def test_not_what_is_not_worth_it(self, world):
        """Nor what nobody here knows; though it has been idle for longer."""
        world.contents.rates.prefill_s = lambda tokens: tokens / 10_000
        await world.ask(prompt_of(1, 3), max_tokens=1)
        async with writing_back(world):
            await world.ask(prompt_of(2, 300))
            await world.until(lambda: world.entries() != [])
        assert [len(entry.tokens) for entry in world.entries()] == [303]
        assert [slot.length for slot in dirty_slots(world.scheduler)] == [3]

    async def test_not_what_nobody_here_knows(self, world):
        await world.complete(prompt_of(1, 500), 0)
        world.scheduler.adopt(await read_slots(world.control))
        world.table[0].saved = 0
        async with writing_back(world):
            await world.ask(prompt_of(2))
            await world.until(lambda: world.entries() != [])
        assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(2)]
        assert world.table[0].salt == UNKNOWN_OWNER
        assert dirty_slots(world.scheduler) == []

    async def test_a_failure_pauses_it(self, world):
        counts = world.contents.counts
        async with writing_back(world):
            async with no_directory(world):
                await world.ask(prompt_of(1))
                await world.until(lambda: counts.failed_saves == 1)
                assert not world.contents.can_save
            # It looks again, and there is still nothing to be done.
            world.scheduler.changed.set()
            await world.until(lambda: not world.scheduler.changed.is_set())
            assert (counts.write_backs, len(dirty_slots(world.scheduler))) == (1, 1)
            world.clock.ahead += 60
            await world.until(lambda: counts.saves == 1)
        assert (counts.write_backs, counts.saves, counts.failed_saves) == (2, 1, 1)

    async def test_a_server_that_died_is_left_alone(self, start_llama, save_dir):
        async with scheduler_world(start_llama(slots=2, ctx=512, save_dir=save_dir)) as world:
            await world.ask(prompt_of(1))
            world.server.kill()
            async with writing_back(world) as task:
                await world.until(lambda: world.contents.counts.write_backs == 1)
                await world.idle()
                assert not world.contents.can_save  # until the pause is over, or its loss is noticed
                assert not task.done()
            assert world.entries() == []

    async def test_a_request_waits_for_no_more_than_the_save_that_runs(self, world):
        """Both slots are to be saved; a request comes in the first save and starts before the second."""
        for seed in (1, 2):
            lease = await world.ask(prompt_of(seed))
        world.contents.rates.hold_s = 0.001
        first = 1 - lease.slot
        turn = world.table[first].tokens + prompt_of(3, 10)

        async def request():
            async with world.scheduler.lease(Ask(turn)) as lease:
                return lease, world.contents.counts.saves

        async with writing_back(world):
            with stopped(world.server):
                await world.until(lambda: world.table[first].operation is SAVE)
                asks = asyncio.create_task(request())
                await world.until(lambda: world.scheduler.waiting == 1)
            lease, saves = await asks
        assert (lease.slot, lease.cached_tokens, saves) == (first, 103, 1)
        await world.idle()
        await world.check()

    async def test_a_save_that_runs_when_it_is_stopped_goes_on(self, world):
        lease = await world.ask(prompt_of(1))
        async with writing_back(world):
            with stopped(world.server):
                await world.until(lambda: SAVE in world.operations())
        await world.idle()
        assert world.table[lease.slot].saved == 103


class TestSaveAll:
    async def test_everything_is_saved(self, world):
        """What is worth little, what is being saved already, and what a request is just leaving, too."""
        first = await world.ask(prompt_of(1, 3))
        async with world.scheduler.lease(Ask(prompt_of(2))) as second:
            await world.send(second)
            with stopped(world.server):
                saving = asyncio.create_task(world.save(first.slot))
                await world.until(lambda: SAVE in world.operations())
                ends = asyncio.create_task(save_all(world.scheduler))
                await asyncio.sleep(0)
        await asyncio.gather(saving, ends)
        assert sorted(len(entry.tokens) for entry in world.entries()) == [6, 103]
        assert dirty_slots(world.scheduler) == []

    async def test_what_a_request_takes_meanwhile_is_left_to_it(self, world):
        first, second = [await world.ask(prompt_of(seed)) for seed in (1, 2)]
        turn = world.table[second.slot].tokens + prompt_of(3, 10)
        async with AsyncExitStack() as stack:
            with stopped(world.server):
                ends = asyncio.create_task(save_all(world.scheduler))
                await world.until(lambda: world.table[first.slot].operation is SAVE)
                lease = await stack.enter_async_context(world.scheduler.lease(Ask(turn)))
                assert lease.slot == second.slot
            await ends
            assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(1)]

    async def test_a_place_that_takes_nothing_is_tried_once_or_twice(self, world):
        for seed in (1, 2):
            await world.ask(prompt_of(seed))
        async with no_directory(world):
            await save_all(world.scheduler)
        assert 1 <= world.contents.counts.failed_saves <= 2
        assert len(dirty_slots(world.scheduler)) == 2

    async def test_nothing_where_restoring_does_not_pay(self, world):
        await world.ask(prompt_of(1))
        for _ in range(2):
            world.contents.note_restored(in_vain=True)
        assert dirty_slots(world.scheduler) == []
        await save_all(world.scheduler)
        assert world.contents.counts.saves == 0

    async def test_a_scheduler_that_is_closed_saves_nothing(self, world):
        await world.ask(prompt_of(1))
        await world.scheduler.aclose()
        await save_all(world.scheduler)
        assert world.contents.counts.saves == 0
