"""Checks at load that a model gives the same logits over paged KV as in one full pass.

Two short sequences run as the engine would run them: in chunks, together, over shared blocks, one token given
by its embedding. The same sequences run in one pass each with transformers' own eager attention and no cache.
The comparison finds what no configuration shows, for example rotary factors that depend on the longest
position in the batch.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import IMPLEMENTATION
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.loaded_model import LoadedModel
from engine_adapter.torch_engine.runner import Runner, Work
from engine_adapter.torch_engine.storage import KvStorage

_BLOCK = 4
# Tokens: of the short sequence, shared by both sequences, of the long sequence.
_NEAR, _SHARED, _LONG = 12, 8, 24
_EXTRA_ID = 1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest deviation allowed, as a share of the logits' spread. Rounding stays well below it."""


class _Stretched:
    """A model that moves the tokens from the 13th on to the end of its context.

    This tests long positions without long sequences.
    """

    def __init__(self, module: Any, max_model_len: int) -> None:  # noqa: ANN401 - a transformers model
        self._module = module
        self._jump = max(0, max_model_len - _LONG)

    def __call__(self, *, position_ids: Tensor, **inputs: Any) -> Any:  # noqa: ANN401
        return self._module(position_ids=position_ids + self._jump * (position_ids >= _NEAR), **inputs)

    def get_input_embeddings(self) -> Any:  # noqa: ANN401
        return self._module.get_input_embeddings()


@torch.inference_mode()
def check_model(model: LoadedModel) -> None:
    """Raises EngineSpecError for a model whose paged answers differ from those of a full pass."""
    long = [(7 * index + 3) % model.vocab_size for index in range(_LONG)]
    short = long[:_SHARED] + [(5 * index + 1) % model.vocab_size for index in range(_NEAR - _SHARED)]
    stretched = _Stretched(model.module, model.max_model_len)
    expected = torch.cat([_full_logits(model.module, stretched, tokens) for tokens in (short, long)])
    paged = _paged_logits(replace(model, module=stretched), long, short)
    deviation = float((paged - expected).norm() / (expected - expected.mean()).norm())
    if not deviation <= TOLERANCE[model.module.dtype]:
        raise EngineSpecError(
            f"its answers over a paged KV cache differ from those of one full pass (by {deviation:.2g} of "
            "their spread): some layer depends on more than a token, its position and the KV before it"
        )


def _paged_logits(model: LoadedModel, long: list[int], short: list[int]) -> Tensor:
    """Logits of the last two tokens of `short`, then of `long`, [4, vocabulary]."""
    device = torch.device(model.device)
    # The last token but two of the short sequence is given by its embedding.
    embedded = _NEAR - 3
    row = model.module.get_input_embeddings()(torch.tensor([short[embedded]], device=device))
    storage = KvStorage(
        model.layers,
        gpu_blocks=8,
        host_blocks=0,
        tokens_per_block=_BLOCK,
        device=device,
        dtype=row.dtype,
    )
    runner = Runner(model, storage, _BLOCK)
    tokens, extra_ids = array("i", short), array("Q", bytes(8 * _NEAR))
    tokens[embedded], extra_ids[embedded] = model.vocab_size, _EXTRA_ID
    first = _sequence(KvSequence(tokens, extra_ids, None), [0, 1, 7], computed=_SHARED)
    second = _sequence(KvSequence(array("i", long), None, None), [0, 1, 2, 3, 4, 5], computed=0)

    def run(*counts: tuple[KvSequence, int, bool]) -> Tensor:
        logits = runner.run([Work(*count, {_EXTRA_ID: row}) for count in counts])
        for sequence, count, _ in counts:
            sequence.computed += count
        return logits.float()

    run((second, _NEAR, False))
    chunks = run((first, _NEAR - 1 - _SHARED, True), (second, _NEAR - 1, True))
    singles = run((first, 1, True), (second, 1, True))
    return torch.stack([chunks[0], singles[0], chunks[1], singles[1]])


def _sequence(sequence: KvSequence, blocks: list[int], *, computed: int) -> KvSequence:
    sequence.blocks, sequence.computed = array("i", blocks), computed
    return sequence


def _full_logits(module: Any, stretched: _Stretched, tokens: list[int]) -> Tensor:  # noqa: ANN401
    """Logits of the last two tokens of a sequence that runs in one pass, without a cache."""
    ids = torch.tensor([tokens], device=module.device)
    module.set_attn_implementation("eager")
    try:
        output = stretched(
            input_ids=ids,
            position_ids=torch.arange(len(tokens), device=module.device)[None],
            # Without a mask, transformers takes the jump in the positions for the start of another sequence.
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        )
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    logits: Tensor = output.logits[0, -2:]
    return logits.float()
