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
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "hidden_act": "silu",
        "rope_theta": 1e6,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_theta": 1e6,
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
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
        "rope_theta": 5e5,
        "use_qk_norm": False,
    },
}


def make_model(directory: Path, shape: str) -> Path:
    """Writes the configuration and the tokenizer of one of `SHAPES`."""
    directory.mkdir(parents=True)
    for name in _COPIED:
        shutil.copyfile(_DEFAULT_MODEL / name, directory / name)
    (directory / "config.json").write_bytes(msgspec.json.encode(_SHARED | SHAPES[shape]))
    return directory
