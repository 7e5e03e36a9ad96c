import pytest

from engine_adapter import ENGINE_KINDS, EngineSpec, EngineSpecError, check_kind, make_adapter
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.torch_engine.adapter import EmbeddedAdapter


def spec(kind):
    return EngineSpec(kind, "http://127.0.0.1:1", "e")


@pytest.mark.parametrize("kind", ENGINE_KINDS)
async def test_every_kind_has_an_adapter(kind):
    adapter = make_adapter(spec(kind))
    assert adapter.spec.kind == kind
    await adapter.aclose()


async def test_each_kind_has_its_adapter():
    for kind, of in [("embedded", EmbeddedAdapter), ("openai_compatible", OpenAICompatibleAdapter)]:
        adapter = make_adapter(spec(kind))
        assert type(adapter) is of
        await adapter.aclose()


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(EngineSpecError, match=r"unknown engine kind 'tgi': use one of embedded, .*vllm"):
        make_adapter(spec("tgi"))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("vlm", "vllm"),
        ("llama", "llama_server"),
        ("openai", "openai_compatible"),
        ("tensorrt", "tensorrt_llm"),
    ],
)
def test_a_misspelt_kind_is_refused_with_the_nearest(wrong, right):
    with pytest.raises(EngineSpecError, match=f"unknown engine kind '{wrong}': did you mean '{right}'"):
        check_kind(wrong)
