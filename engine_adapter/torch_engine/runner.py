"""A loaded model, and one forward pass of it: tokens of many sequences in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.torch_engine.attention import (
    Decodes,
    KvStorage,
    LayerShape,
    PagedBatch,
    Scratch,
    Span,
    attention_context,
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


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """The next `count` tokens of a sequence, for which blocks are reserved.

    Attributes:
        logits: after how many of the last of them logits are needed.
        embeddings: extra id → [rows, hidden], for fake ids.
    """

    sequence: KvSequence
    count: int
    logits: int
    embeddings: Mapping[int, Tensor]


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
    def run(self, work: Sequence[ScheduledTokens]) -> Tensor:
        """Logits [tokens after which they are needed, vocabulary], in order. Neighbours in `work` with a
        single token each and similar lengths are attended in one call.

        Raises:
            NoScores: the model computes what is no number.
        """
        rows = self._rows(work)
        needed = np.array([item.logits for item in work], dtype=np.int64)
        wanted = np.arange(needed.sum()) + (rows.ends - needed.cumsum()).repeat(needed)
        batch = self._batch(rows)
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

    def run_with_hidden(self, work: Sequence[ScheduledTokens]) -> tuple[Tensor, Tensor]:
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

    def _rows(self, work: Sequence[ScheduledTokens]) -> _Rows:
        counts = np.array([item.count for item in work])
        lengths = np.array([item.sequence.computed for item in work]) + counts
        blocks = -(-lengths // self._size)
        tables = [
            np.array(item.sequence.blocks[:used], dtype=np.int64)
            for item, used in zip(work, blocks.tolist(), strict=True)
        ]
        ends = counts.cumsum()
        owners = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(len(owners)) + (lengths - ends)[owners]
        places = positions // self._size + (blocks.cumsum() - blocks)[owners]
        slots = np.concatenate(tables)[places] * self._size + positions % self._size
        return _Rows(counts, ends, lengths, tables, positions, slots)

    def _batch(self, rows: _Rows) -> PagedBatch:
        parts = [self._part(rows, first, last) for first, last in self._groups(rows)]
        return PagedBatch(self._layers, self._to_device(rows.slots), parts, self._scratch)

    def _part(self, rows: _Rows, first: int, last: int) -> Span | Decodes:
        """The items `first` to `last`, which attend together."""
        begin, end = int(rows.ends[first] - rows.counts[first]), int(rows.ends[last])
        if first == last:
            table, length = rows.tables[first], int(rows.lengths[first])
            together = bool((np.diff(table) == 1).all())
            blocks_of = None if together else self._to_device(table)
            return Span(begin, end, length, int(table[0]) * self._size, blocks_of)
        tables = rows.tables[first : last + 1]
        blocks = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for padded, table in zip(blocks, tables, strict=True):
            padded[: len(table)] = table
        lengths = rows.lengths[first : last + 1]
        return Decodes(begin, end, self._to_device(blocks.ravel()), self._to_device(lengths))

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

    def _inputs(self, work: Sequence[ScheduledTokens]) -> dict[str, Tensor]:
        """`input_ids`, or `inputs_embeds` when the step has fake ids."""
        tokens = np.concatenate([_tokens(item) for item in work])
        fake = tokens >= self._vocab_size
        if not fake.any():
            return {"input_ids": self._to_device(tokens)[None]}
        embeds = self._embed(self._to_device(np.where(fake, 0, tokens)))
        row = 0
        for item in work:
            for begin, end, rows in _embedded(item, self._vocab_size):
                embeds[row + begin : row + end] = rows.to(device=embeds.device, dtype=embeds.dtype)
            row += item.count
        return {"inputs_embeds": embeds[None]}

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _tokens(item: ScheduledTokens) -> Ints:
    start = item.sequence.computed
    return np.array(item.sequence.tokens[start : start + item.count], dtype=np.int64)


def _embedded(item: ScheduledTokens, vocab_size: int) -> list[tuple[int, int, Tensor]]:
    """Runs of fake ids among an item's tokens, as (begin, end, embeddings [end - begin, hidden])."""
    extra_ids = item.sequence.extra_ids
    if extra_ids is None:
        return []
    start = item.sequence.computed
    extras = np.array(extra_ids[start : start + item.count], dtype=np.uint64)
    rows = _tokens(item) - vocab_size
    edges = np.flatnonzero(np.diff(extras)) + 1
    bounds = [0, *edges.tolist(), item.count]
    return [
        (begin, end, item.embeddings[int(extras[begin])][torch.from_numpy(rows[begin:end])])
        for begin, end in pairwise(bounds)
        if extras[begin]
    ]
