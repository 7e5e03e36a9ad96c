"""Writes small GGUF models with random weights for tests and benchmarks against a real llama-server.

    python scripts/make_gguf.py tiny|large|swa|sinks|linear|conv DIR [--seed N]

What a model says is gibberish, but it behaves as a real one does where a cache is concerned:

- its text is whole words, so that it tokenises back to the ids the server sampled,
- every token depends on the whole context, so that wrong KV gives another answer,
- it ends its turn now and then.

Tokenizer and chat template are those of the embedded engine's default model.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import gguf
    import msgspec
    import numpy as np
    from numpy.typing import NDArray
    from safetensors.numpy import load_file
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"make_gguf.py needs the package {error.name}: scripts/install engine,dev") from None

VERSION = 2
"""Part of a cached file's name: raise it whenever the files change."""

_TOKENIZER = Path(__file__).parents[1] / "engine_adapter" / "torch_engine" / "default_model"
_CONTEXT = 32768
_END_OF_TEXT, _TURN_END = "<|endoftext|>", "<|im_end|>"
_WORD = re.compile(r"Ġ[a-z]{2,}")
"""A space and letters: a run of such tokens is tokenised to the same ids, whatever stands before it."""

# Channel 0 of the residual stream holds a constant that no layer reads or writes. The output head reads it
# as a bias, which the architecture lacks: far below zero for what is no word, a little above for the end.
_BIAS = 16.0
_NEVER = -12.0
_END = 0.2
_LOGIT_STD = 3.0
_ATTENTION_STD = 2.5  # of the logits: sharp enough to look at single tokens far back


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model.

    Attributes:
        architecture: its name in the file.
        window: tokens a sliding-window layer looks back; None where all layers see everything.
        experts: feed-forward networks per layer, of which two run for a token; 0 for a single one.
        full_every: every so many layers one has attention, the others a recurrent state; 0 for all attention.
    """

    architecture: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    window: int | None = None
    experts: int = 0
    full_every: int = 0

    def is_recurrent(self, layer: int) -> bool:
        """True if this layer has a recurrent state instead of attention."""
        return self.full_every > 0 and (layer + 1) % self.full_every != 0

    @property
    def has_head_norms(self) -> bool:
        """True if queries and keys are normalised in each head."""
        return self.architecture in ("gemma3", "qwen35", "lfm2")


SHAPES = {
    "tiny": Shape("llama", 4, 256, 640, 4, 2, 64),  # 9 MB
    "large": Shape("llama", 8, 1024, 2688, 16, 8, 64),  # 100M parameters, 199 MB
    "swa": Shape("gemma3", 6, 256, 640, 4, 2, 64, window=128),  # 13 MB; every sixth layer sees everything
    "sinks": Shape("gpt-oss", 4, 256, 256, 4, 2, 64, window=128, experts=4),  # every second one; 15 MB
    "linear": Shape("qwen35", 4, 256, 640, 4, 2, 64, full_every=4),  # gated delta nets; 11 MB
    "conv": Shape("lfm2", 4, 256, 640, 4, 2, 64, full_every=2),  # short convolutions; 9 MB
}

_CONV = 4  # tokens that a convolution sees
_STATE = 64  # width of the state of a head of a gated delta net
# The norm before the feed-forward network, where it has a name of its own.
_NETWORK_NORM = {"gpt-oss": "post_attention_norm", "qwen35": "post_attention_norm"}


def gguf_path(kind: str, seed: int = 0) -> Path:
    """The model's file in the cache outside the checkout, written on first use."""
    return make_gguf(kind, cache_dir() / f"gguf-{VERSION}", seed)


