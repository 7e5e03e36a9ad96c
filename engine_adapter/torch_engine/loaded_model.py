"""A model that is loaded, as the engine uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_adapter.torch_engine.attention import LayerShape


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run.

    Attributes:
        module: the transformers model.
        name: the served model name.
        tokenizer: absolute directory or hub id of the tokenizer.
        vocab_size: token ids below it are text. hidden_size: columns of an embedding.
        max_model_len: context in tokens.
        eos_token_ids: tokens that end a generation.
        default_max_tokens: limit of the generation config; None if it has none.
        device, dtype: as torch names them, e.g. `cpu`, `float32`.
        layers: KV shape of each layer. kv_bytes_per_token: over all of them.
        is_default: True for the built-in random-weight model.
    """

    module: Any
    name: str
    tokenizer: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None
    device: str
    dtype: str
    layers: tuple[LayerShape, ...]
    kv_bytes_per_token: int
    is_default: bool

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one KV block."""
        return self.kv_bytes_per_token * tokens_per_block
