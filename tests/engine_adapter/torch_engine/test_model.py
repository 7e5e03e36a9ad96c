from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, DiffLlamaConfig, Llama4TextConfig

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import IMPLEMENTATION
from engine_adapter.torch_engine.model import TOLERANCE, check_model, load_model, random_model
from tests.engine_adapter.torch_engine.engine_world import (
    CONFIGS,
    phi3_with_longrope,
    tiny,
    write_config_model,
)


def test_the_default_model_is_the_same_each_time_and_leaves_torchs_seed_be():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    again = load_model(None, served_name="other")
    assert torch.equal(torch.rand(1), expected)
    assert again.name == "other"
    for (name, ours), (_, theirs) in zip(
        tiny().module.named_parameters(), again.module.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_directory_is_served_under_its_name_in_the_type_asked_for(tmp_path):
    directory = write_config_model("qwen3", tmp_path / "my-model")
    model = load_model(str(directory), dtype="bfloat16")
    assert (model.name, model.tokenizer, model.is_default) == ("my-model", str(directory), False)
    assert (model.dtype, model.block_bytes(1)) == ("bfloat16", 2 * 2 * 2 * 16 * 2)
    assert (model.max_model_len, model.eos_token_ids) == (256, {1})


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(**SMALL), "Bloom"),
        (DiffLlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=32), "layer 0 attends twice"),
        (Llama4TextConfig(**SMALL, intermediate_size=32, num_local_experts=2), "kind chunked_attention"),
    ],
    ids=["bloom", "diffllama", "llama4"],
)
def test_models_that_cannot_run_are_refused_at_start(config, message, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineSpecError, match=message):
        load_model(str(tmp_path))


def test_quantised_weights_are_refused_by_name(tmp_path):
    path = write_config_model("llama", tmp_path) / "config.json"
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantised))
    with pytest.raises(EngineSpecError, match=r"is quantised \(gptq\); this engine takes weights in float32"):
        load_model(str(tmp_path))


def test_longrope_is_served_up_to_its_original_context(tmp_path, caplog):
    model = load_model(str(write_config_model("phi3", tmp_path)))
    assert model.max_model_len == 128
    assert "serving the original context of 128 tokens, not 256" in caplog.text


def test_end_tokens_outside_the_vocabulary_end_nothing(tmp_path):
    directory = write_config_model("llama", tmp_path)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 97, -1]}))
    assert load_model(str(directory)).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4'; one of float32"),
        ({"source": "/nowhere/at/all"}, "cannot load model '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_loaded_says_why(arguments, message):
    with pytest.raises(EngineSpecError, match=message):
        load_model(**{"source": None, **arguments})


def test_a_device_that_is_not_there_or_has_no_room_says_so_in_one_line(monkeypatch):
    with pytest.raises(EngineSpecError, match=r"cannot load model 'kvpin-tiny' to device 'xpu': .*XPU"):
        load_model(None, device="xpu")

    def full(module, device):
        raise torch.OutOfMemoryError("CUDA out of memory\nFor debugging")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(EngineSpecError, match=r"to device 'cpu': CUDA out of memory$"):
        load_model(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused():
    with pytest.raises(EngineSpecError, match="no CUDA device"):
        load_model(None, device="cuda")


@pytest.mark.parametrize("dtype", [str(dtype).removeprefix("torch.") for dtype in TOLERANCE])
@pytest.mark.parametrize("kind", CONFIGS)
def test_right_models_pass_in_every_type_and_attend_as_before(kind, dtype, tmp_path):
    model = load_model(str(write_config_model(kind, tmp_path)), dtype=dtype)
    assert model.module.config._attn_implementation == IMPLEMENTATION


def test_longrope_beyond_its_original_context_is_refused(tmp_path):
    model = load_model(str(write_config_model(phi3_with_longrope(64), tmp_path)))
    check_model(model)
    with pytest.raises(EngineSpecError, match="differ from those of one full pass"):
        check_model(dataclasses.replace(model, max_model_len=256))


def test_a_layer_that_sees_more_than_its_tokens_is_refused(tmp_path):
    model = load_model(str(write_config_model("llama", tmp_path)))
    layer = model.module.model.layers[1].mlp
    forward = layer.forward
    layer.forward = lambda hidden: forward(hidden) + hidden.mean(1, keepdim=True)  # over all rows of a step
    with pytest.raises(EngineSpecError, match="depends on more than a token"):
        check_model(model)


def test_a_model_without_numbers_is_refused(tmp_path):
    module = random_model(CONFIGS["llama"], seed=3)
    with torch.no_grad():
        module.lm_head.weight.fill_(float("nan"))
    module.save_pretrained(tmp_path)
    with pytest.raises(EngineSpecError, match="by nan of"):
        load_model(str(tmp_path))
