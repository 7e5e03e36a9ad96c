"""The keeper's own work; that a kvpin knows it again: tests/live/test_warm_restarts.py."""

import asyncio
import time
from array import array
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest
from msgspec.structs import replace as replaced
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
from proxy.core.quotas import UseBook, Used
from proxy.core.retention import AdminPin, PinBook
from proxy.fleet import saved_state as module
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.saved_state import (
    FILE,
    SLICE_RUNS,
    EngineMemory,
    StateSaver,
    decode,
    encode,
    keep,
    on_other_clock,
)
from proxy.prompt import RegisteredTables
from proxy.request.tenants import Tenants
from proxy.runtime import Supervisor
from tests.fakes import INFO, FakeAdapter
from tests.kv_world import until

DAY_S = 86_400


class World:
    """One kvpin: its engine "a" has learned something if it is connected."""

    def __init__(self, directory, *, connected=True):
        self.use = UseBook()
        self.keeper = StateSaver(directory, Tenants(()), self.use)
        self.fleet, self.pins, self.path = Fleet(), PinBook(), directory / FILE
        self.engine = self.fleet.add(FakeAdapter("a"))
        if connected:
            self.fleet.join(self.engine, INFO).learn(self.engine, (1, 2))
        self.keeper.restore(self.pins, RegisteredTables(), self.fleet.book)

    async def save(self):
        await self.keeper.save(self.fleet, self.pins)


def pin(pin_id="p"):
    return AdminPin(pin_id, {"a": "own"}, 1, time.monotonic() + DAY_S, "prefix")


async def test_what_was_known_of_an_engine_is_kept_until_it_connects(tmp_path):
    await World(tmp_path).save()
    for _ in range(2):
        later = World(tmp_path, connected=False)
        await later.save()
    memory = later.keeper.memories.get("a")
    assert (memory.instance, len(memory.learned)) == ("i1", 1)
    later.fleet.remove(later.fleet.engine("a"))
    await later.save()
    assert World(tmp_path).keeper.memories.get("a") is None


async def test_an_order_that_was_given_when_the_clock_was_ahead_can_be_undone(tmp_path):
    world = World(tmp_path)
    world.fleet.book.drain("gpu1:8000", drained=True, now=1e300)
    await world.keeper.save(world.fleet, world.pins)
    book = World(tmp_path).fleet.book
    assert book.is_drained("gpu1:8000")
    book.drain("gpu1:8000", drained=False, now=time.time())
    assert not book.is_drained("gpu1:8000")


async def test_a_change_of_pins_is_saved_at_once(tmp_path):
    world = World(tmp_path)
    running = asyncio.create_task(world.keeper.run(world.fleet, world.pins))
    world.pins.add(pin())
    await until(world.path.exists, 10)
    running.cancel()
    (again,) = World(tmp_path).pins.active(time.monotonic())
    assert again.engine_pins == {"a": "own"}
    assert 80_000 < again.expires - time.monotonic() <= DAY_S + 1


async def test_it_is_saved_now_and_then_and_only_what_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_S", 0.01)
    written = []
    monkeypatch.setattr(module, "write", lambda _path, data: written.append(data))
    world = World(tmp_path)
    running = asyncio.create_task(world.keeper.run(world.fleet, world.pins))
    async with asyncio.timeout(10):
        while len(written) < 2:
            await asyncio.sleep(0.02)
            if written:
                world.pins.add(pin())
    running.cancel()
    assert len(set(written)) == len(written)


async def test_the_use_of_tenants_outlives_a_state_that_is_of_no_use(tmp_path):
    world, key = World(tmp_path), (int(time.time() // DAY_S), "acme", "m")
    world.use[key].requests += 1
    await world.save()
    (tmp_path / FILE).write_bytes(b"?")
    assert World(tmp_path).use == {key: Used(1)}


async def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    world = World(tmp_path)
    monkeypatch.setattr(module, "write", Mock(side_effect=OSError(28, "No space left on device")))
    with capture_logs() as logs:
        await world.save()
    assert logs[0]["error"] == "No space left on device"


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"?"), lambda path: path.mkdir()])
def test_a_file_that_cannot_be_used_is_one_warning(tmp_path, make):
    make(tmp_path / FILE)
    with capture_logs() as logs:
        world = World(tmp_path)
    assert world.keeper.memories.get("a") is None
    assert [log["log_level"] for log in logs] == ["warning"]
    assert logs[0]["why"] in ("it is damaged", "Is a directory")


def test_a_pin_ends_at_the_same_time_on_another_clock():
    one = AdminPin("pin-1", {"a": "own"}, 3, 500.0, "prefix", 2**64 - 1, {"a": "i1"}, 7, "s")
    other = on_other_clock(one, 1000.0)
    assert other.expires == 1500.0
    assert on_other_clock(other, -1400.0).expires == 100.0
    assert on_other_clock(other, -1000.0) == one