def cache_dir() -> Path:
    """Where what is made once is kept, outside the checkout."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVPIN_CACHE") or Path(home, "kvpin"))


def make_gguf(kind: str, directory: Path, seed: int = 0) -> Path:
    """Writes `kind-seed.gguf` into `directory` unless it is there, whole or not at all."""
    path = directory / f"{kind}-{seed}.gguf"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            part = Path(work, path.name)
            _write(part, SHAPES[kind], kind, seed)
            part.replace(path)
    return path


def convert(checkpoint: Path, path: Path) -> Path:
    """Writes a Llama checkpoint that has the default tokenizer as a GGUF of the same weights, in float32."""
    config = msgspec.json.decode((checkpoint / "config.json").read_bytes())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shape = Shape(
        "llama",
        config["num_hidden_layers"],
        config["hidden_size"],
        config["intermediate_size"],
        heads,
        kv_heads,
        config["head_dim"],
    )
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_shape(writer, shape)
    _add_tokenizer(writer, msgspec.json.decode((checkpoint / "tokenizer.json").read_bytes()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    for name, values in load_file(checkpoint / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        rotated = {"q_proj": heads, "k_proj": kv_heads}.get(stem.rpartition(".")[2])
        written = values.astype(np.float32)
        if rotated is not None:  # llama.cpp rotates neighbours, transformers the two halves of a head
            halves = written.reshape(rotated, 2, -1, written.shape[1])
            written = halves.swapaxes(1, 2).reshape(written.shape)
        writer.add_tensor(f"{names.get_name(stem)}.weight", np.ascontiguousarray(written))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shuffled(path: Path, kind: str, seed: int = 0) -> None:
    """Writes a model that has the same words in its vocabulary, under other ids."""
    tokenizer = msgspec.json.decode((_TOKENIZER / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    words = sorted(word for word in vocabulary if _WORD.fullmatch(word))
    ids = [vocabulary[word] for word in words]
    vocabulary |= dict(zip(words, ids[1:] + ids[:1], strict=True))
    _write(path, SHAPES[kind], kind, seed, tokenizer)


def _write(path: Path, shape: Shape, kind: str, seed: int, tokenizer: dict | None = None) -> None:
    tokenizer = tokenizer or msgspec.json.decode((_TOKENIZER / "tokenizer.json").read_bytes())
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"kvpin-{kind}-{seed}")
    _add_shape(writer, shape)
    tokens = _add_tokenizer(writer, tokenizer)
    for name, values in make_tensors(shape, tokens, np.random.default_rng(seed)):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(_CONTEXT)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    heads = [0 if shape.is_recurrent(layer) else shape.kv_heads for layer in range(shape.layers)]
    writer.add_head_count_kv(heads if shape.architecture == "lfm2" else shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(shape.hidden)
    if shape.architecture == "lfm2":
        writer.add_shortconv_l_cache(_CONV)
    if shape.architecture == "qwen35":
        writer.add_rope_dimension_sections([shape.head_width // 2, 0, 0, 0])
        writer.add_full_attention_interval(shape.full_every)
        writer.add_ssm_conv_kernel(_CONV)
        writer.add_ssm_inner_size(shape.heads * _STATE)
        writer.add_ssm_state_size(_STATE)
        writer.add_ssm_time_step_rank(shape.heads)
        writer.add_ssm_group_count(shape.kv_heads)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> list[str]:
    """Writes the vocabulary; returns its tokens by id."""
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocabulary[_END_OF_TEXT])
    writer.add_eos_token_id(vocabulary[_TURN_END])
    writer.add_pad_token_id(vocabulary[_END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_chat_template((_TOKENIZER / "chat_template.jinja").read_text(encoding="utf-8"))
    return tokens


Tensors = Iterator[tuple[str, NDArray[Any]]]


def make_tensors(shape: Shape, tokens: list[str], random: np.random.Generator) -> Tensors:
    """The weights by their names in a GGUF, the same ones for the same state of `random`."""
    made = _Weights(shape, random)
    norm = np.ones(shape.width, np.float32)
    embedding = random.standard_normal((len(tokens), shape.width), np.float32)
    embedding[:, 0] = _BIAS * (shape.width / 256) ** 0.5
    if shape.architecture == "gemma3":
        embedding /= shape.width**0.5  # what this architecture multiplies it with
    yield "token_embd.weight", embedding.astype(np.float16)
    for layer in range(shape.layers):
        for part in (made.norms(), made.mixer(layer), made.network()):
            for name, values in part:
                yield f"blk.{layer}.{name}", values
    yield "token_embd_norm.weight" if shape.architecture == "lfm2" else "output_norm.weight", norm
    head = made.matrix(len(tokens), shape.width, _LOGIT_STD)
    head[:, 0] = [
        0.0 if _WORD.fullmatch(token) else _END if token == _TURN_END else _NEVER for token in tokens
    ]
    yield "output.weight", head.astype(np.float16)


class _Weights:
    """The weights of one layer, by their names without the layer's."""

    def __init__(self, shape: Shape, random: np.random.Generator) -> None:
        self.shape = shape
        self.random = random

    def matrix(self, rows: int, columns: int, std: float = 1.0) -> NDArray[np.float32]:
        """Keeps the size of what it multiplies, times `std`."""
        return self.random.standard_normal((rows, columns), np.float32) * np.float32(std / columns**0.5)

    def half(self, rows: int, std: float = 1.0) -> NDArray[np.float16]:
        """Reads the residual stream."""
        return self.matrix(rows, self.shape.width, std).astype(np.float16)

    def into_stream(self, columns: int) -> NDArray[np.float16]:
        """Writes into the residual stream, but not into its channel 0."""
        values = self.matrix(self.shape.width, columns)
        values[0] = 0
        return values.astype(np.float16)

    def norms(self) -> Tensors:
        unbiased = np.ones(self.shape.width, np.float32)
        unbiased[0] = 0
        names = ["attn_norm", _NETWORK_NORM.get(self.shape.architecture, "ffn_norm")]
        if self.shape.architecture == "gemma3":
            names += ["post_attention_norm", "post_ffw_norm"]
        for name in names:
            yield f"{name}.weight", unbiased

    def mixer(self, layer: int) -> Tensors:
        """The part of a layer that looks at other tokens."""
        if not self.shape.is_recurrent(layer):
            return self.attention()
        return self.convolution() if self.shape.architecture == "lfm2" else self.delta_net()

    def network(self) -> Tensors:
        return self.experts() if self.shape.experts else self.feed_forward()

    def attention(self) -> Tensors:
        shape = self.shape
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        if shape.has_head_norms:
            yield "attn_q_norm.weight", np.full(shape.head_width, _ATTENTION_STD, np.float32)
            yield "attn_k_norm.weight", np.ones(shape.head_width, np.float32)
        asked = self.half(queries, _ATTENTION_STD)
        if shape.architecture == "qwen35":  # each head's queries, then its gates
            by_head = (shape.heads, shape.head_width, shape.width)
            pair = np.stack([asked.reshape(by_head), self.half(queries).reshape(by_head)], axis=1)
            asked = pair.reshape(2 * queries, shape.width)
        yield "attn_q.weight", asked
        yield "attn_k.weight", self.half(keys)
        yield "attn_v.weight", self.half(keys, 2.0)
        yield "attn_output.weight", self.into_stream(queries)
        if shape.architecture == "gpt-oss":
            yield "attn_output.bias", np.zeros(shape.width, np.float32)
            yield "attn_sinks.weight", np.zeros(shape.heads, np.float32)

    def delta_net(self) -> Tensors:
        heads = self.shape.heads
        values, mixed = heads * _STATE, (heads + 2 * self.shape.kv_heads) * _STATE
        yield "attn_qkv.weight", self.half(mixed)
        yield "attn_gate.weight", self.half(values)
        yield "ssm_conv1d.weight", self.matrix(mixed, _CONV)
        yield "ssm_dt.bias", np.zeros(heads, np.float32)
        yield "ssm_a", np.full(heads, -0.01, np.float32)  # forgets slowly: the whole context counts
        yield "ssm_beta.weight", self.half(heads)
        yield "ssm_alpha.weight", self.half(heads)
        yield "ssm_norm.weight", np.ones(_STATE, np.float32)
        yield "ssm_out.weight", self.into_stream(values)

    def convolution(self) -> Tensors:
        yield "shortconv.conv.weight", self.matrix(self.shape.width, _CONV)
        yield "shortconv.in_proj.weight", self.half(3 * self.shape.width)
        yield "shortconv.out_proj.weight", self.into_stream(self.shape.width)

    def feed_forward(self) -> Tensors:
        yield "ffn_gate.weight", self.half(self.shape.hidden)
        yield "ffn_up.weight", self.half(self.shape.hidden)
        yield "ffn_down.weight", self.into_stream(self.shape.hidden)

    def experts(self) -> Tensors:
        each = [dict(self.feed_forward()) for _ in range(self.shape.experts)]
        for name in each[0]:
            stem = f"{name.removesuffix('.weight')}_exps"
            stack = np.stack([weights[name] for weights in each])
            yield f"{stem}.weight", stack
            yield f"{stem}.bias", np.zeros(stack.shape[:2], np.float32)
        yield "ffn_gate_inp.weight", self.matrix(self.shape.experts, self.shape.width)
        yield "ffn_gate_inp.bias", np.zeros(self.shape.experts, np.float32)


def main() -> None:
    """Writes one model and prints its path."""
    parser = argparse.ArgumentParser(description="Writes a small GGUF model with random weights.")
    parser.add_argument("kind", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_gguf(options.kind, options.directory, options.seed))


if __name__ == "__main__":
    main()
