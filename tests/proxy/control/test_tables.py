import pytest

from engine_adapter import Capability, EngineUnavailable, PromptTableError
from proxy.errors import BadRequest, Conflict, NotFound
from tests.kv_world import ALL, KvFake, rejected, safetensors_of


async def test_every_engine_that_holds_tables_gets_it(world, pair):
    world.add(KvFake("c", ALL - {Capability.PROMPT_TABLES}))
    table = await world.tables.put(safetensors_of(), table_id="t")
    assert [list(fake.prompt_tables) for fake in pair] == [["t"], ["t"]]
    assert not world.engines["c"].adapter.prompt_tables
    assert (table.table_id, table.rows, table.hidden, table.bytes) == ("t", 2, 4, len(safetensors_of()))
    assert world.tables.described() == [table]
    assert await world.tables.put(safetensors_of(), table_id="t") == table


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
async def test_all_or_nothing(world, pair, failure, error):
    a, b = pair
    b.failure = failure
    with pytest.raises(error) as caught:
        await world.tables.put(safetensors_of(), table_id="t")
    assert str(failure) in str(caught.value)
    assert world.proxy.tables.list() == []
    assert not a.prompt_tables


async def test_a_table_that_was_there_stays_there(world, pair):
    await world.tables.put(safetensors_of(), table_id="t")
    pair[1].failure = EngineUnavailable("gone")
    with pytest.raises(EngineUnavailable):
        await world.tables.put(safetensors_of(), table_id="t")
    assert [table.table_id for table in world.proxy.tables.list()] == ["t"]
    assert "t" in pair[0].prompt_tables


async def test_other_content_and_other_formats_are_refused(world, pair):
    await world.tables.put(safetensors_of(), table_id="t")
    with pytest.raises(Conflict):
        await world.tables.put(safetensors_of(value=0.25), table_id="t")
    with pytest.raises(PromptTableError, match="pickle"):
        await world.tables.put(b"\x80\x04pickle")
    assert len(world.proxy.tables.list()) == 1


async def test_deleting_takes_it_from_the_engines(world, pair):
    await world.tables.put(safetensors_of(), table_id="t")
    pair[0].failure = EngineUnavailable("gone")
    await world.tables.delete("t")
    assert "t" not in pair[1].prompt_tables
    assert world.engines["a"].check_now.is_set()
    with pytest.raises(NotFound):
        await world.tables.delete("t")
