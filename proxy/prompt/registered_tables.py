"""Keeps the registered p-tuning tables: what a table id in a request means."""

from __future__ import annotations

import re
from typing import NamedTuple

from engine_adapter.prompt.extra_ids import (
    UINT64_MAX,
    TableRef,
    parse_embeddings,
    prompt_table_extra_id,
    resolve_extra_ids,
)
from engine_adapter.types import ExtraIds, PromptTable, TokenIds
from proxy.errors import BadRequest, BodyTooLarge, Conflict, NotFound
from proxy.prompt.render import CompletionInput

_TABLE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class ReadTable(NamedTuple):
    """A table, and a digest of its content."""

    table: PromptTable
    content: bytes


class RegisteredTables:
    """The tables of this proxy. Every engine that can hold tables gets them.

    An extra id keeps its content for the life of the process, even after its table is deleted: KV computed
    from that content may still be cached under the id.

    Attributes:
        max_bytes: bounds all tables together.
        refs: every table's identity, by extra id.
    """

    def __init__(self, *, max_bytes: int = 512 * 2**20) -> None:
        self.max_bytes = max_bytes
        self._by_id: dict[str, PromptTable] = {}
        self.refs: dict[int, TableRef] = {}
        self._content_of: dict[int, bytes] = {}

    def put(self, data: bytes, *, table_id: str | None = None, extra_id: int | None = None) -> PromptTable:
        """Registers a table. Registering the same table again changes nothing.

        Args:
            data: safetensors bytes, one 2-d float tensor [rows, hidden].
            table_id: what requests will name; `pt-<16 hex>` of its content by default.
            extra_id: its identity, from 1 to 2**64-1; derived from its content by default.

        Raises:
            PromptTableError: the bytes are not such a tensor.
            BadRequest: an id cannot be used.
            Conflict: the table id or the extra id already has other content.
            BodyTooLarge: there is no room left for it.
        """
        return self.add(read_table(data, table_id, extra_id))

    def add(self, read: ReadTable) -> PromptTable:
        """Registers what `read_table` returned, see `put`."""
        table, content = read
        known = self._known(table, content)
        if known is not None:
            return known
        if sum(len(each.data) for each in (*self._by_id.values(), table)) > self.max_bytes:
            raise BodyTooLarge(
                f"prompt tables would take more than {self.max_bytes} bytes; delete some first", param="table"
            )
        self._by_id[table.table_id] = table
        self._content_of[table.extra_id] = content
        self.refs[table.extra_id] = TableRef(table.extra_id, table.rows)
        return table

    def get(self, table_id: str) -> PromptTable:
        """The table of that id; raises NotFound."""
        table = self._by_id.get(table_id)
        if table is None:
            raise NotFound(f"there is no prompt table {table_id!r}", param="table_id")
        return table

    def delete(self, table_id: str) -> None:
        """Forgets a table; raises NotFound."""
        table = self.get(table_id)
        del self._by_id[table_id]
        if all(other.extra_id != table.extra_id for other in self._by_id.values()):
            del self.refs[table.extra_id]

    def list(self) -> list[PromptTable]:
        """Every table, oldest first."""
        return [*self._by_id.values()]

    def ref(self, table_id: str) -> TableRef | None:
        """The part of a table that identity needs; None for a table that is not registered."""
        table = self._by_id.get(table_id)
        return None if table is None else self.refs[table.extra_id]

    def extra_ids(
        self, token_ids: TokenIds[int], source: CompletionInput, vocab_size: int
    ) -> ExtraIds[int] | None:
        """One extra id per token of a completion's prompt, None when all of it is text. Raises BadRequest:
        the request names a table that is not registered; PromptTableError, naming the index of the first id
        that breaks a rule."""
        table = self.ref(source.table) if source.table is not None else None
        if source.table is not None and table is None:
            raise BadRequest(f"there is no prompt table {source.table!r}", param="prompt_table")
        resolved = resolve_extra_ids(
            token_ids, vocab_size=vocab_size, explicit=source.explicit, table=table, registered=self.refs
        )
        return resolved.extra_ids

    def _known(self, table: PromptTable, content: bytes) -> PromptTable | None:
        """The table if it is registered already. Raises Conflict where an id has other content."""
        if self._content_of.get(table.extra_id, content) != content:
            raise Conflict(f"extra id {table.extra_id} already has other content", param="extra_id")
        held = self._by_id.get(table.table_id)
        if held is None:
            return None
        if self._content_of[held.extra_id] != content:
            raise Conflict(f"prompt table {table.table_id!r} already has other content", param="table_id")
        if held.extra_id != table.extra_id:
            raise Conflict(f"prompt table {table.table_id!r} has extra id {held.extra_id}", param="extra_id")
        return held


def read_table(data: bytes, table_id: str | None, extra_id: int | None) -> ReadTable:
    """A table that is not registered yet, see `RegisteredTables.put`. Takes long: 128 MiB are allowed."""
    if table_id is not None and not _TABLE_ID.fullmatch(table_id):
        raise BadRequest("table_id must be 1 to 128 letters, digits, '_', '.', ':' or '-'", param="table_id")
    if extra_id is not None and not 0 < extra_id <= UINT64_MAX:
        raise BadRequest("extra_id must be an integer from 1 to 2**64-1", param="extra_id")
    embeddings = parse_embeddings(data, param="table")
    derived = prompt_table_extra_id(embeddings)
    table = PromptTable(
        table_id=table_id if table_id is not None else f"pt-{derived:016x}",
        extra_id=extra_id if extra_id is not None else derived,
        rows=embeddings.rows,
        hidden=embeddings.hidden,
        data=data,
    )
    return ReadTable(table, embeddings.content())
