import pytest

from engine_adapter import ENGINE_KINDS, EngineSpec, EngineSpecError, is_generic, make_adapter
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.torch_engine.adapter import EmbeddedAdapter


def spec(kind):
    return EngineSpec(kind, "http://127.0.0.1:1", "e")


@pytest.mark.parametrize("kind", ENGINE_KINDS)
async def test_every_kind_has_an_adapter(kind):
    adapter = make_adapter(spec(kind))
    assert adapter.spec.kind == kind
    await adapter.aclose()


async def test_kinds_without_an_adapter_of_their_own_say_so():
    for kind, generic, of in [
        ("embedded", False, EmbeddedAdapter),
        ("openai_compatible", False, OpenAICompatibleAdapter),
    ]:
        adapter = make_adapter(spec(kind))
        assert type(adapter) is of
        assert is_generic(kind) is generic
        await adapter.aclose()
    assert is_generic("vllm")
    assert not is_generic("nonsense")


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(EngineSpecError, match=r"unknown engine kind 'tgi': use one of embedded, .*vllm"):
        make_adapter(spec("tgi"))
