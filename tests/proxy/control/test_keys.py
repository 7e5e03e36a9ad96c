"""Over sockets, with all that follows from a change: tests/proxy/api/admin/test_key_routes.py."""

from types import SimpleNamespace

import pytest

from engine_adapter import EngineUnavailable, PromptTableError
from proxy.control.keys import IssuedKeys, notes_of, used_engines
from proxy.core.books import IssuedKey, KeyBook
from proxy.errors import BadRequest, Conflict, ProxyError
from proxy.fleet.state_files import KeyBookFile
from tests.kv_world import rejected, safetensors_of

PLAIN = {"tenant": None, "name": "", "models": None, "expires": None}


def keys_over(file):
    """The keys that one kvpin issues, without other workers."""

    async def tell():
        pass

    return IssuedKeys(KeyBook(), file, tuple, tell)


class FullDisk(KeyBookFile):
    def __init__(self, directory):
        super().__init__(directory)
        self.is_full = False

    def add(self, entries):
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().add(entries)


def told(name="key-1"):
    return IssuedKey(name, "t", name.encode(), "last", 1.0)


async def test_a_key_that_cannot_be_saved_keeps_no_other_from_it(tmp_path):
    file = FullDisk(tmp_path)
    keys = keys_over(file)
    await keys.look()
    file.is_full = True
    keys._book.merge([told()])
    with pytest.raises(ProxyError):
        await keys.add(**PLAIN)
    file.is_full = False
    await keys.look()
    assert file.read() == [told()]


async def test_a_kvpin_without_a_place_for_keys_closes_those_of_the_group():
    keys = keys_over(None)
    keys._book.merge([told()])
    removed = await keys.remove("key-1")
    assert keys._book.issued() == []
    assert "has no state_dir: it does not save the removal" in removed.warning


async def test_a_file_that_is_gone_is_written_again(tmp_path):
    keys = keys_over(KeyBookFile(tmp_path))
    await keys.add(**PLAIN)
    (tmp_path / "keys").unlink()
    await keys.look()
    assert KeyBookFile(tmp_path).read() == keys._book.entries()


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
