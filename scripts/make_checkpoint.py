"""Writes the small random-weight model of make_gguf.py as a Hugging Face directory, and a LoRA for it.

    python -m scripts.make_checkpoint model|lora DIR [--seed N]

It is for vLLM: with vLLM's own dummy weights (`--load-format dummy`) answers hardly depend on the context, so
tests would not notice wrong KV. A GGUF orders rotary pairs otherwise, so its answers differ.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from scripts.make_gguf import SHAPES, Shape, cache_dir, make_tensors

VERSION = 1
"""Part of a cached directory's name: raise it whenever the files change."""
RANK = 8

_DEFAULT_MODEL = Path(__file__).parents[1] / "engine_adapter" / "torch_engine" / "default_model"
_SHAPE = SHAPES["tiny"]
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_path(kind: str, seed: int = 0) -> Path:
    """The directory of the `model` or the `lora` in the cache outside the checkout, written once."""
    directory = cache_dir() / f"checkpoint-{VERSION}" / f"{kind}-{seed}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as work:
            part = Path(work, kind)
            _WRITERS[kind](part, seed)
            if not directory.exists():
                part.rename(directory)
    return directory


def make_model(
    directory: Path,
    seed: int = 0,
    *,
    shape: Shape = _SHAPE,
    tokenizer: Path = _DEFAULT_MODEL,
    context: int = 8192,
) -> None:
    """Writes the model: weights in float16, and the `tokenizer` of a directory with its chat template.
    `context` is in tokens."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, directory / name)
    shutil.copyfile(_DEFAULT_MODEL / "generation_config.json", directory / "generation_config.json")
    vocabulary = msgspec.json.decode((tokenizer / "tokenizer.json").read_bytes())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    config = msgspec.json.decode((_DEFAULT_MODEL / "config.json").read_bytes()) | {
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": context,
        "vocab_size": len(tokens),
        "rms_norm_eps": 1e-5,
        "dtype": "float16",
    }
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    weights = make_tensors(shape, tokens, np.random.default_rng(seed))
    tensors = {_name(name): values.astype(np.float16) for name, values in weights}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_lora(directory: Path, seed: int = 0) -> None:
    """Writes the LoRA. It changes queries and values of every layer enough to change answers."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    rows = {"q_proj": _SHAPE.heads * _SHAPE.head_width, "v_proj": _SHAPE.kv_heads * _SHAPE.head_width}
    tensors = {}
    for layer in range(_SHAPE.layers):
        for name, out in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _matrix(random, RANK, _SHAPE.width)
            tensors[f"{prefix}.lora_B.weight"] = _matrix(random, out, RANK)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "kvpin-tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(rows),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(adapter))


_WRITERS = {"model": make_model, "lora": make_lora}


def _name(gguf: str) -> str:
    """A weight's name, from its name in a GGUF: `blk.0.attn_q.weight` → `model.layers.0.self_attn…`."""
    parts = gguf.removesuffix(".weight").split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{_NAMES[parts[-1]]}.weight"


def _matrix(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.float16]:
    return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float16)


def main() -> None:
    """Writes the model or the LoRA."""
    parser = argparse.ArgumentParser(description="Writes a small random model, or a LoRA adapter for it.")
    parser.add_argument("kind", choices=_WRITERS)
    parser.add_argument("directory", type=Path, help="made; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    _WRITERS[options.kind](options.directory, options.seed)


if __name__ == "__main__":
    main()
