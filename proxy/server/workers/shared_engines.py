"""The engines that kvpin starts, where there are several workers: each is started once, by the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from proxy.fleet.process.managed_engine import ManagedEngine, ProcessState
from proxy.runtime.tasks import Supervisor
from proxy.server.checks import managed_engines
from proxy.server.workers.orders import write_engines
from proxy.settings import EngineEntry, ManagedSettings, Settings, engine_changes

_POLL_S = 0.05
# The workers look every 2 s whether an engine is back (`MAX_BACKOFF_S` in `fleet/monitor.py`).
_CONNECT_S = 3.0


class SharedEngines:
    """Runs them, and writes down where they are for the workers."""

    def __init__(self, directory: Path, tasks: Supervisor, tell: Callable[[], None]) -> None:
        """`tell` has the workers read what was written."""
        self._directory, self._tasks, self._tell = directory, tasks, tell
        self._engines: dict[str, ManagedEngine] = {}
        self._entries: dict[str, EngineEntry] = {}
        self._turn = asyncio.Lock()

    def follow(self, settings: Settings) -> None:
        """Changes the engines to those of the settings, and tells the workers. One that leaves, or changes,
        goes on for `graceful_shutdown_s`, in which the workers' requests on it end. Changed ones are replaced
        one after the other: the others serve meanwhile. Raises EngineSpecError if an engine cannot be used;
        then nothing changed."""
        changes = engine_changes(self._entries, managed_engines(settings))
        new = {
            entry.id: (entry, ManagedEngine(entry))
            for entry in (*changes.added, *changes.changed)
            if isinstance(entry, ManagedSettings)
        }
        grace_s = settings.graceful_shutdown_s
        for name in changes.removed:
            del self._entries[name]
            old = self._engines.pop(name)
            self._tasks.start(f"end of engine {name} {id(old)}", _end(old, grace_s))
        for name, (entry, engine) in new.items():
            self._entries[name] = entry
            if name in self._engines:
                work = self._replace(entry, engine, grace_s)
                self._tasks.start(f"turn of engine {name} {id(engine)}", work)
            else:
                self._engines[name] = engine
                self._run(engine)
        self._publish()

    async def aclose(self) -> None:
        """Stops them."""
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))

    async def _replace(self, entry: EngineEntry, new: ManagedEngine, grace_s: float) -> None:
        """Puts an engine in the place of the one of its id, and waits until it is healthy. A machine may not
        have room for both."""

        def is_wanted() -> bool:
            return self._entries.get(entry.id) is entry

        async with self._turn:
            if not is_wanted():
                return
            old, self._engines[entry.id] = self._engines[entry.id], new
            self._publish()
            await _end(old, grace_s)
            if self._engines.get(entry.id) is not new:  # it was removed meanwhile
                return
            self._run(new)
            while is_wanted() and new.status.state is not ProcessState.READY:  # noqa: ASYNC110 - a rare wait
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(_CONNECT_S)

    def _run(self, engine: ManagedEngine) -> None:
        self._tasks.start(f"engine {engine.id} {id(engine)}", engine.run())

    def _publish(self) -> None:
        write_engines(self._directory, [engine.spec for engine in self._engines.values()])
        self._tell()


async def _end(engine: ManagedEngine, grace_s: float) -> None:
    """Stops an engine after the time in which the workers' requests on it end."""
    await asyncio.sleep(grace_s)
    await engine.stop()
