"""Over sockets, with all that follows from a change: tests/proxy/api/admin/test_key_routes.py."""

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from engine_adapter import EngineUnavailable, PromptTableError
from proxy.control import keys as module
from proxy.control.keys import IssuedKeys, notes_of, used_engines
from proxy.core.books import IssuedKey, KeyBook
from proxy.errors import BadRequest, Conflict, NotFound, ProxyError
from proxy.fleet.state_files import KeyBookFile
from tests.kv_world import rejected, safetensors_of, until

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
        assert "its removal is not saved: the file of keys cannot be written: No space" in removed.warning
        with pytest.raises(NotFound):
            await world.keys.remove(added.id)
        task = asyncio.create_task(world.keys.run())
        await asyncio.sleep(0.02)
        assert [key.removed for key in world.file.read()] == [0.0]
        world.file.is_full = False
        await until(lambda: len(logs) == 2 and world.file.read()[0].removed, 5)
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


@pytest.mark.parametrize(("is_there", "notes"), [(False, ["no engine serves 'typo' now"]), (True, [])])
async def test_where_another_kvpin_knows_what_is_served_no_model_is_missed(world, pair, is_there, notes):
    world.engines["a"].is_served_there = is_there
    key = SimpleNamespace(id="key-1", models=("typo",))
    told = notes_of(key, world.tenants, world.fleet, was_open=False, used=used_engines(world.fleet))
    assert [*told] == notes


# --- prompt tables


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (rejected(400, "NaN"), BadRequest),
        (rejected(422, "hidden size"), BadRequest),
        (rejected(409, "other content"), Conflict),
        (rejected(500, "bug"), type(rejected())),
        (EngineUnavailable("gone"), EngineUnavailable),
    ],
)
async def test_a_table_is_on_all_engines_or_on_none(world, pair, failure, error):
    a, b = pair
    b.failure = failure
    with pytest.raises(error) as caught:
        await world.tables.put(safetensors_of(), table_id="t")
    assert str(failure) in str(caught.value)
    assert world.proxy.tables.list() == []
    assert not a.prompt_tables


async def test_a_table_that_was_there_stays_there_and_no_other_content_replaces_it(world, pair):
    await world.tables.put(safetensors_of(), table_id="t")
    with pytest.raises(Conflict):
        await world.tables.put(safetensors_of(value=0.25), table_id="t")
    with pytest.raises(PromptTableError, match="pickle"):
        await world.tables.put(b"\x80\x04pickle")
    pair[1].failure = EngineUnavailable("gone")
    with pytest.raises(EngineUnavailable):
        await world.tables.put(safetensors_of(), table_id="t")
    assert [table.table_id for table in world.proxy.tables.list()] == ["t"]
    assert "t" in pair[0].prompt_tables
