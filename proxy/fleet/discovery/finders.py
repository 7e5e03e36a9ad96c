"""The finder of each source that the settings name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.fleet.discovery.found import Finder, FoundEngine, FoundEngines, SourceError
from proxy.fleet.discovery.kubernetes import KubernetesFinder
from proxy.settings import (
    DiscoverySettings,
    EngineSettings,
    KubernetesSource,
    Settings,
    SettingsError,
    read_engines,
)

PAUSE_S = 1.0

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FileFinder:
    """Looks at a file every second. It notices a Kubernetes ConfigMap, too, which changes as a link."""

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


def finders_of(settings: Settings) -> Iterator[tuple[str, Finder]]:
    """Source names and their finders. Raises SettingsError if a package is missing for one."""
    if settings.engines_file is not None:
        yield str(settings.engines_file), FileFinder(settings.engines_file)
    for entry in settings.discovery:
        yield entry.source, _finder(entry)


def _finder(entry: DiscoverySettings) -> Finder:
    source = entry.place
    if isinstance(source, KubernetesSource):
        return KubernetesFinder(entry, source)
    try:
        from proxy.fleet.discovery.dns import DnsFinder  # noqa: PLC0415 - it needs a package of an extra
    except ImportError as error:
        raise SettingsError(
            f"discovery {entry.source!r} needs dnspython: pip install 'kvpin[dns]'"
        ) from error
    return DnsFinder(entry, source)
