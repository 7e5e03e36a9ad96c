"""One forward pass: tokens of many sequences in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.torch_engine.attention import (
    Decodes,
    PagedBatch,
    Part,
    Place,
    Scratch,
    Span,
    attention_context,
)
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.loaded_model import LoadedModel
from engine_adapter.torch_engine.storage import KvStorage

Ints = NDArray[np.int64]

PADDING_TOKENS = 256
"""Most tokens of padding in a call for several sequences. To attend so many costs about what a call costs."""
CALL_BYTES = 4 << 20
"""Most KV that a call for several sequences gathers. More would not stay in a CPU's own cache."""


@dataclass(frozen=True, slots=True)
class Work:
    """The next `count` tokens of a sequence, for which blocks are reserved.

    Attributes:
        logits: after how many of the last of them logits are needed.
        embeddings: extra id → [rows, hidden], for fake ids.
    """

    sequence: KvSequence
    count: int
    logits: int
    embeddings: Mapping[int, Tensor]


class Runner:
    """Runs a model over paged KV. Writes only to reserved blocks."""

    def __init__(self, model: LoadedModel, storage: KvStorage, tokens_per_block: int) -> None:
        self._module = model.module
        self._embed = model.module.get_input_embeddings()
        self._vocab_size = model.vocab_size
        self._device = torch.device(model.device)
        self._storage = storage
        self._size = tokens_per_block
        self._scratch = Scratch(tokens_per_block)
        self._most_blocks = CALL_BYTES * len(model.layers) // model.block_bytes(tokens_per_block)

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Tensor:
        """Logits [tokens after which they are needed, vocabulary], in order. Neighbours in `work` with a
        single token each and similar lengths are attended in one call."""
        tables = [self._table(item) for item in work]
        positions = np.concatenate(
            [np.arange(item.sequence.computed, item.sequence.computed + item.count) for item in work]
        )
        owners = np.repeat(np.arange(len(work)), [item.count for item in work])
        slots = self._slots(tables, owners, positions)
        ends = np.cumsum([item.count for item in work])
        wanted = [row for end, item in zip(ends, work, strict=True) for row in range(end - item.logits, end)]
        batch = self._batch(work, tables, slots, ends)
        with attention_context(batch):
            output = self._module(
                **self._inputs(work),
                position_ids=self._to_device(positions)[None],
                use_cache=False,
                logits_to_keep=self._to_device(np.array(wanted, dtype=np.int64)),
            )
        logits: Tensor = output.logits[0]
        return logits

    def _table(self, item: Work) -> Ints:
        """Block ids of a sequence up to the last token of this step."""
        used = -(-(item.sequence.computed + item.count) // self._size)
        return np.array(item.sequence.blocks[:used], dtype=np.int64)

    def _slots(self, tables: list[Ints], owners: Ints, positions: Ints) -> Ints:
        """Token slots of all rows."""
        starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
        blocks = np.concatenate(tables)[starts[owners] + positions // self._size]
        slots: Ints = blocks * self._size + positions % self._size
        return slots

    def _batch(self, work: Sequence[Work], tables: list[Ints], slots: Ints, ends: Ints) -> PagedBatch:
        parts: list[Part] = []
        for group in self._groups(work, tables):
            begin, end = int(ends[group[0]]) - work[group[0]].count, int(ends[group[-1]])
            lengths = [work[index].sequence.computed + work[index].count for index in group]
            if len(group) == 1:
                parts.append(Span(begin, end, self._place(tables[group[0]], lengths[0])))
            else:
                blocks = _padded([tables[index] for index in group])
                parts.append(Decodes(begin, end, self._to_device(blocks), self._to_device(np.array(lengths))))
        return PagedBatch(self._storage, self._to_device(slots), parts, self._scratch)

    def _groups(self, work: Sequence[Work], tables: list[Ints]) -> list[list[int]]:
        """The items that attend together, as indices: see `PADDING_TOKENS` and `CALL_BYTES`."""
        groups: list[list[int]] = []
        widest = used = 0  # blocks of the last group: of its longest sequence, of all
        for index, item in enumerate(work):
            blocks = len(tables[index])
            wide = max(widest, blocks) * (len(groups[-1]) + 1) if groups else 0
            if (
                groups
                and item.count == work[groups[-1][-1]].count == 1
                and (wide - used - blocks) * self._size <= PADDING_TOKENS
                and wide <= self._most_blocks
            ):
                groups[-1].append(index)
                widest, used = max(widest, blocks), used + blocks
            else:
                groups.append([index])
                widest = used = blocks
        return groups

    def _place(self, table: Ints, length: int) -> Place:
        if table[-1] - table[0] == len(table) - 1 and (np.diff(table) == 1).all():
            return Place(length, int(table[0]) * self._size, None)
        return Place(length, 0, self._to_device(table))

    def _inputs(self, work: Sequence[Work]) -> dict[str, Tensor]:
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


def _padded(tables: list[Ints]) -> Ints:
    """The tables one after another, each padded to the longest with block 0."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded.ravel()


def _tokens(item: Work) -> Ints:
    start = item.sequence.computed
    return np.array(item.sequence.tokens[start : start + item.count], dtype=np.int64)


def _embedded(item: Work, vocab_size: int) -> list[tuple[int, int, Tensor]]:
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
