"""What operators order about engines. All kvpins of the group carry it out, now and after a restart.

add      joins at every kvpin; what settings or sources name, and was removed, comes back as they name it
remove   leaves at every kvpin, and stays out until it is added again, or until its source no longer names it
drain    gets no new requests from any kvpin
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from datetime import UTC, datetime

import msgspec
import structlog
from pydantic import ValidationError

from engine_adapter import EngineSpecError
from proxy.control.discovered import DiscoveredEngines
from proxy.control.engines import Engines
from proxy.core.engine_book import EngineMark
from proxy.errors import Conflict
from proxy.fleet.engine import DrainReason, Engine, order_name, place_of
from proxy.fleet.fleet import Fleet
from proxy.runtime.tasks import Supervisor
from proxy.settings import EngineSettings, engine_as_json

log = structlog.get_logger(__name__)

# A removed engine that nothing names is listed for this long.
_RECENT_S = 86_400.0


class RemovedEngine(msgspec.Struct, kw_only=True):
    """An engine that an operator has removed.

    `engine` is its address, what tells it from others there, and the machine, where only that one reaches the
    address. `named`: settings or sources name it, so it would be used. `undo` is the command that brings it
    back.
    """

    engine: str
    removed: datetime
    named: bool
    undo: str


@dataclass(frozen=True, slots=True)
class EngineOrders:
    """Takes operators' orders about engines, and carries out those that other kvpins were given."""

    _fleet: Fleet
    _engines: Engines
    _discovered: DiscoveredEngines
    _tasks: Supervisor
    _joined: dict[str, bytes] = field(default_factory=dict)  # name → the order by which the engine joined

    def add(self, settings: EngineSettings) -> Engine:
        """Adds an engine, and starts watching it.

        Raises:
            Conflict: an engine of that id or at that address exists.
            EngineSpecError: the description cannot be used.
        """
        book, spec = self._fleet.book, settings.spec()
        name = order_name(spec)
        if book.is_removed(name) and name in self._discovered.named():
            book.readmit(name, now=time.time())
            if (known := self._find(name)) is not None:
                return known
            raise Conflict(
                f"the settings name {spec.server}, under an id that is taken: it joins when that is free",
                param="url",
            )
        if not spec.id:
            settings = settings.model_copy(update={"id": self._engines.free_id(spec.kind)})
            spec = with_changes(spec, id=settings.id)
        engine = self._engines.add(spec)
        self._joined[name] = engine_as_json(settings)
        book.add(name, self._joined[name], now=time.time())
        return engine

    async def remove(self, engine: Engine) -> str:
        """Drops an engine; its requests in flight go on to their end. Returns the command that brings it
        back. Raises Conflict if kvpin runs it."""
        if _is_own(engine):
            raise Conflict(
                f"kvpin runs {engine.id!r} itself: drain it, or take it out of the settings",
                param="engine_id",
            )
        name = order_name(engine.adapter.spec)
        # Before its adapter is closed, which takes long: an order to add it again may come meanwhile.
        self._fleet.book.remove(name, now=time.time())
        await self._engines.remove(engine)
        return _undo(self._discovered.named().get(name))

    def drain(self, engine: Engine, *, undo: bool) -> Engine:
        """Drains an engine, or undoes that."""
        self._fleet.book.drain(order_name(engine.adapter.spec), drained=not undo, now=time.time())
        return self._engines.drain(engine, DrainReason.ORDERED, undo=undo)

    def removed(self) -> list[RemovedEngine]:
        """The engines that operators have removed, the last first: those that settings or sources name, and
        those of the last day."""
        named, since = self._discovered.named(), time.time() - _RECENT_S
        return [
            RemovedEngine(
                engine=place_of(mark.engine),
                removed=datetime.fromtimestamp(mark.at, UTC).replace(microsecond=0),
                named=mark.engine in named,
                undo=_undo(named.get(mark.engine)),
            )
            for mark in self._fleet.book.removals()
            if mark.engine in named or mark.at >= since
        ]

    def start(self) -> None:
        """Adds the engines that were added before kvpin was started, and follows all later orders."""
        self._join(self._fleet.book.marks())
        self._fleet.book.listeners.append(self._follow)
        self._discovered.left.append(lambda engine: self._admit([order_name(engine.adapter.spec)]))

    def _follow(self, changed: Collection[str]) -> None:
        leaving = list[Engine]()
        for engine in self._fleet.engines.values():
            name = order_name(engine.adapter.spec)
            if name not in changed:
                continue
            if self._must_leave(name):
                leaving += [] if _is_own(engine) else [engine]
            else:
                undo = not self._fleet.is_drained(engine)
                self._engines.drain(engine, DrainReason.ORDERED, undo=undo)
        if leaving:
            # The name of a task that runs must not be given again: that would cancel it.
            self._tasks.start(f"remove engines {id(leaving)}", self._change(leaving, changed))
        else:
            self._admit(changed)

    def _must_leave(self, name: str) -> bool:
        """True if the engine was removed, or was added with other settings than it has here."""
        book = self._fleet.book
        added = book.added(name)
        return book.is_removed(name) or (bool(added) and self._joined.get(name, added) != added)

    async def _change(self, leaving: Iterable[Engine], changed: Collection[str]) -> None:
        for engine in leaving:
            if not self._must_leave(order_name(engine.adapter.spec)):  # it was added again meanwhile
                continue
            log.info("engine leaves: an operator has removed or replaced it", engine=engine.id)
            await self._engines.remove(engine)
        self._admit(changed)  # now that their ids are free

    def _admit(self, changed: Collection[str]) -> None:
        self._discovered.settle()
        self._join(mark for mark in self._fleet.book.marks() if mark.engine in changed)

    def _join(self, marks: Iterable[EngineMark]) -> None:
        """Adds the engines that operators have added and that are not here."""
        for mark in marks:
            if not mark.added or self._find(mark.engine) is not None:
                continue
            try:
                spec = EngineSettings.model_validate_json(mark.added).spec()
                if order_name(spec) == mark.engine:  # else it is of another machine
                    self._engines.add(spec)
                    self._joined[mark.engine] = mark.added
            except (ValidationError, EngineSpecError, Conflict) as error:
                # The text of a ValidationError may hold keys.
                why = "its settings cannot be read" if isinstance(error, ValidationError) else str(error)
                log.warning(
                    "an engine that an operator added at another kvpin, or before the restart, cannot be "
                    "used here: add it again, with settings that fit",
                    engine=mark.engine,
                    error=why,
                )

    def _find(self, name: str) -> Engine | None:
        engines = self._fleet.engines.values()
        return next((engine for engine in engines if order_name(engine.adapter.spec) == name), None)


def _undo(entry: EngineSettings | None) -> str:
    """The command that brings a removed engine back: what tells it from others, without secrets."""
    if entry is None:
        return "kvpin engines add KIND=URL"
    spec = entry.spec()
    more = {"model": spec.model, "dp_rank": spec.options.rank, "headers": "…" if spec.headers else None}
    parts = (f",{name}={value}" for name, value in more.items() if value is not None)
    return f"kvpin engines add {spec.kind}={spec.url}{''.join(parts)}"


def _is_own(engine: Engine) -> bool:
    """True if kvpin, or the supervisor of its workers, runs the engine's process."""
    return engine.process is not None or engine.has_supervisor