async def test_of_the_state_of_several_tenants_a_single_one_has_the_orders_alone(tmp_path):
    world = World(tmp_path)
    world.fleet.book.drain("gpu1:8000", drained=True, now=time.time())
    world.pins.add(pin())
    await world.save()
    world.path.write_bytes(encode(replaced(decode(world.path.read_bytes(), isolated=False), isolated=True)))
    with capture_logs() as logs:
        later = World(tmp_path)
    assert later.fleet.book.is_drained("gpu1:8000")
    assert (later.keeper.memories, later.pins.active(time.monotonic())) == ({}, ())
    (told,) = logs
    assert told["log_level"] == "warning"
    assert told["event"].startswith("the saved state is not used but for orders about engines: there is one")


# --- what is kept of an engine, and what the next kvpin makes of it. Views: tests/proxy/core/index

PROMPTS = 2 * SLICE_RUNS
AT = EventPosition(7, 77, complete=True)


def stored(number):
    return BlocksStored(Tier.GPU, None, (number,), array("i", [number] * 16), 16, None, f"red-{number}")


class Connected:
    """A kvpin with one engine; with `memories` of an earlier one."""

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
        self.adapter.position = AT

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
    kvpin = Connected()
    await kvpin.says(ViewLost("start"), *map(stored, range(PROMPTS)))
    return await kvpin.kept()


async def test_a_view_goes_on_where_it_was(memory):
    kvpin = Connected([memory])
    kvpin.pool.learn(kvpin.engine, (1, 2))  # before the view is current
    await kvpin.says(ViewResumed(), BlocksRemoved(Tier.GPU, (1,)), stored(PROMPTS))
    assert kvpin.adapter.since == AT
    assert [number for number in range(PROMPTS + 1) if not kvpin.holds(number)] == [1]
    assert kvpin.engine.salts.of("red") == {f"red-{number}" for number in range(PROMPTS + 1)}
    assert kvpin.engine.view.counts.stored == PROMPTS + 1
    assert (kvpin.memories.get("a"), len(kvpin.engine.learned)) == (None, 0)
    assert kvpin.pool.index.held("a", Tier.GPU) == PROMPTS
    await kvpin.tasks.stop()


async def test_of_an_engine_that_was_restarted_nothing_is_claimed(memory):
    kvpin = Connected([memory])
    await kvpin.says(ViewLost("batch 7 has changed"), stored(3))
    assert [number for number in range(PROMPTS) if kvpin.holds(number)] == [3]
    assert kvpin.engine.salts.of("red") == {"red-3"}
    await kvpin.tasks.stop()


@pytest.mark.parametrize("info", [{"model": "another"}, {"tokens_per_block": 8}])
async def test_what_was_hashed_otherwise_is_dropped_with_a_warning(memory, info):
    with capture_logs() as logs:
        kvpin = Connected([memory], **info)
        await kvpin.says(ViewLost("start"))
    assert kvpin.adapter.since is None
    assert "another model or block size" in logs[0]["event"]
    await kvpin.tasks.stop()


@pytest.mark.parametrize(
    ("info", "is_same"), [({}, True), ({"instance": "i2"}, False), ({"names_process": False}, False)]
)
async def test_what_was_learned_counts_for_the_same_process(info, is_same):
    kvpin = Connected(events=False)
    kvpin.engine.salts.note("red", "red-1")
    kvpin.pool.learn(kvpin.engine, (1, 2, 3))
    kvpin.pool.learn(kvpin.engine, (1, 4))
    later = Connected([await kvpin.kept()], events=False, **info)
    held = [Match(gpu=3), Match(gpu=2)] if is_same else []
    chains = (1, 2, 3), (1, 4)
    assert [match for chain in chains for match in later.pool.index.match(chain).values()] == held
    assert later.engine.salts.of("red") == ({"red-1"} if is_same else set())
    assert later.engine.audit.trust is Trust.APPROXIMATE


async def test_what_no_longer_fits_is_left_out_and_a_view_in_doubt_is_not_kept():
    kvpin = Connected(events=False)
    kvpin.pool.learn(kvpin.engine, (1, 2))
    kvpin.pool.learn(kvpin.engine, (3, 4))
    later = Connected([await kvpin.kept()], events=False, gpu_blocks=3)
    assert later.pool.index.match((1, 2)) == {"a": Match(gpu=2)}
    assert later.pool.index.match((3, 4)) == {}
    kvpin = Connected()
    await kvpin.says(ViewLost("start"), stored(1))
    kvpin.engine.audit.lost("predictions missed")
    assert await kvpin.kept() is None
