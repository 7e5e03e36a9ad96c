"""The engines of the settings: they join at start, and follow the settings when these are read again.

added     joins, and is watched
changed   no new requests; those in flight end; then it is connected, or started, with its new settings.
          Engines of one model do so one after the other: the others serve meanwhile
removed   stays until the added ones were tried, also those that wait until another one has left; no new
          requests; those in flight end; then it leaves, unless it is named again with the same settings, or
          an operator has added it with these settings
renamed   a server that takes one kvpin at a time is connected under its new name after its requests under the
          old one; requests for its model wait. Two that swap their names likewise
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from engine_adapter import EngineAdapter, EngineSpec
from proxy.control.engines import Engines
from proxy.control.server_use import ServerUse, until
from proxy.fleet.engine import DrainReason, Engine, EngineState, order_name
from proxy.fleet.fleet import Fleet
from proxy.fleet.monitor import Monitor
from proxy.fleet.process.managed_engine import ManagedEngine
from proxy.runtime.tasks import Supervisor
from proxy.settings import (
    EngineChanges,
    EngineEntry,
    EngineSettings,
    ManagedSettings,
    StartedSettings,
    engine_as_json,
    engine_changes,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Made:
    """An engine of the settings that was made and has not joined yet."""

    entry: EngineEntry
    adapter: EngineAdapter
    process: ManagedEngine | None


@dataclass(slots=True)
class ConfiguredEngines:
    """Starts the engines of the settings and changes them.

    Attributes:
        processes: those that kvpin starts, by id.
        left: called with each engine that has left.
    """

    _fleet: Fleet
    _monitor: Monitor
    _engines: Engines
    _tasks: Supervisor
    _servers: ServerUse
    _make_adapter: Callable[[EngineSpec], EngineAdapter]
    processes: dict[str, ManagedEngine] = field(default_factory=dict)
    left: list[Callable[[Engine], None]] = field(default_factory=list)
    _entries: dict[str, EngineEntry] = field(default_factory=dict)
    _joined: dict[str, Engine] = field(default_factory=dict)  # the last engine of each entry
    _leaving: dict[str, tuple[EngineEntry, Engine]] = field(default_factory=dict)
    _waiting: frozenset[str] = frozenset()

    def entry(self, engine_id: str) -> EngineEntry | None:
        """The settings of an engine that was named last and does not leave; None if there is none."""
        return self._entries.get(engine_id)

    def engine(self, engine_id: str) -> Engine | None:
        """The engine of an entry; None if there is no entry, or the admin API has removed its engine."""
        engine = self._joined.get(engine_id)
        return engine if engine is not None and self._fleet.has(engine) else None

    def follow(self, entries: Iterable[EngineEntry], *, grace_s: float) -> EngineChanges:
        """Changes the engines to these, but for those whose ids others have. What takes time goes on in the
        background.

        Args:
            entries: all engines of the settings.
            grace_s: time that requests of an engine that leaves get to end.

        Raises:
            EngineSpecError: an engine cannot be used. Nothing changed.
        """
        changes = engine_changes(self._entries, entries, self._fleet.engines)
        # With other settings, an engine that the admin API removed joins again. One that it added under
        # this id is replaced.
        changing = [entry for entry in changes.changed if entry.id in self._fleet.engines]
        joining = [*changes.added, *(entry for entry in changes.changed if entry not in changing)]
        # All are made before one joins: an engine that cannot be used must change nothing.
        added = [self._make(entry) for entry in joining]
        changed = [self._make(entry) for entry in changing]
        for made in added:
            self._join(made)
        for made in changed:
            self._entries[made.entry.id] = made.entry
            self._joined[made.entry.id] = self._fleet.engines[made.entry.id]
            if self._must_wait(made):
                turn = self._replace_in_turn(made, grace_s)
                self._tasks.start(f"turn of {made.entry.id} {id(made)}", turn)
            else:
                self._replace(made, grace_s)
        waiting = tuple(entry for entry in changes.waiting if not self._keep(entry))
        # An engine that an operator added may have its id for good.
        self._waiting = frozenset(entry.id for entry in waiting if entry.id in self._leaving)
        to_try = [*(made.entry.id for made in added), *self._waiting]
        for engine_id in changes.removed:
            self._drop(engine_id, to_try, grace_s)
        return replace(changes, waiting=waiting)

    def _drop(self, engine_id: str, to_try: list[str], grace_s: float) -> None:
        """The settings no longer name an engine: it leaves, unless an operator has ordered it as it is."""
        old, entry = self.engine(engine_id), self._entries.pop(engine_id)
        del self._joined[engine_id]
        if old is None or _is_as_ordered(entry, self._fleet.book.added(order_name(old.adapter.spec))):
            return
        self._leaving[engine_id] = entry, old
        self._tasks.start(_leaving_task(old), self._leave(old, to_try, grace_s))

    def _keep(self, entry: EngineEntry) -> bool:
        """Keeps an engine that leaves, if it is named again with the same settings. Whether it is so."""
        before, engine = self._leaving.get(entry.id, (None, None))
        if engine is None or before != entry or not self._fleet.has(engine):
            return False
        self._tasks.cancel(_leaving_task(engine))
        del self._leaving[entry.id]
        self._entries[entry.id], self._joined[entry.id] = entry, engine
        self._engines.drain(engine, DrainReason.LEAVING, undo=True)
        return True

    def _make(self, entry: EngineEntry) -> _Made:
        if isinstance(entry, ManagedSettings):
            process = ManagedEngine(entry)
            return _Made(entry, self._make_adapter(process.spec), process)
        return _Made(entry, self._make_adapter(entry.spec()), None)

    def _join(self, made: _Made) -> None:
        self._entries[made.entry.id] = made.entry
        engine = self._joined[made.entry.id] = self._fleet.add(made.adapter)
        self._servers.begin(engine, lambda: self._connect(engine, made))

    def _connect(self, engine: Engine, made: _Made) -> None:
        engine.has_supervisor = isinstance(made.entry, StartedSettings)
        if made.process is not None:
            engine.process = self.processes[engine.id] = made.process
            self._tasks.start(f"process {engine.id}", made.process.run())
        self._monitor.watch(engine)

    def _must_wait(self, made: _Made) -> bool:
        """True if another engine of its model is being replaced, or is one of kvpin's own and not ready."""
        engine = self.engine(made.entry.id)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        away = [self._fleet.engines[name] for name in pool.away] if pool is not None else []
        return any(
            (each.state is EngineState.CONNECTING and not self._servers.is_held(each))
            or each.process is not None
            for each in away
        )

    async def _replace_in_turn(self, made: _Made, grace_s: float) -> None:
        engine_id = made.entry.id
        log.info(
            "engine keeps its old settings until the others of its model are back: they serve meanwhile",
            engine=engine_id,
        )
        await until(
            lambda: self._entries.get(engine_id) is not made.entry or not self._must_wait(made), math.inf
        )
        is_wanted = self._entries.get(engine_id) is made.entry
        if is_wanted and self.engine(engine_id) is not None:
            self._replace(made, grace_s)
        elif is_wanted and engine_id not in self._fleet.engines:  # the old one was removed
            self._join(made)
        else:  # the settings have changed again, or another engine has the id
            await made.adapter.aclose()

    def _replace(self, made: _Made, grace_s: float) -> None:
        old, process = self._joined[made.entry.id], self.processes.pop(made.entry.id, None)
        self._monitor.forget(old)
        new = self._joined[old.id] = self._fleet.replace(old, made.adapter)
        self._servers.leaves(old)

        async def follow_on() -> None:
            await until(lambda: not old.leases, grace_s)
            try:
                await self._servers.close(old)
            finally:
                if process is not None:
                    await process.stop()
                if self.engine(new.id) is new:
                    self._servers.begin(new, lambda: self._connect(new, made))

        self._tasks.start(f"replace {old.id} {id(new)}", follow_on())

    async def _leave(self, engine: Engine, to_try: list[str], grace_s: float) -> None:
        await until(lambda: not any(map(self._is_untried, to_try)), grace_s)
        self._engines.drain(engine, DrainReason.LEAVING, undo=False)
        await until(lambda: not engine.leases, grace_s)
        if (leaving := self._leaving.get(engine.id)) is not None and leaving[1] is engine:
            del self._leaving[engine.id]  # not that of a namesake
        process = self.processes.pop(engine.id, None) if engine.process is not None else None
        try:
            await self._engines.remove(engine)
        finally:
            if process is not None:
                await process.stop()
            if engine.info is not None:  # else it served nothing, as a server before it tells its parts
                log.info("engine has left: nothing names it any more", engine=engine.id)
            for listener in self.left:
                listener(engine)

    def _is_untried(self, engine_id: str) -> bool:
        engine = self._fleet.engines.get(engine_id)
        if engine_id in self._waiting:
            return True
        if engine is None or self._servers.is_held(engine):
            return False
        return engine.state is EngineState.CONNECTING


def _is_as_ordered(entry: EngineEntry, added: bytes) -> bool:
    """True if an operator has added the engine with these settings, under any id."""
    if not added or not isinstance(entry, EngineSettings):
        return False
    ordered, named = (msgspec.json.decode(each) | {"id": ""} for each in (added, engine_as_json(entry)))
    return bool(ordered == named)


def _leaving_task(engine: Engine) -> str:
    return f"leave {engine.id} {id(engine)}"
