"""Prompt tables on disk: `TABLE.EXTRA_ID.safetensors`, the table's own bytes."""

from __future__ import annotations

from pathlib import Path

import structlog

from engine_adapter import PromptTable, PromptTableError
from proxy.errors import ProxyError
from proxy.fleet.state_dir.private_files import make_directory, read, write
from proxy.prompt import PromptTables

log = structlog.get_logger(__name__)

_SUFFIX = ".safetensors"


class TableFiles:
    """The files of the registered tables. Its methods block. A failure is logged: tables work without it."""

    def __init__(self, directory: Path) -> None:
        """Raises SettingsError if the directory cannot be written."""
        make_directory(directory)
        self._directory = directory

    def load(self, tables: PromptTables) -> None:
        """Registers the tables, oldest first."""
        paths = [(path.lstat().st_mtime_ns, path) for path in self._directory.glob(f"*{_SUFFIX}")]
        for _, path in sorted(paths):
            name, _, extra_id = path.name.removesuffix(_SUFFIX).rpartition(".")
            try:
                tables.put(read(path), table_id=name, extra_id=int(extra_id, 16))
            except (ProxyError, PromptTableError, OSError, ValueError) as error:
                log.warning("a saved prompt table is not used", file=str(path), error=str(error))

    def put(self, table: PromptTable) -> None:
        """Writes a table's file."""
        try:
            write(self._path(table), table.data)
        except OSError as error:
            log.warning(
                "a prompt table is not saved: a restart of kvpin loses it",
                table=table.table_id,
                error=error.strerror,
            )

    def delete(self, table: PromptTable) -> None:
        """Removes a table's file, if there is one."""
        try:
            self._path(table).unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "the file of a prompt table is not removed", table=table.table_id, error=error.strerror
            )

    def _path(self, table: PromptTable) -> Path:
        return self._directory / f"{table.table_id}.{table.extra_id:016x}{_SUFFIX}"
