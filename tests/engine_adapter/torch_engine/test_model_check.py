"""The check at load, on models whose faults the probe does not see."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import IMPLEMENTATION
from engine_adapter.torch_engine.model import TOLERANCE, check_model, load_model
from tests.engine_adapter.torch_engine.engine_world import CONFIGS, phi3_with_longrope, write_config_model


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
    model = load_model(str(write_config_model("llama", tmp_path)))
    with torch.no_grad():
        model.module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineSpecError, match="by nan of"):
        check_model(model)
