"""One forward pass: tokens of many sequences in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.torch_engine.attention import Decodes, PagedBatch, Place, Span, attention_context
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.loaded_model import LoadedModel
from engine_adapter.torch_engine.storage import KvStorage

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """The next `count` tokens of a sequence, for which blocks are reserved.

    Attributes:
        wants_logits: whether the logits after the last of them are needed.
        embeddings: extra id → [rows, hidden], for fake ids.
    """

    sequence: KvSequence
    count: int
    wants_logits: bool
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

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Tensor:
        """Logits [items that want them, vocabulary], in order. Single tokens come first in `work`, so that
        one call attends them together."""
        tables = [self._table(item) for item in work]
        positions = np.concatenate(
            [np.arange(item.sequence.computed, item.sequence.computed + item.count) for item in work]
        )
        owners = np.repeat(np.arange(len(work)), [item.count for item in work])
        slots = self._slots(tables, owners, positions)
        ends = np.cumsum([item.count for item in work])
        wanted = [end - 1 for end, item in zip(ends, work, strict=True) if item.wants_logits]
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
        lengths = [item.sequence.computed + item.count for item in work]
        together = self._decodes_together(work, lengths)
        decodes = self._decodes(tables[:together], lengths[:together]) if together else None
        spans = [
            Span(int(ends[index]) - work[index].count, int(ends[index]), self._place(tables[index], length))
            for index, length in enumerate(lengths)
            if index >= together
        ]
        return PagedBatch(self._storage, self._size, self._to_device(slots), decodes, spans)

    def _decodes_together(self, work: Sequence[Work], lengths: list[int]) -> int:
        """Number of single tokens at the front to attend in one call; 0 if most of it would be padding."""
        count = next((index for index, item in enumerate(work) if item.count > 1), len(work))
        if count < 2 or max(lengths[:count]) * count > 2 * sum(lengths[:count]):  # noqa: PLR2004 - "most"
            return 0
        return count

    def _decodes(self, tables: list[Ints], lengths: list[int]) -> Decodes:
        width = max(len(table) for table in tables)
        padded = np.zeros((len(tables), width), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return Decodes(
            len(tables), self._to_device(padded.ravel()), self._to_device(np.array(lengths, dtype=np.int64))
        )

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
