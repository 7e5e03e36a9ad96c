"""Loading a model: a directory, a hub id, or the built-in default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run.

    Attributes:
        module: the transformers model.
        name: what it is served as.
        tokenizer: absolute directory or hub id of its tokenizer.
        vocab_size: ids below it are text. hidden_size: columns of an embedding.
        max_model_len: context in tokens.
        eos_token_ids: tokens that end a generation.
        default_max_tokens: from its generation config, None when that says nothing.
        device, dtype: as torch names them, e.g. `cpu`, `float32`.
        kv_bytes_per_token: over all layers.
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
    kv_bytes_per_token: int
    is_default: bool

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one KV block."""
        return self.kv_bytes_per_token * tokens_per_block


def load_model(
    source: str | None,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    served_name: str | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Loads a Hugging Face causal LM from a directory or hub id; None is `kvpin-tiny`.

    `dtype` None takes the checkpoint's. `seed` draws the weights of `kvpin-tiny` only.

    Raises:
        EngineSpecError: nothing there, or a model this engine cannot run; says why.
    """
    raise NotImplementedError
