"""The engines that kvpin starts, where there are several workers: each is started once, by the supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

from proxy.checks import managed_engines
from proxy.process.managed import ManagedEngine
from proxy.settings import EngineEntry, ManagedSettings, Settings, engine_changes
from proxy.tasks import Supervisor
from proxy.workers.orders import write_engines


class SharedEngines:
    """Runs them, and writes down where they are for the workers."""

    def __init__(self, directory: Path, tasks: Supervisor) -> None:
        self._directory, self._tasks = directory, tasks
        self._engines: dict[str, ManagedEngine] = {}
        self._entries: dict[str, EngineEntry] = {}

    def follow(self, settings: Settings) -> None:
        """Changes the engines to those of the settings. One that leaves, or changes, goes on for
        `graceful_shutdown_s`, in which the workers' requests on it end.

        Raises:
            EngineSpecError: an engine cannot be used. Nothing changed.
        """
        changes = engine_changes(self._entries, managed_engines(settings))
        new = {
            entry.id: (entry, ManagedEngine(entry))
            for entry in (*changes.added, *changes.changed)
            if isinstance(entry, ManagedSettings)
        }
        for name in (*changes.removed, *new):
            old = self._engines.pop(name, None)
            self._entries.pop(name, None)
            successor = new.get(name)
            if successor is not None:
                self._entries[name], self._engines[name] = successor
            work = _follow_on(old, successor[1] if successor else None, settings.graceful_shutdown_s)
            self._tasks.start(f"engine {name} {id(old)}", work)
        write_engines(self._directory, [engine.spec for engine in self._engines.values()])

    async def aclose(self) -> None:
        """Stops them."""
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))


async def _follow_on(old: ManagedEngine | None, new: ManagedEngine | None, grace_s: float) -> None:
    """Runs an engine, after the one in whose place it comes. A machine may not have room for both."""
    if old is not None:
        await asyncio.sleep(grace_s)
        await old.stop()
    if new is not None:
        await new.run()
