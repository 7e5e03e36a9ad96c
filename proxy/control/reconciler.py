"""Brings the fleet to the engines that should exist (`named_engines.py`): after the settings were read again,
a source has answered, a server has told its ranks or models, an operator has ordered something, or an engine
has left.

named     joins, and is watched. It waits while an engine that leaves, or that an operator added, has its id
changed   no new requests; those in flight end; then it is connected, or started, with its new settings.
          Engines of one model do so one after the other: the others serve meanwhile
unnamed   stays until those were tried that joined in its place, or wait for their ids; no new requests;
          those in flight end; then it leaves, unless it is named again as it was
removed   leaves at once, by an operator's order at any kvpin; its requests in flight go on to their end
drained   gets no new requests, by an operator's order or because its source says that it is not ready
renamed   a server that takes one kvpin at a time, such as a llama-server, is connected under its new name, or
          with its new settings, once the adapter that used it is closed: it saves its slots. Requests for its
          model wait. Two that swap their names likewise

A source that fails keeps its last engines; it is asked again after 1 to 30 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import count

import structlog
from pydantic import ValidationError

from engine_adapter import EngineAdapter, EngineInfo, EngineSpec, EngineSpecError
from proxy.control.engines import RemovedEngine, place_of, undo_of
from proxy.control.named_engines import NamedEngine, Parts, named_engines, order_of
from proxy.control.operations import Operations
from proxy.core.books import MAX_MARKS
from proxy.errors import Conflict
from proxy.fleet.discovery import Finder, FoundEngines, Source, SourceError
from proxy.fleet.engine import DrainReason, Engine, EngineState, order_name
from proxy.fleet.fleet import Fleet
from proxy.fleet.managed_engine import ManagedEngine
from proxy.fleet.monitor import Monitor
from proxy.runtime import Supervisor, until
from proxy.settings import (
    EngineChanges,
    EngineEntry,
    EngineSettings,
    ManagedSettings,
    SettingsError,
    StartedSettings,
    engine_as_json,
)

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
# A removed engine that nothing names is listed for this long.
_RECENT_S = 86_400.0
_Made = tuple[NamedEngine, EngineAdapter, ManagedEngine | None]


@dataclass(eq=False, slots=True)
class _Member:
    """An engine, from when it joins the fleet until its adapter is closed."""

    engine: Engine
    named: NamedEngine
    process: ManagedEngine | None
    is_held: bool = False  # another adapter still uses its server: it is not connected yet
    is_leaving: bool = False  # nothing names it any more
    is_drained: bool = False  # that, and those that joined in its place were tried
    next: _Made | None = None  # its new settings, until it is their turn

    def is_to_be(self, entry: EngineEntry) -> bool:
        """True if it has these settings, or will have them when it is its turn."""
        return entry == self.named.entry or (self.next is not None and entry == self.next[0].entry)

    @property
    def leave_task(self) -> str:
        """The name of the task that lets it leave."""
        return f"leave {self.engine.id} {id(self.engine)}"


@dataclass(slots=True)
class _Plan:
    """What has to be done. Engines that operators have added are made last: other faults come first."""

    joining: dict[str, _Made] = field(default_factory=dict)
    changing: dict[_Member, _Made] = field(default_factory=dict)
    staying: dict[_Member, NamedEngine] = field(default_factory=dict)
    leaving: list[_Member] = field(default_factory=list)
    ordered: list[NamedEngine] = field(default_factory=list)
    waiting: list[NamedEngine] = field(default_factory=list)


@dataclass(slots=True)
class Reconciler:
    """Lets engines join, change, drain and leave. `sources`: where engines are found, by name."""

    _fleet: Fleet
    _monitor: Monitor
    _operations: Operations
    _tasks: Supervisor
    _make_adapter: Callable[[EngineSpec], EngineAdapter]
    sources: dict[str, Source] = field(default_factory=dict)
    _settings: tuple[EngineEntry, ...] = ()
    _grace_s: float = 0.0
    _parts: Parts = field(default_factory=Parts)
    _named: list[NamedEngine] = field(default_factory=list)  # but for those that have not joined
    _members: dict[Engine, _Member] = field(default_factory=dict)
    _waiting: frozenset[str] = frozenset()  # the ids of engines that wait for them
    _unusable: dict[str, object] = field(default_factory=dict)  # orders that cannot be followed, as told
    _is_stopped: bool = False

    def follow(
        self, settings: Iterable[EngineEntry], finders: Iterable[tuple[str, Finder]] = (), *, grace_s: float
    ) -> EngineChanges:
        """Takes over what the settings name, at start or when they are read again. From the start on, what
        operators order is followed, too. Raises EngineSpecError if an engine cannot be used: nothing changed.

        Args:
            settings: the engines of the settings.
            finders: the sources, by name.
            grace_s: time that requests of an engine that leaves get to end.
        """
        wanted, before, sources = dict(finders), self._settings, dict(self.sources)
        gone = {name: self.sources.pop(name) for name in self.sources.keys() - wanted.keys()}
        self._settings = tuple(settings)
        try:
            changes = self._settle()
        except EngineSpecError:
            self._settings = before
            self.sources.clear()
            self.sources.update(sources)  # in their order
            raise
        self._grace_s = grace_s
        for order, entry in self._by_order(self._settings).items():
            if self._fleet.book.is_removed(order):
                log.warning(
                    "an engine of the settings is not used: an operator has removed it",
                    engine=entry.id,
                    undo=undo_of(entry),
                )
        for name in gone:
            self._tasks.cancel(f"find {name}")
        for name, finder in wanted.items():
            source = self.sources.pop(name, None)
            if source is None or source.finder != finder:
                # With other settings, it keeps its engines until it has answered.
                source = Source(name, finder, source.found if source is not None else ())
                self._tasks.keep(f"find {name}", partial(self._ask, source))
            self.sources[name] = source  # in the settings' order
        if self._ordered not in self._fleet.book.listeners:
            self._fleet.book.listeners.append(self._ordered)
        return changes

    async def _ask(self, source: Source) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async for found in source.finder.found():
                    self._take(source, found)
                    backoff_s = FIRST_BACKOFF_S
            except (SourceError, SettingsError, EngineSpecError) as error:
                if source.error != str(error):
                    log.warning(
                        "source of engines failed: the engines it named last stay",
                        source=source.name,
                        engines=len(source.found),
                        error=str(error),
                    )
                source.error = str(error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _take(self, source: Source, found: FoundEngines) -> None:
        """A source has answered. Raises EngineSpecError if its engines cannot be used."""
        before, source.found = source.found, found
        if found != before:
            known = self._by_order(each.entry for each in before)
            try:
                changes = self._settle()
            except EngineSpecError:
                source.found = before
                raise
            log.info(
                "source of engines answered",
                source=source.name,
                engines=len(found),
                added=[entry.id for entry in changes.added],
                removed=list(changes.removed),
                changed=[entry.id for entry in changes.changed],
            )
            for order in known.keys() - self._by_order().keys():
                if self._fleet.book.is_removed(order):  # what comes to its address is another engine
                    self._fleet.book.readmit(order, now=time.time())
        elif source.error is not None:
            log.info("source of engines answers", source=source.name, engines=len(found))
        source.error = None

    def split(self, engine: Engine, info: EngineInfo) -> bool:
        """An engine has connected, and declares the parts of its server. Whether it leaves, because others
        come in its place."""
        member, url = self._members.get(engine), engine.adapter.spec.url
        parts, was_known = tuple(info.models) or info.ranks, url in self._parts
        if member is None or member.is_leaving or member.named.ordered is not None:
            return False  # what an operator added is as the order says
        is_part = member.named.entry is not member.named.whole
        if not (parts or is_part) or not self._parts.learn(url, parts):
            return False
        try:
            changes = self._settle()
        except EngineSpecError as error:
            log.warning(
                "the ranks or models of a server cannot be used by themselves",
                engine=engine.id,
                error=str(error),
            )
            self._parts.pop(url, None)
            return False
        if changes.added:
            log.info(
                "a server has other ranks or models than were known: each is an engine"
                if was_known
                else "a server has several ranks or models: each is an engine",
                parts=list(parts),
                added=[entry.id for entry in changes.added],
                removed=list(changes.removed),
            )
        return member.is_leaving

    # What operators order, here or at another kvpin.

    def add(self, settings: EngineSettings) -> Engine:
        """An operator adds an engine.

        Raises:
            Conflict: an engine of that id or at that address exists.
            EngineSpecError: the description cannot be used.
        """
        book, spec = self._fleet.book, settings.spec()
        order = order_name(spec)
        if book.is_removed(order) and order in self._by_order():
            book.readmit(order, now=time.time())
            self._try_to_settle()
            if (known := self._find(order)) is not None:
                return known
            raise Conflict(
                f"the settings name {spec.server}, under an id that is taken: it joins when that is free",
                param="url",
            )
        if not settings.id:
            free = (name for n in count() if (name := f"{spec.kind}-{n}") not in self._fleet.engines)
            settings = settings.model_copy(update={"id": next(free)})
        named = NamedEngine(settings, order, settings, ordered=settings)
        engine = self._join_at_free_place(named, settings.spec())
        self._named.append(named)
        book.add(order, engine_as_json(settings), now=time.time())
        return engine

    async def remove(self, engine: Engine) -> str:
        """An operator removes an engine; its requests in flight go on to their end. Returns the command that
        brings it back. Raises Conflict if kvpin runs it."""
        if engine.is_own:
            raise Conflict(
                f"kvpin runs {engine.id!r} itself: drain it, or take it out of the settings",
                param="engine_id",
            )
        # Before its adapter is closed, which takes long: an order to add it again may come meanwhile.
        self._fleet.book.remove(engine.order, now=time.time())
        if self._fleet.has(engine):
            self._drop_by_order(engine)
            await self._close(engine)
        return undo_of(self._by_order().get(engine.order))

    def drain(self, engine: Engine, *, undo: bool) -> Engine:
        """An operator drains an engine, or undoes that."""
        self._fleet.book.drain(engine.order, drained=not undo, now=time.time())
        self._drain(engine)
        return engine

    def removed(self) -> list[RemovedEngine]:
        """The engines that operators have removed, the last first: those that settings or sources name, and
        those of the last day."""
        known, since = self._by_order(), time.time() - _RECENT_S
        return [
            RemovedEngine(
                engine=place_of(mark.engine),
                removed=datetime.fromtimestamp(mark.at, UTC).replace(microsecond=0),
                named=mark.engine in known,
                undo=undo_of(known.get(mark.engine)),
            )
            for mark in self._fleet.book.removals()
            if mark.engine in known or mark.at >= since
        ]

    def _ordered(self) -> None:
        for engine in self._fleet.engines.values():
            self._drain(engine)

        async def settle() -> None:
            self._try_to_settle()

        # In the loop's next turn: an engine that is removed and added again at once stays.
        self._tasks.start("follow orders", settle())

    def _added(self) -> dict[str, EngineSettings]:
        """The engines that operators have added and that this machine can reach, by their names in orders."""
        added = dict[str, EngineSettings]()
        for mark in self._fleet.book.marks():
            if mark.added and (settings := _read(mark.added)) is None:  # why may hold keys
                self._tell_unusable(mark.engine, mark.added, "its settings cannot be read")
            elif mark.added and settings is not None and order_of(settings) == mark.engine:
                added[mark.engine] = settings
        return added

    def _tell_unusable(self, order: str, added: object, why: str) -> None:
        if self._unusable.get(order) != added:
            self._unusable[order] = added
            log.warning(
                "an engine that an operator added at another kvpin, or before the restart, cannot be "
                "used here: add it again, with settings that fit",
                engine=order,
                error=why,
            )

    def _by_order(self, entries: Iterable[EngineEntry] | None = None) -> dict[str, EngineSettings]:
        """These engines by their names in operators' orders; by default all that settings and sources name.
        Engines that kvpin starts have none."""
        if entries is None:
            found = (each.entry for source in self.sources.values() for each in source.found)
            entries = (*self._settings, *found)
        parts = (part for entry in entries for part in self._parts.split(entry))
        named = ((order_of(part), part) for part in parts)
        return {order: part for order, part in named if order and isinstance(part, EngineSettings)}

    def _find(self, order: str) -> Engine | None:
        engines = self._fleet.engines.values()
        return next((engine for engine in engines if engine.order == order), None)

    # The loop.

    def _try_to_settle(self) -> None:
        if not self._is_stopped:
            with suppress(EngineSpecError):  # the source that changes next says so
                self._settle()

    def _settle(self) -> EngineChanges:
        """Lets engines join, change, drain and leave as settings, sources and operators say now. Raises
        EngineSpecError if an engine of the settings or of a source cannot be used: nothing changed, but for
        engines that operators have removed."""
        added = self._added()
        for engine in [each for each in self._fleet.engines.values() if self._must_end(each, added)]:
            self._drop_by_order(engine)
            self._tasks.start(f"end {engine.id} {id(engine)}", self._close(engine))
        removed = {mark.engine for mark in self._fleet.book.removals()}
        found = [each for source in self.sources.values() for each in source.found]
        named = named_engines(self._settings, found, added, removed, self._parts, self._named)
        plan = self._planned(filter(lambda each: each.should_exist, named))
        for member, each in plan.staying.items():
            self._keep(member, each)
        for made in plan.joining.values():
            self._join(made)
        for member, made in plan.changing.items():
            self._change(member, made)
        absent = [*plan.waiting, *(each for each in plan.ordered if not self._follow_order(each))]
        self._named = [each for each in named if each not in absent]
        before, self._waiting = self._waiting, frozenset(each.id for each in plan.waiting)
        for engine_id in sorted(self._waiting - before):
            log.info(
                "an engine waits: one that leaves has its id, or that an operator added", engine=engine_id
            )
        to_try = [*plan.joining, *filter(self._is_left, self._waiting)]
        for member in plan.leaving:
            member.is_leaving, member.next = True, None
            self._tasks.start(member.leave_task, self._leave(member, to_try))
        for engine in self._fleet.engines.values():
            self._drain(engine)
        return EngineChanges(
            added=tuple(named.entry for named, _, _ in plan.joining.values()),
            removed=tuple(sorted(member.engine.id for member in plan.leaving)),
            changed=tuple(named.entry for named, _, _ in plan.changing.values()),
        )

    def _planned(self, wanted: Iterable[NamedEngine]) -> _Plan:
        """What has to be done, so that these engines are used, and no others. All are made before one joins:
        an engine that cannot be used must change nothing."""
        plan = _Plan()
        try:
            for each in wanted:
                self._plan(plan, each)
        except EngineSpecError:
            for _, adapter, _ in (*plan.joining.values(), *plan.changing.values()):
                self._tasks.start(f"close {id(adapter)}", adapter.aclose())
            raise
        here = (member for member in self._members.values() if self._fleet.has(member.engine))
        stays = {*plan.staying, *plan.changing}
        plan.leaving += [member for member in here if not member.is_leaving and member not in stays]
        return plan

    def _plan(self, plan: _Plan, each: NamedEngine) -> None:
        member = self._member(each.id)
        is_claimed = member in plan.staying or member in plan.changing
        if member is not None and not is_claimed and member.is_to_be(each.entry):
            plan.staying[member] = each
        elif each.ordered is not None:
            plan.ordered.append(each)
        elif each.id not in self._fleet.engines and each.id not in plan.joining:
            plan.joining[each.id] = self._make(each)
        elif member is None or member.is_leaving or member.named.ordered is not None:
            plan.waiting.append(each)
        else:
            plan.changing[member] = self._make(each)

    def _make(self, named: NamedEngine) -> _Made:
        if isinstance(named.entry, ManagedSettings):
            process = ManagedEngine(named.entry)
            return named, self._make_adapter(process.spec), process
        return named, self._make_adapter(named.entry.spec()), None

    def _keep(self, member: _Member, named: NamedEngine) -> None:
        if member.named.entry == named.entry:
            member.named, member.next = named, None
        else:
            member.named = replace(member.named, is_ready=named.is_ready)
        if member.is_leaving:
            self._tasks.cancel(member.leave_task)
            member.is_leaving = member.is_drained = False

    def _member(self, engine_id: str) -> _Member | None:
        engine = self._fleet.engines.get(engine_id)
        return self._members.get(engine) if engine is not None else None

    # Joining.

    def _join(self, made: _Made) -> Engine:
        named, adapter, process = made
        member = _Member(self._fleet.add(adapter), named, process)
        self._members[member.engine] = member
        self._begin(member)
        return member.engine

    def _join_at_free_place(self, named: NamedEngine, spec: EngineSpec) -> Engine:
        """Lets an engine join. Raises EngineSpecError; Conflict if one of its id or at its address exists."""
        engines = self._fleet.engines
        if spec.id in engines:
            raise Conflict(f"an engine with id {spec.id!r} exists", param="id")
        if known := [each.id for each in engines.values() if each.adapter.spec.is_same(spec)]:
            names = ", ".join(map(repr, known))
            one, several = f"engine {names} is", f"engines {names}, its ranks or models, are"
            raise Conflict(f"{one if len(known) == 1 else several} already at {spec.server}", param="url")
        return self._join(self._make(named))

    def _follow_order(self, named: NamedEngine) -> bool:
        """Lets an engine join that an operator added before the start, or at another kvpin. False if it
        cannot, or has to wait until the one has left that the settings named there."""
        order, entry = named.order or "", named.entry
        if self._find(order) is not None or not isinstance(entry, EngineSettings):
            return False
        try:
            self._join_at_free_place(named, entry.spec())
        except (Conflict, EngineSpecError) as error:
            self._tell_unusable(order, named.ordered, str(error))
            return False
        return True

    def _begin(self, member: _Member) -> None:
        """Connects an engine, once no other adapter uses its server, if that takes only one."""
        engine = member.engine
        if self._is_stopped:
            return
        users = self._users(engine)
        if not users:
            member.is_held = False
            if isinstance(member.named.entry, StartedSettings):
                engine.starting_file = member.named.entry.starting_file
            if member.process is not None:
                engine.process = member.process
                self._tasks.start(f"process {engine.id} {id(engine)}", member.process.run())
            self._monitor.watch(engine)
        elif not member.is_held:
            member.is_held = True
            for user in users:  # until it has connected, requests for their models wait
                pool = self._fleet.pool_of(user)
                if pool is not None and user.info is not None:
                    pool.away[engine.id] = user.info
            if any(user.info is not None for user in users):  # one that has not connected leaves at once
                log.info(
                    "engine waits: its server is still in use under another name, or by its old settings",
                    engine=engine.id,
                    server=engine.adapter.spec.server,
                    names=sorted(user.id for user in users),
                )

    def _users(self, engine: Engine) -> list[Engine]:
        """The other engines that have to end first: those whose adapters use the server of one that takes a
        single one, as each would believe that the slots are its own; and those that had the id of one that
        kvpin starts, as the memory may have room for one process only."""
        held = {each for each, member in self._members.items() if member.is_held}
        there = {*self._fleet.engines.values(), *self._members} - held - {engine}
        if self._members[engine].process is not None:
            return [each for each in there if each.id == engine.id]
        is_single, spec = engine.adapter.one_owner, engine.adapter.spec
        return [each for each in there if is_single and each.adapter.spec.is_same(spec)]

    # Changing.

    def _change(self, member: _Member, made: _Made) -> None:
        if self._must_wait(member.engine):
            member.next = made
            self._tasks.start(f"turn of {member.engine.id} {id(made)}", self._change_in_turn(member, made))
        else:
            self._replace(member, made)

    def _must_wait(self, engine: Engine) -> bool:
        """True if another engine of its model is being replaced, or is one of kvpin's own and not ready."""
        pool = self._fleet.pool_of(engine)
        away = [self._fleet.engines[name] for name in pool.away] if pool is not None else []
        return any(self._is_connecting(each) or self._members[each].process is not None for each in away)

    async def _change_in_turn(self, member: _Member, made: _Made) -> None:
        log.info(
            "engine keeps its old settings until the others of its model are back: they serve meanwhile",
            engine=member.engine.id,
        )
        await until(lambda: member.next is not made or not self._must_wait(member.engine))
        if member.next is made and self._fleet.has(member.engine):
            self._replace(member, made)
            self._try_to_settle()  # its address is free
        else:  # the settings have changed again, or an operator has removed it
            await made[1].aclose()

    def _replace(self, member: _Member, made: _Made) -> None:
        named, adapter, process = made
        old = member.engine
        self._monitor.forget(old)
        new = _Member(self._fleet.replace(old, adapter), named, process)
        self._members[new.engine] = new
        self._drain(new.engine)

        async def follow_on() -> None:
            await until(lambda: not old.leases, self._grace_s)
            try:
                await self._close(old)
            finally:
                if self._fleet.has(new.engine):
                    self._begin(new)

        self._tasks.start(f"replace {old.id} {id(old)}", follow_on())

    # Leaving.

    async def _leave(self, member: _Member, to_try: list[str]) -> None:
        """Nothing names an engine any more. `to_try`: those that join in its place, or wait to."""
        engine, grace_s = member.engine, self._grace_s
        await until(lambda: not any(map(self._is_untried, to_try)), grace_s)
        member.is_drained = True
        self._drain(engine)
        await until(lambda: not engine.leases, grace_s)
        self._drop(engine)
        self._try_to_settle()  # its id is free
        try:
            await self._close(engine)
        finally:
            if engine.info is not None:  # else it served nothing, as a server before it tells its parts
                log.info("engine has left: nothing names it any more", engine=engine.id)

    def _is_untried(self, engine_id: str) -> bool:
        engine = self._fleet.engines.get(engine_id)
        if engine_id in self._waiting and (engine is None or self._is_left(engine_id)):
            return True
        return engine is not None and self._is_connecting(engine)

    def _is_left(self, engine_id: str) -> bool:
        """True if nothing names the engine of that id any more."""
        member = self._member(engine_id)
        return member is not None and member.is_leaving

    def _is_connecting(self, engine: Engine) -> bool:
        """True if it is tried for the first time, and does not wait for its server."""
        member = self._members.get(engine)
        return engine.state is EngineState.CONNECTING and not (member is not None and member.is_held)

    def _must_end(self, engine: Engine, added: Mapping[str, EngineSettings]) -> bool:
        """True if an operator has removed an engine, or has added it with other settings than it has here."""
        if engine.is_own:
            return False
        member = self._members.get(engine)
        ordered = member.named.ordered if member is not None else None
        is_replaced = ordered is not None and added.get(engine.order, ordered) != ordered
        return is_replaced or self._fleet.book.is_removed(engine.order)

    def _drop_by_order(self, engine: Engine) -> None:
        log.info("engine leaves: an operator has removed or replaced it", engine=engine.id)
        if (member := self._members.get(engine)) is not None:
            self._tasks.cancel(member.leave_task)
        self._drop(engine)

    def _drop(self, engine: Engine) -> None:
        """The fleet no longer has an engine. Its requests in flight go on to their end."""
        self._monitor.forget(engine)
        self._operations.stop_on(engine.id)
        self._fleet.remove(engine)
        self._fleet.pins.forget_engine(engine.id)

    async def _close(self, engine: Engine) -> None:
        """Closes the adapter of an engine that the fleet no longer has, and ends its process. Then its server
        is free, also if that raises."""
        try:
            await engine.adapter.aclose()
        finally:
            if engine.process is not None:
                await engine.process.stop()
            self._members.pop(engine, None)
            for member in self._members.values():
                if member.is_held and self._fleet.has(member.engine):
                    self._begin(member)

    def _drain(self, engine: Engine) -> None:
        """Lets an engine get new requests, or not, as everybody says now."""
        member = self._members.get(engine)
        reasons = {
            DrainReason.ORDERED: self._fleet.is_drained(engine),
            DrainReason.NOT_READY: member is not None and not member.named.is_ready,
            DrainReason.LEAVING: member is not None and member.is_drained,
        }
        self.drain_for(engine, {reason for reason, holds in reasons.items() if holds})

    def drain_for(self, engine: Engine, reasons: set[DrainReason]) -> None:
        """Sends an engine no new requests, for these reasons; without one, it takes requests again."""
        engine.drains = reasons
        if reasons:
            engine.state = EngineState.DRAINING
        elif engine.state is EngineState.DRAINING:
            # It is checked before it is trusted. As a suspect, one that may not be used would get requests.
            state = EngineState.SUSPECT if self._monitor.allows(engine) else EngineState.REFUSED
            state = state if self._fleet.pool_of(engine) is not None else EngineState.DOWN
            engine.state = state if engine.mine.is_set() else EngineState.ELSEWHERE
            engine.check_now.set()

    async def told_uses(self, url: bytes) -> bytes:
        """Not empty while an adapter uses the engine at that address, also if it has left the fleet."""
        return b"1" if any(engine.adapter.spec.url == url.decode() for engine in self._members) else b""

    @property
    def processes(self) -> list[ManagedEngine]:
        """The processes that kvpin runs."""
        return [member.process for member in self._members.values() if member.process is not None]

    def stop(self, *, within_s: float) -> Awaitable[None]:
        """Connects no further engine, from this call on. To be awaited: waits until those that leave have
        closed their adapters, but not longer: they save their slots."""
        self._is_stopped = True
        return until(lambda: all(map(self._fleet.has, self._members)), within_s)


@lru_cache(maxsize=MAX_MARKS)
def _read(added: bytes) -> EngineSettings | None:
    """The settings in an order to add an engine; None if they cannot be read."""
    try:
        return EngineSettings.model_validate_json(added)
    except ValidationError:
        return None
