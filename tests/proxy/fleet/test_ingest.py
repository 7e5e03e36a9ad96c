import asyncio
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
import structlog

from engine_adapter import (
    BlocksStored,
    Capability,
    EngineRejected,
    EngineUnavailable,
    Tier,
    ViewCurrent,
    ViewLost,
)
from proxy.core.audit import MIN_MISSES, Trust
from proxy.fleet import ingest as module
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest, has_exact_events
from proxy.runtime import Supervisor
from tests.fakes import INFO, FakeAdapter
from tests.kv_world import until

STORED = BlocksStored(Tier.GPU, None, (1,), array("i", range(16)), 16)


class World:
    def __init__(self, **info):
        self.tasks, self.fleet = Supervisor(), Fleet()
        self.ingest = Ingest(self.fleet, self.tasks)
        self.adapter = FakeAdapter("a")
        self.engine = self.fleet.add(self.adapter)
        capabilities = frozenset({Capability.KV_EVENTS})
        self.pool = self.fleet.join(self.engine, replace(INFO, **{"capabilities": capabilities, **info}))
        self.engine.state = EngineState.READY

    async def say(self, *events):
        for event in events:
            self.adapter.feed.put_nowait(event)
        await until(self.adapter.feed.empty)
        await asyncio.sleep(0)


@pytest.fixture
async def world(virtual_time):
    world = World()
    world.ingest.follow(world.engine, world.pool)
    await until(lambda: world.adapter.subscriptions == 1)
    yield world
    await world.tasks.stop()


async def test_a_lost_view_voids_what_was_known_and_learned_and_a_first_start_is_no_alarm(world):
    with structlog.testing.capture_logs() as logs:
        await world.say(ViewLost("connected"), STORED, ViewCurrent())
        world.pool.learn(world.engine, (7, 8))
        await world.say(ViewLost("a gap"))
    assert (len(world.pool.index), len(world.engine.learned)) == (0, 0)
    assert (world.engine.audit.trust, world.engine.audit.why) == (Trust.APPROXIMATE, "a gap")
    events = [entry["event"] for entry in logs if "from events" in entry["event"]]
    assert events == ["learning the cache view from events", "cache view reset; relearning from events"]


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), EngineRejected("no", status=500)])
async def test_a_broken_stream_lowers_trust_and_begins_again(world, error):
    await world.say(ViewLost("start"), STORED, ViewCurrent(), error)
    await until(lambda: world.adapter.subscriptions == 2)
    assert world.engine.audit.trust is Trust.APPROXIMATE
    assert "the event stream broke" in world.engine.audit.why
    assert world.engine.state == "suspect"
    await world.say(ViewLost("start"), ViewCurrent())
    assert world.engine.audit.trust is Trust.PRECISE
    assert len(world.pool.index) == 0


async def test_a_stream_that_just_ends_is_no_reason_for_trust(world, monkeypatch):
    await world.say(ViewLost("start"), ViewCurrent())
    monkeypatch.setattr(world.adapter, "events", nothing)
    world.ingest.follow(world.engine, world.pool)
    await until(lambda: world.engine.audit.trust is Trust.APPROXIMATE)
    assert world.engine.audit.why == "the event stream broke: the engine ended it"
    assert world.engine.state == "ready"


async def nothing(_since):
    for event in ():
        yield event


async def test_a_stream_that_is_followed_no_longer_is_closed_at_once(world, monkeypatch):
    closed, seen = [], []

    async def events(_since):
        try:
            asyncio.get_running_loop().call_soon(following.cancel)  # while the event is applied
            yield STORED
        finally:
            closed.append(True)

    monkeypatch.setattr(world.adapter, "events", events)
    following = asyncio.create_task(world.ingest._apply_all(world.engine, world.pool))
    following.add_done_callback(lambda _: seen.extend(closed))
    await asyncio.wait([following])
    assert (following.cancelled(), seen) == (True, [True])


