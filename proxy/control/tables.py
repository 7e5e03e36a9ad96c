"""Prompt tables, registered here and on every engine that holds tables, or nowhere."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from engine_adapter import Capability, EngineError, EngineRejected, EngineUnavailable, PromptTable
from engine_adapter.off_loop import TABLE_BYTES_PER_MS, off_loop
from proxy.errors import BadRequest, Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.state_dir.files import TableFiles
from proxy.prompt import PromptTables
from proxy.prompt.registered_tables import read_table


class TableAnswer(msgspec.Struct, kw_only=True):
    """A p-tuning table without its values. `extra_id` is the uint64 beside each of its fake token ids."""

    table_id: str
    extra_id: int
    rows: int
    hidden: int
    bytes: int


class SharedTables:
    """The registry's tables, kept the same on all engines."""

    def __init__(self, fleet: Fleet, tables: PromptTables, files: TableFiles | None = None) -> None:
        """`files`: where tables are kept over a restart, if anywhere."""
        self._fleet = fleet
        self._tables = tables
        self._files = files

    def described(self) -> list[TableAnswer]:
        """All tables."""
        return [describe_table(table) for table in self._tables.list()]

    async def put(
        self, data: bytes, *, table_id: str | None = None, extra_id: int | None = None
    ) -> TableAnswer:
        """Registers a table and gives it to every connected engine that holds tables.

        Raises:
            BadRequest, PromptTableError: bytes or ids that cannot be used, or that an engine refuses.
            Conflict: an id stands for other content.
            EngineUnavailable: an engine went away in between; nothing is registered.
        """
        read = partial(read_table, data, table_id, extra_id)
        ready = await off_loop(read, ms=len(data) / TABLE_BYTES_PER_MS)
        before = {table.table_id for table in self._tables.list()}
        table = self._tables.add(ready)
        try:
            for engine in self._holders():
                await _give(engine, table)
        except (EngineError, BadRequest, Conflict):
            if table.table_id not in before:
                await self.delete(table.table_id)
            raise
        if self._files is not None:
            await asyncio.to_thread(self._files.put, table)
        return describe_table(table)

    async def delete(self, table_id: str) -> None:
        """Forgets a table here and on the engines; raises NotFound."""
        table = self._tables.get(table_id)
        self._tables.delete(table_id)
        if self._files is not None:
            await asyncio.to_thread(self._files.delete, table)
        for engine in self._holders():
            try:
                await engine.adapter.delete_prompt_table(table_id)
            except EngineUnavailable as error:
                # The monitor checks it at once. If it restarted, its tables are gone anyway.
                engine.suspect(error)

    def _holders(self) -> list[Engine]:
        pools = list(self._fleet.pools.values())
        engines = [engine for pool in pools for engine in pool.engines.values()]
        return [engine for engine in engines if engine.can(Capability.PROMPT_TABLES)]


def describe_table(table: PromptTable) -> TableAnswer:
    """A table as the admin API tells it."""
    return TableAnswer(
        table_id=table.table_id,
        extra_id=table.extra_id,
        rows=table.rows,
        hidden=table.hidden,
        bytes=len(table.data),
    )


async def _give(engine: Engine, table: PromptTable) -> None:
    try:
        await engine.adapter.put_prompt_table(table)
    except EngineRejected as error:
        if error.status == 409:  # noqa: PLR2004 - HTTP
            raise Conflict(f"engine {engine.id!r}: {error}", param=error.param or "table") from error
        if 400 <= error.status < 500:  # noqa: PLR2004 - HTTP
            raise BadRequest(f"engine {engine.id!r}: {error}", param=error.param or "table") from error
        raise
