"""A loaded model, and one forward pass of it: tokens of many sequences in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.torch_engine.attention import (
    KvStorage,
    LayerShape,
    PagedBatch,
    Part,
    Scratch,
    attention_context,
    bytes_per_token,
)
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.requests import NoScores, RequestRefused

Ints = NDArray[np.int64]

PADDING_TOKENS = 256
"""Most tokens of padding in a call for several sequences. To attend so many costs about what a call costs."""
CALL_BYTES = 4 << 20
"""Most KV that a call for several sequences gathers. More would not stay in a CPU's own cache."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run.

    Attributes:
        tokenizer: absolute directory or hub id of the tokenizer.
        vocab_size: token ids below it are text. hidden_size: columns of an embedding.
        max_model_len: context in tokens.
        default_max_tokens: limit of the generation config; None if it has none.
        device, dtype: as torch names them, e.g. `cpu`, `float32`.
        layers: KV shape of each layer.
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
    is_default: bool

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one KV block."""
        return bytes_per_token(self.layers, getattr(torch, self.dtype)) * tokens_per_block


class _Rows(NamedTuple):
    """The rows of a step, a row for each token.

    Attributes:
        counts, ends, lengths: of each item: its rows, where they end, its tokens after the step.
        tables: the block ids of each item.
        positions, slots: of each row: its place in the sequence and in the KV.
    """

    counts: Ints
    ends: Ints
    lengths: Ints
    tables: list[Ints]
    positions: Ints
    slots: Ints


class Runner:
    """Runs a model over paged KV. Writes only to reserved blocks."""

    def __init__(self, model: LoadedModel, storage: KvStorage, tokens_per_block: int) -> None:
        self._module = model.module
        self._embed = model.module.get_input_embeddings()
        self._vocab_size = model.vocab_size
        self._device = torch.device(model.device)
        self._layers = storage.layers
        self._size = tokens_per_block
        self._scratch = Scratch(tokens_per_block)
        self._most_blocks = CALL_BYTES * len(model.layers) // model.block_bytes(tokens_per_block)

    @torch.inference_mode()
    def run(self, work: Sequence[KvSequence]) -> Tensor:
        """Logits [tokens after which they are needed, vocabulary], in order. Neighbours in `work` with a
        single token each and similar lengths are attended in one call.

        Raises:
            NoScores: the model computes what is no number.
        """
        rows = self._rows(work)
        needed = np.array([item.logits for item in work], dtype=np.int64)
        wanted = np.arange(needed.sum()) + (rows.ends - needed.cumsum()).repeat(needed)
        parts = [self._part(rows, first, last) for first, last in self._groups(rows)]
        batch = PagedBatch(self._layers, self._to_device(rows.slots), parts, self._scratch)
        with attention_context(batch):
            output = self._module(
                **self._inputs(work),
                position_ids=self._to_device(rows.positions)[None],
                use_cache=False,
                logits_to_keep=self._to_device(wanted),
            )
        if not torch.stack(batch.sums).isfinite().all():
            raise NoScores("the model computes values that are no numbers")
        logits: Tensor = output.logits[0]
        return logits

    def run_with_hidden(self, work: Sequence[KvSequence]) -> tuple[Tensor, Tensor]:
        """The same, and the last hidden states [tokens, hidden] that the logits are made from.

        Raises:
            RequestRefused: the model's logits are not made by one layer.
        """
        seen: list[Tensor] = []
        head = self._module.get_output_embeddings()
        if head is not None:
            with head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0])):
                logits = self.run(work)
        if len(seen) != 1:
            raise RequestRefused("this model gives no embeddings", param="model")
        return logits, seen[0]

    def _rows(self, work: Sequence[KvSequence]) -> _Rows:
        counts = np.array([item.count for item in work])
        lengths = np.array([item.computed for item in work]) + counts
        blocks = -(-lengths // self._size)
        tables = [
            np.array(item.blocks[:used], dtype=np.int64)
            for item, used in zip(work, blocks.tolist(), strict=True)
        ]
        ends = counts.cumsum()
        owners = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(len(owners)) + (lengths - ends)[owners]
        places = positions // self._size + (blocks.cumsum() - blocks)[owners]
        slots = np.concatenate(tables)[places] * self._size + positions % self._size
        return _Rows(counts, ends, lengths, tables, positions, slots)

    def _part(self, rows: _Rows, first: int, last: int) -> Part:
        """The items `first` to `last`, which attend together."""
        begin, end = int(rows.ends[first] - rows.counts[first]), int(rows.ends[last])
        tables, lengths = rows.tables[first : last + 1], rows.lengths[first : last + 1]
        part = Part(begin, end, self._to_device(lengths), int(lengths.max()))
        if first == last and bool((np.diff(tables[0]) == 1).all()):
            part.start = int(tables[0][0]) * self._size
        else:
            blocks = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
            for padded, table in zip(blocks, tables, strict=True):
                padded[: len(table)] = table
            part.blocks = self._to_device(blocks.ravel())
        return part

    def _groups(self, rows: _Rows) -> list[tuple[int, int]]:
        """The items that attend together, as first and last index: see `PADDING_TOKENS` and `CALL_BYTES`."""
        groups: list[tuple[int, int]] = []
        widest = used = 0  # blocks of the last group: of its longest sequence, of all
        single = rows.counts == 1
        together = (single[1:] & single[:-1]).tolist()
        for index, blocks in enumerate(map(len, rows.tables)):
            first = groups[-1][0] if groups else 0
            wide = max(widest, blocks) * (index - first + 1)
            if (
                groups
                and together[index - 1]
                and (wide - used - blocks) * self._size <= PADDING_TOKENS
                and wide <= self._most_blocks
            ):
                groups[-1] = first, index
                widest, used = max(widest, blocks), used + blocks
            else:
                groups.append((index, index))
                widest = used = blocks
        return groups

    def _inputs(self, work: Sequence[KvSequence]) -> dict[str, Tensor]:
        """`input_ids`, or `inputs_embeds` when the step has fake ids."""
        parts = [slice(item.computed, item.computed + item.count) for item in work]
        tokens = np.concatenate(
            [np.array(item.tokens[part], dtype=np.int64) for item, part in zip(work, parts, strict=True)]
        )
        fake = tokens >= self._vocab_size
        if not fake.any():
            return {"input_ids": self._to_device(tokens)[None]}
        embeds = self._embed(self._to_device(np.where(fake, 0, tokens)))
        begin = 0
        for item, part in zip(work, parts, strict=True):
            extras = np.array(() if item.extra_ids is None else item.extra_ids[part], dtype=np.uint64)
            for extra_id, rows in item.embeddings.items():
                at = begin + np.flatnonzero(extras == extra_id)
                at = at[fake[at]]
                given = rows[torch.from_numpy(tokens[at] - self._vocab_size)]
                embeds[self._to_device(at)] = given.to(device=embeds.device, dtype=embeds.dtype)
            begin += item.count
        return {"inputs_embeds": embeds[None]}

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: torch adds advice on debugging to errors of the device."""
    return str(error).partition("\n")[0]
