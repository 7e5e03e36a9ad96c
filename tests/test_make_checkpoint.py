"""The model for vLLM: transformers and vLLM's LoRA loader take what is written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from scripts.make_checkpoint import RANK, checkpoint_path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(cache):
    loaded, report = AutoModelForCausalLM.from_pretrained(checkpoint_path("model"), output_loading_info=True)
    assert not any(report.values()), report
    return loaded.float().eval()


def answer(model, token_ids):
    given = torch.tensor([token_ids])
    return model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)[
        0, len(token_ids) :
    ].tolist()


def test_the_whole_context_counts(model):
    prompt = [300 + 37 * i % 3001 for i in range(96)]
    changed = [[*prompt[:at], *range(3500, 3516), *prompt[at + 16 :]] for at in range(0, 80, 16)]
    answers = [answer(model, token_ids) for token_ids in [prompt, *changed]]
    assert len({tuple(words) for words in answers}) == len(answers)


def test_the_adapter_fits_the_model(cache, model):
    directory = checkpoint_path("lora")
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == RANK
    with safe_open(directory / "adapter_model.safetensors", "numpy") as tensors:
        shapes = {name: tensors.get_tensor(name).shape for name in tensors.keys()}  # noqa: SIM118 - no dict
    assert len(shapes) == 2 * 2 * model.config.num_hidden_layers
    weights = dict(model.named_parameters())
    for name, (rows, columns) in shapes.items():
        base, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        out, width = weights[f"{base}.weight"].shape
        assert (rows, columns) == ((RANK, width) if part == "A.weight" else (out, RANK))
