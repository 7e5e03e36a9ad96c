"""Prompt tables: registered here and on every engine that holds tables, or nowhere."""

from __future__ import annotations

from typing import Any

from engine_adapter import Capability, EngineError, EngineRejected, EngineUnavailable, PromptTable
from proxy.control.context import Control
from proxy.errors import BadRequest, Conflict
from proxy.fleet.engine import Engine


async def put_table(
    control: Control, data: bytes, *, table_id: str | None = None, extra_id: int | None = None
) -> PromptTable:
    """Registers a table and gives it to every connected engine that holds tables.

    Raises:
        BadRequest, PromptTableError: bytes or ids that no engine can take, or that one refuses.
        Conflict: an id stands for other content.
        EngineUnavailable: an engine went away in between; nothing is registered.
    """
    before = {table.table_id for table in control.tables.list()}
    table = control.tables.put(data, table_id=table_id, extra_id=extra_id)
    try:
        for engine in _holders(control):
            await _give(engine, table)
    except (EngineError, BadRequest, Conflict):
        if table.table_id not in before:
            control.tables.delete(table.table_id)
            await _take_from_all(control, table.table_id)
        raise
    return table


async def delete_table(control: Control, table_id: str) -> None:
    """Forgets a table here and on the engines; raises NotFound."""
    control.tables.delete(table_id)
    await _take_from_all(control, table_id)


def describe_table(table: PromptTable) -> dict[str, Any]:
    """A table without its values."""
    return {
        "table_id": table.table_id,
        "extra_id": table.extra_id,
        "rows": table.rows,
        "hidden": table.hidden,
        "bytes": len(table.data),
    }


def _holders(control: Control) -> list[Engine]:
    pools = list(control.fleet.pools.values())
    engines = [engine for pool in pools for engine in pool.engines.values()]
    return [engine for engine in engines if engine.can(Capability.PROMPT_TABLES)]


async def _give(engine: Engine, table: PromptTable) -> None:
    try:
        await engine.adapter.put_prompt_table(table)
    except EngineRejected as error:
        if error.status == 409:  # noqa: PLR2004 - HTTP
            raise Conflict(f"engine {engine.id!r}: {error}", param=error.param or "table") from error
        if 400 <= error.status < 500:  # noqa: PLR2004 - HTTP
            raise BadRequest(f"engine {engine.id!r}: {error}", param=error.param or "table") from error
        raise


async def _take_from_all(control: Control, table_id: str) -> None:
    for engine in _holders(control):
        try:
            await engine.adapter.delete_prompt_table(table_id)
        except EngineUnavailable as error:
            # It is checked at once; one that restarted has lost its tables with everything else.
            engine.suspect(error)