async def test_persistent_misses_start_over(world):
    await world.say(ViewLost("start"), STORED, ViewCurrent())
    with structlog.testing.capture_logs() as logs:
        for _ in range(MIN_MISSES):
            world.ingest.audit(world.engine, 16, 0)
    assert [line["event"] for line in logs] == ["predictions miss; relearning the cache view from events"]
    await until(lambda: world.adapter.subscriptions == 2)
    await world.say(ViewLost("start"), ViewCurrent())
    assert world.engine.audit.trust is Trust.PRECISE
    assert len(world.pool.index) == 0


async def test_an_engine_of_pages_may_reuse_up_to_a_block_more_than_predicted():
    world = World(tokens_per_block=1)
    for reported in (16, 17, 31):
        world.ingest.audit(world.engine, 16, reported)
    assert world.engine.audit.view().exact == 3
    for reported in (15, 32):
        world.ingest.audit(world.engine, 16, reported)
    assert world.engine.audit.view().exact == 3


async def test_a_view_that_is_not_complete_is_trusted_for_what_it_shows(world):
    with structlog.testing.capture_logs() as logs:
        await world.say(ViewLost("start"), STORED, ViewCurrent(complete=False))
    assert world.engine.audit.trust is Trust.PRECISE
    assert "older content is unknown" in logs[-1]["event"]
    assert not world.pool.candidates(None)[0].complete


async def test_an_engine_that_left_is_followed_no_more_and_its_misses_start_nothing(world):
    await world.say(ViewLost("start"), ViewCurrent())
    world.ingest.leave(world.engine)
    world.fleet.leave(world.engine)
    for _ in range(MIN_MISSES):
        world.ingest.audit(world.engine, 16, 0)
    world.adapter.feed.put_nowait(STORED)
    await asyncio.sleep(10)
    assert (world.adapter.subscriptions, len(world.pool.index)) == (1, 0)


async def test_an_engine_that_tells_no_events_any_more_is_learned_and_has_no_view(world):
    """A vLLM that was started again without them, or a router's model whose server divides nothing."""
    await world.say(ViewLost("start"), STORED, ViewCurrent(complete=False))
    world.fleet.join(world.engine, replace(world.engine.info, capabilities=frozenset()))
    world.ingest.follow(world.engine, world.pool)
    assert world.engine.view is None
    world.adapter.feed.put_nowait(STORED)
    await asyncio.sleep(10)
    assert len(world.pool.index) == 0
    assert world.pool.candidates(None)[0].complete
    assert world.pool.learn(world.engine, (7, 8))


@pytest.mark.parametrize("events", [1, 100])
async def test_a_flood_of_blocks_leaves_turns_to_requests(world, monkeypatch, events):
    """As many events, or as one."""
    monkeypatch.setattr(module, "TURN_S", -1.0)
    monkeypatch.setattr(module, "MIN_TURN_S", -1.0)
    blocks, turns = 25_600, [0]
    each = blocks // events
    for n in range(events):
        names, tokens = range(n * each, (n + 1) * each), array("i", range(n * each * 16, (n + 1) * each * 16))
        world.adapter.feed.put_nowait(BlocksStored(Tier.GPU, None, tuple(names), tokens, 16))
    while turns[-1] < blocks:
        await asyncio.sleep(0)
        turns.append(world.pool.index.held("a", Tier.GPU))
    assert max(later - before for before, later in pairwise(turns)) <= 256


@pytest.mark.parametrize(
    ("info", "exact"),
    [
        ({}, True),
        ({"tokens_per_block": 64}, True),
        ({"tokens_per_block": 24}, False),
        ({"tokens_per_block": 2}, True),
        ({"tokens_per_block": 3}, False),
        ({"tokens_per_block": None}, False),
        ({"capabilities": frozenset()}, False),
    ],
)
async def test_only_events_in_blocks_that_fit_are_followed(virtual_time, info, exact):
    world = World(**info)
    assert has_exact_events(world.engine, world.pool) is exact
    world.ingest.follow(world.engine, world.pool)
    await asyncio.sleep(0.01)
    assert world.adapter.subscriptions == exact
    assert ("learning from responses" in world.engine.audit.why) is True
    await world.tasks.stop()
