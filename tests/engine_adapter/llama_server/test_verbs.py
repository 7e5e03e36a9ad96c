"""The admin verbs on the slots and files of a real server, through its adapter."""

from __future__ import annotations

import asyncio

import pytest

from engine_adapter import BlocksRemoved, BlocksStored, EngineUnavailable, KvTarget, KvVerb, Tier
from engine_adapter.llama_server.slots import SlotOperation
from tests.engine_adapter.llama_server.slot_world import WAIT_S, prompt_of, slot_world


@pytest.fixture
async def world(start_llama, save_dir):
    server = start_llama(slots=3, ctx=1024, save_dir=save_dir)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        world.server = server
        yield world


class TestFlush:
    async def test_all_empties_slots_and_files(self, world):
        await world.ask(prompt_of(1))
        await world.do(KvVerb.OFFLOAD)
        await world.ask(prompt_of(2))
        progress = await world.do(KvVerb.FLUSH)
        assert (progress.done, progress.total, dict(progress.left)) == (12, 12, {})
        assert await world.lengths() == [0, 0, 0]
        assert await world.files() == []
        assert await world.held() == {}
        assert (await world.ask(prompt_of(1)))[1:] == (0, 0)

    async def test_a_prefix_takes_what_begins_like_it_and_nothing_else(self, world):
        await world.ask(prompt_of(1, head=32))
        await world.ask(prompt_of(2))
        progress = await world.do(KvVerb.FLUSH, token_ids=prompt_of(3, 40, head=32))
        assert progress.done == progress.total
        assert progress.total in (6, 12)  # its slot, and a file of it if it was written back meanwhile
        assert await world.lengths() == [0, 0, 103]

    async def test_a_salt_takes_its_own(self, world):
        await world.ask(prompt_of(1), salt="a")
        await world.ask(prompt_of(1), salt="b")
        assert (await world.do(KvVerb.FLUSH, cache_salt="a")).done in (6, 12)  # a file of it, too
        assert (await world.ask(prompt_of(1), salt="a"))[1:] == (0, 0)
        assert (await world.ask(prompt_of(1), salt="b"))[1:] == (99, 99)

    async def test_a_slot_that_is_being_saved_is_waited_for(self, world):
        for number in (1, 2):
            await world.ask(prompt_of(number))
        scheduler = world.adapter._session.scheduler

        async def save(slot):
            await asyncio.sleep(0.2)
            return await scheduler.contents.save(slot)

        # The adapter may be saving the other one: it was idle.
        slot = next(slot for slot in scheduler.contents.table if slot.dirty and slot.operation is None)
        saving = asyncio.create_task(scheduler.take(slot.id, SlotOperation.SAVE, save))
        await asyncio.sleep(0)
        progress = await world.do(KvVerb.FLUSH)
        assert await saving
        assert dict(progress.left) == {}
        assert await world.held() == {}
        assert await world.files() == []

    async def test_the_end_of_a_session_ends_the_wait_for_a_slot(self, world):
        """It cuts short work that has not begun, which leaves its mark on the slot."""
        await world.ask(prompt_of(1))
        await world.until_idle()
        scheduler = world.adapter._session.scheduler
        # In one step of the loop: the save is told, and ended before its first own step.
        saving = asyncio.create_task(scheduler.take(0, SlotOperation.SAVE, scheduler.contents.save))
        flushing = asyncio.create_task(world.do(KvVerb.FLUSH))
        while scheduler.contents.table[0].operation is not SlotOperation.SAVE:  # noqa: ASYNC110 - it starts
            await asyncio.sleep(0)
        await scheduler.aclose()
        async with asyncio.timeout(WAIT_S):
            ends = await asyncio.gather(saving, flushing, return_exceptions=True)
        assert isinstance(ends[0], EngineUnavailable)

    async def test_what_the_servers_own_cache_may_keep_is_left(self, start_llama, save_dir):
        server = start_llama("--cache-ram", "64", slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            await world.ask(prompt_of(1))
            assert (await world.do(KvVerb.FLUSH)).left["server_cache"] == 6
            assert await world.lengths() == [0, 0]
            assert (await world.do(KvVerb.FLUSH)).left["server_cache"] == 1

    async def test_a_slot_in_use_is_left(self, world):
        async with world.hold(prompt_of(1)):
            progress = await world.do(KvVerb.FLUSH)
            assert dict(progress.left) == {"in_use": 6}


class TestOffloadAndRestore:
    async def test_there_and_back_the_answer_is_the_same(self, world):
        tokens = prompt_of(1)
        text, *_ = await world.ask(tokens)
        done = await world.do(KvVerb.OFFLOAD, token_ids=tokens)
        assert (done.done, done.total) == (6, 6)
        assert await world.held() == {Tier.HOST: 6}
        assert await world.lengths() == [0, 0, 0]
        back = await world.do(KvVerb.RESTORE, token_ids=tokens)
        assert (back.done, back.total, back.bytes > 0) == (6, 6, True)
        assert await world.held() == {Tier.GPU: 6, Tier.HOST: 6}
        assert await world.ask(tokens) == (text, 99, 99)

    async def test_restoring_all_fills_empty_slots_with_the_latest(self, world):
        prompts = [prompt_of(seed, 80 + 20 * seed) for seed in range(4)]
        for tokens in prompts:
            await world.ask(tokens, max_tokens=1)
            await world.do(KvVerb.OFFLOAD)
        assert len(await world.files()) == 4
        progress = await world.do(KvVerb.RESTORE)
        assert progress.done == progress.total
        assert await world.lengths() == [100, 120, 140]

    async def test_nothing_known_is_nothing_done(self, world):
        for verb in KvVerb:
            progress = await world.do(verb, token_ids=prompt_of(9))
            assert (progress.done, progress.total, dict(progress.left)) == (0, 0, {})


class TestPin:
    async def test_a_pinned_slot_is_never_the_victim(self, world):
        tokens = prompt_of(1)
        await world.ask(tokens)
        pinned = await world.adapter.pin(KvTarget(tokens), 60)
        assert (pinned.blocks, pinned.ttl_s) == (6, 60)
        for seed in range(2, 9):
            await world.ask(prompt_of(seed))
        slots = [slot for slot in await world.slots() if slot["pinned_s"]]
        assert [slot["tokens"] for slot in slots] == [103]
        left = await world.do(KvVerb.FLUSH)
        assert left.left["pinned"] == 6
        assert (await world.ask(tokens))[1] == 99

    async def test_pins_of_one_prefix_stand_for_themselves(self, world):
        tokens = prompt_of(1)
        await world.ask(tokens)
        long = await world.adapter.pin(KvTarget(tokens), 3600)
        short = await world.adapter.pin(KvTarget(tokens[:32]), 60)
        assert max(slot["pinned_s"] for slot in await world.slots()) > 60
        assert await world.adapter.unpin(short.pin_id)
        assert not await world.adapter.unpin(short.pin_id)
        assert max(slot["pinned_s"] for slot in await world.slots()) > 60
        await world.adapter.unpin(long.pin_id)
        assert max(slot["pinned_s"] for slot in await world.slots()) == 0

    @pytest.mark.parametrize("is_met_again", [False, True])
    async def test_a_pinned_file_outlives_a_flush(self, world, is_met_again):
        tokens = prompt_of(1)
        await world.ask(tokens)
        await world.do(KvVerb.OFFLOAD)
        pinned = await world.adapter.pin(KvTarget(tokens), 60)
        assert pinned.blocks == 6
        if is_met_again:
            await world.adapter.leave()
            await world.adapter.connect()
        assert (await world.do(KvVerb.FLUSH)).left == {"pinned": 6}
        assert len(await world.files()) == 1
        await world.adapter.unpin(pinned.pin_id)
        assert (await world.do(KvVerb.FLUSH)).left == {}
        assert await world.files() == []


@pytest.mark.parametrize("key", [None, "another"])
async def test_pins_of_files_end_with_the_server_process(start_llama, save_dir, world, key):
    """Also where the next one has another model."""
    await world.ask(prompt_of(1))
    await world.do(KvVerb.OFFLOAD)
    pin = await world.adapter.pin(KvTarget(prompt_of(1)), 100)
    (entry,) = world.adapter._registry.entries(world.adapter._session.facts.key)
    assert entry.pins
    entry.key = key or entry.key
    world.server.kill()
    start_llama(slots=2, ctx=1024, save_dir=save_dir, port=world.server.port)
    with pytest.raises(EngineUnavailable):
        await world.adapter.load()
    await world.adapter.connect()
    assert not await world.adapter.unpin(pin.pin_id)
    assert not entry.pins


async def test_pins_of_files_end_when_kvpin_leaves_the_server(start_llama, save_dir):
    servers = [start_llama(slots=1, ctx=1024, save_dir=save_dir) for _ in range(2)]
    async with slot_world(servers[0].url, "one", host_cache_dir=str(save_dir)) as one:
        async with slot_world(servers[1].url, "two", host_cache_dir=str(save_dir)) as two:
            await two.ask(prompt_of(1))
            await two.do(KvVerb.OFFLOAD)
            await two.adapter.pin(KvTarget(prompt_of(1)), 100)
        assert not (await one.do(KvVerb.FLUSH)).left


async def test_events_follow_what_the_verbs_do(world):
    """A follower from the beginning believes what a new one is told."""
    seen = {tier: set() for tier in Tier}

    async def follow():
        async for event in world.adapter.events():
            match event:
                case BlocksStored():
                    seen[event.tier].update(event.hashes)
                case BlocksRemoved():
                    seen[event.tier].difference_update(event.hashes)

    follower = asyncio.create_task(follow())
    for seed in range(5):
        await world.ask(prompt_of(seed, head=40))
    await world.do(KvVerb.OFFLOAD, token_ids=prompt_of(4, head=40))
    await world.do(KvVerb.RESTORE)
    await world.do(KvVerb.FLUSH, token_ids=prompt_of(3, head=40))
    await asyncio.sleep(0)
    follower.cancel()
    assert {tier: len(names) for tier, names in seen.items() if names} == await world.held()
