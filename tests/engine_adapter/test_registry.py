import pytest

from engine_adapter import (
    EngineSpec,
    EngineSpecError,
    OptionError,
    check_kind,
    make_adapter,
    make_options,
)
from engine_adapter.events.options import EventAddresses, EventOptions
from engine_adapter.vllm.options import VllmOptions
from tests.engines import engine_spec


def spec(kind):
    return EngineSpec(kind, "http://127.0.0.1:1", "e")


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


def test_options_are_those_of_the_kind():
    assert make_options("vllm", {"dp_rank": "1"}) == VllmOptions(dp_rank=1)
    with pytest.raises(OptionError, match="embedded engines have no option 'dp_rank'"):
        make_options("embedded", {"dp_rank": "1"})
    with pytest.raises(EngineSpecError, match="did you mean 'vllm'"):
        make_options("vlm", {})


async def test_a_nim_hands_on_the_options_that_the_engine_inside_has():
    nim = make_adapter(engine_spec("nim", "http://127.0.0.1:1", dp_rank=1, lmcache="http://h:2"))
    inside = {kind: nim._as_kind(nim.spec, kind) for kind in ("vllm", "sglang", "tensorrt_llm")}
    assert inside["vllm"].spec.options == VllmOptions(dp_rank=1, lmcache="http://h:2")
    assert inside["sglang"].spec.options == EventOptions(dp_rank=1)
    assert inside["tensorrt_llm"].spec.options == EventAddresses()
    for adapter in (nim, *inside.values()):
        await adapter.aclose()
