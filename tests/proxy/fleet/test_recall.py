"""What one kvpin keeps, and what another makes of it. Views: tests/proxy/core/index."""

import asyncio
from array import array
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from engine_adapter import (
    BlocksRemoved,
    BlocksStored,
    Capability,
    EventPosition,
    Tier,
    ViewCurrent,
    ViewLost,
    ViewResumed,
)
from proxy.core.audit import Trust
from proxy.core.index.blocks import extend
from proxy.core.index.match import Match
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.saved_state import SLICE_RUNS, EngineMemory, keep
from proxy.runtime import Supervisor
from tests.fakes import INFO, FakeAdapter

PROMPTS = 2 * SLICE_RUNS
POSITION = EventPosition(7, 77, complete=True)


def stored(number):
    return BlocksStored(Tier.GPU, None, (number,), array("i", [number] * 16), 16, None, f"red-{number}")


class World:
    """One kvpin with one engine; with `memories` of an earlier one."""

    def __init__(self, memories=(), *, events=True, **info):
        self.tasks, self.fleet, self.adapter = Supervisor(), Fleet(), FakeAdapter("a")
        self.engine = self.fleet.add(self.adapter)
        capabilities = frozenset({Capability.KV_EVENTS}) if events else frozenset()
        self.pool = self.fleet.join(self.engine, replace(INFO, capabilities=capabilities, **info))
        self.memories = {each.engine: each for each in memories}
        Ingest(self.fleet, self.tasks, lambda salt: salt.partition("-")[0], self.memories).follow(
            self.engine, self.pool
        )

    async def says(self, *events):
        """Tells events, and waits until they count."""
        for event in (*events, ViewCurrent()):
            self.adapter.feed.put_nowait(event)
        while self.engine.audit.trust is not Trust.PRECISE or not self.adapter.feed.empty():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.adapter.position = POSITION

    async def kept(self):
        """What is kept, as the next kvpin reads it."""
        memory = await keep(self.engine, self.pool)
        await self.tasks.stop()
        return memory and msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=EngineMemory)

    def holds(self, number):
        chain = self.pool.root_of(f"red-{number}")
        (block,) = extend(chain, array("i", [number] * 16), None, 16)
        return self.pool.index.match((block,)).get("a", Match()).gpu == 1


@pytest.fixture
async def memory():
    """Of an engine that sends events."""
    world = World()
    await world.says(ViewLost("start"), *map(stored, range(PROMPTS)))
    return await world.kept()


async def test_a_view_goes_on_where_it_was(memory):
    world = World([memory])
    world.pool.learn(world.engine, (1, 2))  # before the view is current
    await world.says(ViewResumed(), BlocksRemoved(Tier.GPU, (1,)), stored(PROMPTS))
    assert world.adapter.since == POSITION
    assert [number for number in range(PROMPTS + 1) if not world.holds(number)] == [1]
    assert world.engine.salts.of("red") == {f"red-{number}" for number in range(PROMPTS + 1)}
    assert world.engine.view.counts.stored == PROMPTS + 1
    assert (world.memories.get("a"), len(world.engine.learned)) == (None, 0)
    assert world.pool.index.held("a", Tier.GPU) == PROMPTS
    await world.tasks.stop()


async def test_of_an_engine_that_was_restarted_nothing_is_claimed(memory):
    world = World([memory])
    await world.says(ViewLost("batch 7 has changed"), stored(3))
    assert [number for number in range(PROMPTS) if world.holds(number)] == [3]
    assert world.engine.salts.of("red") == {"red-3"}
    await world.tasks.stop()


@pytest.mark.parametrize("info", [{"model": "another"}, {"tokens_per_block": 8}])
async def test_what_was_hashed_otherwise_is_dropped_with_a_warning(memory, info):
    with capture_logs() as logs:
        world = World([memory], **info)
        await world.says(ViewLost("start"))
    assert world.adapter.since is None
    assert "another model or block size" in logs[0]["event"]
    await world.tasks.stop()


@pytest.mark.parametrize(("instance", "is_same"), [("i1", True), ("i2", False)])
async def test_what_was_learned_counts_for_the_same_process(instance, is_same):
    world = World(events=False)
    world.engine.salts.note("red", "red-1")
    world.pool.learn(world.engine, (1, 2, 3))
    world.pool.learn(world.engine, (1, 4))
    later = World([await world.kept()], events=False, instance=instance)
    held = [Match(gpu=3), Match(gpu=2)] if is_same else []
    chains = (1, 2, 3), (1, 4)
    assert [match for chain in chains for match in later.pool.index.match(chain).values()] == held
    assert later.engine.salts.of("red") == ({"red-1"} if is_same else set())
    assert later.engine.audit.trust is Trust.APPROXIMATE


async def test_what_no_longer_fits_is_left_out_and_a_view_in_doubt_is_not_kept():
    world = World(events=False)
    world.pool.learn(world.engine, (1, 2))
    world.pool.learn(world.engine, (3, 4))
    later = World([await world.kept()], events=False, gpu_blocks=3)
    assert later.pool.index.match((1, 2)) == {"a": Match(gpu=2)}
    assert later.pool.index.match((3, 4)) == {}
    world = World()
    await world.says(ViewLost("start"), stored(1))
    world.engine.audit.lost("predictions missed")
    assert await world.kept() is None
