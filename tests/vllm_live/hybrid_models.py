"""Tiny models with several kinds of attention, as directories that engines load with dummy weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

_DEFAULT_MODEL = Path(__file__).parents[2] / "engine_adapter" / "torch_engine" / "default_model"
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
WINDOW = 128
_SHARED = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_WINDOWED = ["sliding_attention"] * 5 + ["full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 6,
        "layer_types": _WINDOWED,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
    },
    "mellum": {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense"] * 4,
        "sliding_window": WINDOW,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 128,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


def make_model(directory: Path, shape: str) -> Path:
    """Writes the configuration and the tokenizer of one of `SHAPES`."""
    directory.mkdir(parents=True)
    for name in _COPIED:
        shutil.copyfile(_DEFAULT_MODEL / name, directory / name)
    (directory / "config.json").write_bytes(msgspec.json.encode(_SHARED | SHAPES[shape]))
    return directory
