"""P-tuning tables and the embeddings behind the fake ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt.extra_ids import (
    UINT64_MAX,
    Embeddings,
    TableRef,
    parse_embeddings,
    prompt_table_extra_id,
    resolve_extra_ids,
)
from engine_adapter.torch_engine.web import ApiError
from engine_adapter.types import ExtraIds, TokenIds

MAX_TOTAL_BYTES = 1 << 30
_MAX_ID_LENGTH = 256
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def embedding_tensor(embeddings: Embeddings, *, hidden_size: int, param: str) -> torch.Tensor:
    """`embeddings` as a tensor [rows, hidden] on the CPU, in their own type.

    Raises:
        PromptTableError: the width is not the model's, or a value is NaN or infinite.
    """
    if embeddings.hidden != hidden_size:
        raise PromptTableError(
            f"{param} has {embeddings.hidden} columns; the model's hidden size is {hidden_size}", param=param
        )
    # A copy, as torch warns about memory it must not write to.
    flat = torch.frombuffer(bytearray(embeddings.values), dtype=_DTYPES[embeddings.dtype])
    tensor = flat.reshape(embeddings.rows, embeddings.hidden)
    if not bool(torch.isfinite(tensor).all()):
        raise PromptTableError(f"{param} holds NaN or infinite values", param=param)
    return tensor


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table in the engine's memory."""

    table_id: str
    extra_id: int
    rows: int
    content: bytes = field(repr=False)  # digest of type, shape and values
    tensor: torch.Tensor = field(repr=False)

    @property
    def ref(self) -> TableRef:
        """Its extra id and its size."""
        return TableRef(self.extra_id, self.rows)


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A tokenised prompt, its extra ids (None for text alone) and the rows behind each of them."""

    token_ids: TokenIds[int]
    extra_ids: ExtraIds[int] | None
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False)


class PromptTables:
    """The tables of one engine. Used from the event loop only.

    An extra id stands for one content as long as the process lives, even after its table is deleted: KV of
    that content may still be cached under it.
    """

    def __init__(self, *, vocab_size: int, hidden_size: int, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_total_bytes = max_total_bytes
        self._by_id: dict[str, StoredTable] = {}
        self._content_of: dict[int, bytes] = {}

    def all(self) -> list[StoredTable]:
        """Every table, in the order they came."""
        return list(self._by_id.values())

    def read(self, table_id: str, data: bytes, extra_id: int | None) -> StoredTable:
        """A table that is not stored yet: `data` are safetensors bytes, one tensor [rows, hidden]; without
        `extra_id`, that is derived from the content. Threads may call it. Raises PromptTableError if the
        bytes are no such table."""
        if not 0 < len(table_id) <= _MAX_ID_LENGTH:
            raise ApiError(f"the table id has 1 to {_MAX_ID_LENGTH} characters", param="table_id")
        embeddings = parse_embeddings(data, param="table")
        tensor = embedding_tensor(embeddings, hidden_size=self._hidden_size, param="table")
        if extra_id is None:
            extra_id = prompt_table_extra_id(embeddings)
        return StoredTable(table_id, extra_id, embeddings.rows, embeddings.content(), tensor)

    def keep(self, table: StoredTable) -> tuple[StoredTable, bool]:
        """Stores what `read` returned; returns it and whether it is new. The same table again changes
        nothing. Raises ApiError: 409 for an id or extra id that stands for other content, 413 beyond the
        limit."""
        table_id, extra_id = table.table_id, table.extra_id
        if self._is_known(table):
            return self._by_id[table_id], False
        total = sum(other.tensor.nbytes for other in self._by_id.values())
        if total + table.tensor.nbytes > self._max_total_bytes:
            raise ApiError(
                f"prompt tables would take more than {self._max_total_bytes} bytes; delete some first",
                status=413,
            )
        self._by_id[table_id] = table
        self._content_of[extra_id] = table.content
        return table, True

    def delete(self, table_id: str) -> bool:
        """Deletes a table; False when no table has that id."""
        return self._by_id.pop(table_id, None) is not None

    def resolve(
        self, token_ids: TokenIds[int], *, explicit: list[int] | None, table_id: str | None
    ) -> EnginePrompt:
        """A prompt of token ids with its extra ids and rows; see `resolve_extra_ids` for the rules.

        Raises:
            PromptTableError: an id breaks a rule; names the index of the first one.
            ApiError: 400 for an unknown table.
        """
        table = None
        if table_id is not None:
            stored = self._by_id.get(table_id)
            if stored is None:
                raise ApiError(f"there is no prompt table {table_id!r}", param="prompt_table")
            table = stored.ref
        by_extra_id = {stored.extra_id: stored for stored in self._by_id.values()}
        resolved = resolve_extra_ids(
            token_ids,
            vocab_size=self._vocab_size,
            explicit=explicit,
            table=table,
            registered={extra_id: stored.ref for extra_id, stored in by_extra_id.items()},
        )
        tensors = {identity: by_extra_id[ref.extra_id].tensor for identity, ref in resolved.tables.items()}
        return EnginePrompt(token_ids, resolved.extra_ids, tensors)

    def _is_known(self, table: StoredTable) -> bool:
        """True when exactly this table is stored; raises ApiError (409) when it clashes with another."""
        held = self._by_id.get(table.table_id)
        if held is not None and (held.content, held.extra_id) != (table.content, table.extra_id):
            raise ApiError(
                f"prompt table {table.table_id!r} exists with other content or another extra id",
                status=409,
                param="table_id",
            )
        if self._content_of.get(table.extra_id, table.content) != table.content:
            raise ApiError(
                f"extra id {table.extra_id} has stood for other content in this process",
                status=409,
                param="extra_id",
            )
        return held is not None


def parse_extra_id(text: str | None) -> int | None:
    """The `extra_id` of a query string, None without one; raises ApiError (400)."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 0 < (value := int(text[:21])) <= UINT64_MAX:
        raise ApiError("extra_id is an integer from 1 to 2**64-1", param="extra_id")
    return value
