import pytest

from engine_adapter import EngineUnavailable, PromptTableError
from proxy.errors import BadRequest, Conflict
from tests.kv_world import rejected, safetensors_of


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
