"""Over sockets, with all that follows from a change: tests/proxy/api/admin/test_key_routes.py."""

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from proxy.control import keys as module
from proxy.control.keys import IssuedKeys, notes_of, used_engines
from proxy.core.books import IssuedKey, KeyBook
from proxy.errors import NotFound, ProxyError
from proxy.fleet.engine import EngineState
from proxy.fleet.state_files import KeyBookFile

PLAIN = {"tenant": None, "name": "", "models": None, "expires": None}


class World:
    """Issued keys of one kvpin, and how often it told the other workers."""

    def __init__(self, file):
        self.book, self.told, self.file = KeyBook(), 0, file
        self.keys = IssuedKeys(self.book, file, tuple, self.tell)

    async def tell(self):
        self.told += 1
        assert {key.id for key in self.file.read()} == {key.id for key in self.book.entries()}


class FullDisk(KeyBookFile):
    def __init__(self, directory):
        super().__init__(directory)
        self.is_full = True

    def add(self, entries):
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().add(entries)


def told(name="key-1"):
    return IssuedKey(name, "t", name.encode(), "last", 1.0)


async def test_a_change_is_on_disk_and_told_to_the_other_workers_before_it_is_answered(tmp_path):
    world = World(KeyBookFile(tmp_path))
    added = await world.keys.add(**PLAIN)
    assert world.told == 1
    await world.keys.remove(added.id)
    assert world.told == 2
    assert [(key.id, key.removed > 0) for key in world.file.read()] == [(added.id, True)]


async def test_what_another_kvpin_tells_is_saved_as_soon_as_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    world = World(FullDisk(tmp_path))
    with capture_logs() as logs:
        task = asyncio.create_task(world.keys.run())
        world.book.merge([told()])
        await asyncio.sleep(0.1)
        assert world.file.read() == []
        world.file.is_full = False
        async with asyncio.timeout(5):
            while world.file.read() != [told()]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
    assert [(each["event"].partition(":")[0], each.get("error")) for each in logs][:1] == [
        ("issued keys are not saved", "the file of keys cannot be written: No space left on device")
    ]


async def test_a_key_that_cannot_be_saved_keeps_no_other_from_it(tmp_path):
    world = World(FullDisk(tmp_path))
    world.file.is_full = False
    await world.keys.look()
    world.file.is_full = True
    world.book.merge([told()])
    with pytest.raises(ProxyError):
        await world.keys.add(**PLAIN)
    world.file.is_full = False
    await world.keys.look()
    assert world.file.read() == [told()]


async def test_a_key_is_closed_while_the_disk_is_full_and_its_removal_saved_as_soon_as_there_is_room(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    world = World(FullDisk(tmp_path))
    world.file.is_full = False
    added = await world.keys.add(**PLAIN)
    world.file.is_full, heard = True, []
    world.book.listeners.append(lambda: heard.append([key.id for key in world.book.issued()]))
    with capture_logs() as logs:
        removed = await world.keys.remove(added.id)
        assert (removed.id, heard) == (added.id, [[]]), "whoever listens tells the group"
        assert removed.warning == (
            "the key opens nothing now, but its removal is not saved: the file of keys cannot be written: "
            "No space left on device; kvpin tries again every second, and a restart before it succeeds "
            "would open the key again"
        )
        with pytest.raises(NotFound):
            await world.keys.remove(added.id)
        task = asyncio.create_task(world.keys.run())
        await asyncio.sleep(0.05)
        assert [key.removed for key in world.file.read()] == [0.0]
        world.file.is_full = False
        async with asyncio.timeout(5):
            while not world.file.read()[0].removed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
    assert [each["event"].partition(":")[0] for each in logs] == [
        "issued keys are not saved",
        "issued keys are saved again",
    ]


async def test_a_kvpin_without_a_place_for_keys_closes_those_of_the_group():
    world = World(None)
    world.book.merge([told()])
    removed = await world.keys.remove("key-1")
    assert world.book.issued() == []
    assert "has no state_dir: it does not save the removal" in removed.warning


async def test_a_file_that_is_gone_is_written_again(tmp_path):
    world = World(KeyBookFile(tmp_path))
    await world.keys.add(**PLAIN)
    (tmp_path / "keys").unlink()
    await world.keys.look()
    assert world.file.read() == world.book.entries()


READY, REFUSED = EngineState.READY, EngineState.REFUSED


class NotedWorld:
    """A kvpin with two engines of the model `m`, which is open at first."""

    def __init__(self):
        self.tenants = SimpleNamespace(open=True)
        self.one, self.two = (
            SimpleNamespace(id=name, state=READY, is_served_there=False) for name in ("e1", "e2")
        )
        engines = {"e1": self.one, "e2": self.two}
        self.fleet = SimpleNamespace(engines=engines, has_model=lambda name: name == "m")

    def issued(self, models=None, *, then=lambda: None):
        was_open, used = self.tenants.open, used_engines(self.fleet)
        self.tenants.open = False
        then()
        key = SimpleNamespace(id="key-1", models=models)
        return [*notes_of(key, self.tenants, self.fleet, was_open=was_open, used=used)]


@pytest.fixture
def world():
    return NotedWorld()


def test_engines_that_tenants_would_share_are_named_once(world):
    world.issued()

    def divide():
        world.two.state = REFUSED

    (note,) = world.issued(then=divide)
    assert note.startswith(
        "not used any more, because several tenants would share their KV: e2; set share_kv"
    )
    assert note.endswith("or remove the key: kvpin keys remove key-1")
    assert world.issued() == []


def test_a_model_that_nothing_serves(world):
    world.issued()
    assert world.issued(("m", "typo")) == ["no engine serves 'typo' now"]
    world.two.is_served_there = True  # what it serves is not known here
    assert world.issued(("m", "typo")) == []
