"""Writes a Llama with random weights and kvpin-tiny's tokenizer, for demos and benchmarks.

python -m scripts.make_model --layers 12 --hidden 768 --heads 12 DIR
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from transformers import AutoConfig, GenerationConfig

from engine_adapter.torch_engine.model import DEFAULT_MODEL, DTYPES, random_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_model(
    directory: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    max_model_len: int = 8192,
    dtype: str = "float32",
    seed: int = 0,
) -> int:
    """Writes the model directory; returns the number of parameters. Raises ValueError for bad sizes."""
    if hidden % heads or hidden // heads % 2:
        raise ValueError(f"hidden {hidden} over {heads} heads: each head needs an even whole number")
    if heads % (kv_heads or heads):
        raise ValueError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    config = AutoConfig.from_pretrained(
        DEFAULT_MODEL,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=-(-hidden * 8 // 3 // 64) * 64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_model_len,
        dtype=dtype,
    )
    module = random_model(config, seed, DTYPES[dtype])
    module.generation_config = GenerationConfig.from_pretrained(DEFAULT_MODEL)
    module.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(DEFAULT_MODEL / name, directory / name)
    return sum(weight.numel() for weight in module.parameters())


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    try:
        parameters = write_model(given.pop("directory"), **given)
    except ValueError as error:
        parser.error(str(error))
    parser.exit(0, f"{parameters / 1e6:.1f}M parameters\n")


if __name__ == "__main__":
    main()
