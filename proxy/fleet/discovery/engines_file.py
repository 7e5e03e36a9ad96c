"""The engines of a file, read again when it changes.

kvpin looks at the file every second. It notices a Kubernetes ConfigMap, too, which changes as a link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from proxy.fleet.discovery.found import FoundEngine, FoundEngines, SourceError
from proxy.settings import EngineSettings, SettingsError, read_engines

PAUSE_S = 1.0

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FileFinder:
    """Watches a file."""

    path: Path

    async def found(self) -> AsyncIterator[FoundEngines]:
        """The engines of the file, now and whenever it has changed."""
        seen: _Stamp | None = None
        while True:
            # In a thread: the file may be on a network's disk.
            stamp, engines = await asyncio.to_thread(self._read, seen)
            if engines is not None:
                yield tuple(FoundEngine(entry) for entry in engines)
            seen = stamp
            await asyncio.sleep(PAUSE_S)

    def _read(self, seen: _Stamp | None) -> tuple[_Stamp, tuple[EngineSettings, ...] | None]:
        """A stamp that changes with the file, and the file's engines if it has changed."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            return stamp, read_engines(self.path) if stamp != seen else None
        except OSError as error:
            raise SourceError(f"file {str(self.path)!r} cannot be read: {error.strerror}") from error
        except SettingsError as error:
            raise SourceError(str(error)) from error
