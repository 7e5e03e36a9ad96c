"""The keeper's own work; that a kvpin knows it again: tests/live/test_warm_restarts.py."""

import asyncio
import time
from unittest.mock import Mock

import msgspec
import pytest
from structlog.testing import capture_logs

from engine_adapter import EventPosition
from proxy.core.quotas import UseBook, Used
from proxy.core.retention import AdminPin, PinBook
from proxy.fleet import saved_state as module
from proxy.fleet.fleet import Fleet
from proxy.fleet.saved_state import FILE, EngineMemory, SavedState, StateSaver, decode, encode, on_other_clock
from proxy.fleet.state_files import UnusableFileError
from proxy.prompt import RegisteredTables
from proxy.request.tenants import KeptSalts, Tenants
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


PIN = AdminPin("pin-1", {"a": "own"}, 3, 500.0, "prefix", 2**64 - 1, {"a": "i1"}, 7, "s")
SALTS, POSITION = KeptSalts({"t": ["s"]}, []), EventPosition(7, 2**64 - 1, complete=True)
ENGINE = EngineMemory("a", "m", 16, "i1", SALTS, POSITION, learned=[b"12345678"])
SNAPSHOT = SavedState(False, [on_other_clock(PIN, 1000.0)], [ENGINE])


def test_a_pin_ends_at_the_same_time_on_another_clock():
    assert SNAPSHOT.pins[0].expires == 1500.0
    assert on_other_clock(SNAPSHOT.pins[0], -1400.0).expires == 100.0
    assert on_other_clock(SNAPSHOT.pins[0], -1000.0) == PIN


def damaged(data):
    return bytes([*data[:-1], data[-1] ^ 1])


def of_other_fields(_data):
    return encode(msgspec.Raw(msgspec.msgpack.encode({"isolated": False})))


def of_endless_depth(_data):
    return encode(msgspec.Raw(b"\x81\xa4deep" + b"\x91" * 100_000 + b"\x00"))


def of_no_text(data):
    body = data[data.index(b"\n") + 17 :]
    return encode(msgspec.Raw(body.replace(b"pin-1", b"pin-\xff")))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damaged, "damaged"),
        (lambda data: data[:-1], "damaged"),
        (lambda _data: b"", "damaged"),
        (lambda data: data.replace(b"state 2", b"state 1"), "another version"),
        (of_other_fields, "another version"),
        (of_endless_depth, "another version"),
        (of_no_text, "another version"),
    ],
)
def test_what_cannot_be_used_says_why(change, why):
    with pytest.raises(UnusableFileError, match=why):
        decode(change(encode(SNAPSHOT)), isolated=False)


def test_salts_of_several_tenants_are_none_of_a_single_one():
    with pytest.raises(UnusableFileError, match="one tenant now and were several"):
        decode(encode(SNAPSHOT), isolated=True)
