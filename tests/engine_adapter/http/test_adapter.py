"""What all adapters have in common; tests/contract tests the rest of each."""

import asyncio
from array import array

import pytest
from msgspec.structs import replace

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.adapter import EventWatch, read_models
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineSpec,
    KvGroup,
    Tier,
    ViewCurrent,
    ViewLost,
)


async def test_requests_go_to_the_engine_until_it_is_removed():
    spec = EngineSpec("openai_compatible", "http://127.0.0.1:1/v1", "e", api_key="k")
    adapter = OpenAICompatibleAdapter(spec)
    request = adapter.prepare("POST", "/v1/completions", {"authorization": "Bearer c"}, JsonBody(b"{}"))
    assert (request.url, request.body) == ("http://127.0.0.1:1/v1/completions", b"{}")
    assert (b"authorization", b"Bearer k") in request.headers
    await adapter.aclose()
    with pytest.raises(EngineUnavailable, match="removed"):
        await adapter._control.get("/v1/models")


FIRST = {"id": "m", "object": "model", "created": 5, "owned_by": "vllm", "root": "/x", "max_model_len": 9}
OTHER = {"id": "other", "parent": None, "permission": [{}], "meta": {"n_ctx": 3}}
LORA = {"id": "ada", "root": "/y", "parent": "m"}


@pytest.mark.parametrize("data", [None, [], [{}], ["m"], [{"id": 5}], [LORA]])
def test_models_without_a_name(data):
    for answer in ({"data": data}, data):
        with pytest.raises(EngineUnavailable, match="/v1/models names no model"):
            read_models(answer)


def test_the_first_base_model():
    model = read_models({"data": [LORA, FIRST, OTHER]})
    assert (model.name, model.max_model_len, model.root, model.loras) == ("m", 9, "/x", {"ada"})
    assert model.card == {"max_model_len": 9}


def test_the_model_that_the_operator_wants():
    answer = {"data": [FIRST, OTHER]}
    model = read_models(answer, "other")
    assert (model.name, model.max_model_len, model.root, model.loras) == ("other", None, None, frozenset())
    assert model.card == {"meta": {"n_ctx": 3}}
    assert read_models(answer, "alias") == read_models(answer) == read_models(answer, "m")


def test_fields_of_another_type_count_as_missing():
    model = read_models({"data": [{"id": "m", "max_model_len": "9", "root": 5}]})
    assert (model.max_model_len, model.root) == (None, None)


def stored(*names, tier=Tier.GPU):
    return BlocksStored(tier, None, names, array("i"), 16)


def watching(capacity):
    watch = EventWatch()
    watch.capacity = capacity
    return watch


def told(watch, *events):
    for event in events:
        watch.note(event)
    return watch.wants_reuse_told


def test_reuse_is_to_be_told_while_the_view_is_incomplete():
    watch = watching(4)
    assert not told(watch, ViewLost("connected"), ViewCurrent())
    assert told(watch, ViewLost("again"), ViewCurrent(complete=False))
    assert not told(watch, CacheCleared())
    assert told(watch, ViewCurrent(complete=False))
    assert not told(watch, ViewLost("again"))


def test_once_as_many_became_known_as_there_are_it_ends():
    watch = watching(4)
    assert told(watch, stored(1), ViewCurrent(complete=False), stored(1, 2, 3), stored(2, 3))
    assert told(watch, BlocksRemoved(Tier.GPU, (2,)), stored(9, tier=Tier.HOST), stored(4))
    assert watch.blocks == 3
    group = KvGroup(1, Attention.WINDOW, 128)
    assert told(watch, replace(stored(9), group=group), BlocksRemoved(Tier.GPU, (1,), group))
    assert watch.blocks == 3
    assert not told(watch, stored(2))
    unknown = watching(None)
    assert told(unknown, ViewCurrent(complete=False), stored(*range(100)))


async def test_who_waits_for_a_clearing():
    watch = watching(4)
    told(watch, stored(1, 2))
    waiting = asyncio.create_task(watch.wait_for_clearing(watch.clearings, 20.0))
    await asyncio.sleep(0)
    told(watch, stored(3), CacheCleared())
    assert await waiting
    assert watch.blocks == 0
    assert await watch.wait_for_clearing(0, 0.0)
    assert not await watch.wait_for_clearing(1, 0.0)
