"""The engines that are found elsewhere, beside those of the settings: both join and leave by one way.

found          joins, as an engine of the settings does
not ready      gets no new requests until its source says that it is ready
gone           leaves after its requests
source fails   its last engines stay; it is asked again after 1 to 30 s
several parts  each data-parallel rank, or each model of a router, joins; the engine that stood for all leaves
removed        leaves if an operator has removed it; its source ends that when it no longer names the engine
waiting        joins once its id is free: an engine with other settings that still leaves has it, or one that
               an operator added
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from engine_adapter import EngineInfo, EngineSpec, EngineSpecError
from proxy.control.configured import ConfiguredEngines
from proxy.control.engines import Engines
from proxy.fleet.discovery import Finder, FoundEngine, FoundEngines, Source, SourceError
from proxy.fleet.engine import DrainReason, Engine, order_name
from proxy.fleet.fleet import Fleet
from proxy.runtime.tasks import Supervisor
from proxy.settings import EngineChanges, EngineEntry, EngineSettings, SettingsError, StartedSettings


class Parts:
    """The data-parallel ranks of servers, or their models, by address. Each is an engine of its own, with its
    own cache.

    A server tells its parts when it connects. From then on, its entry in the settings stands for as many
    engines.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, ...] | tuple[str, ...]] = {}

    def learn(self, url: str, parts: tuple[int, ...] | tuple[str, ...]) -> bool:
        """A server has these ranks, or models; none if it does not tell. Whether that is new."""
        ranks = [part for part in parts if isinstance(part, int)]
        whole = tuple(ranks[:1])  # a single rank is the server, a single model of a router is not
        if not parts or self._of.get(url, whole) == parts:
            return False
        if parts != whole:
            self._of[url] = parts
        else:
            self.forget(url)
        return True

    def has(self, url: str) -> bool:
        """True if a server has told its parts before."""
        return url in self._of

    def forget(self, url: str) -> None:
        """Nothing is known of a server."""
        self._of.pop(url, None)

    def split(self, entry: EngineEntry) -> list[EngineEntry]:
        """The engines that an entry stands for."""
        if not isinstance(entry, EngineSettings):
            return [entry]
        parts: list[EngineEntry] = [entry.of_part(part) for part in self._of.get(entry.url, ())]
        return [entry] if entry in parts or not parts else parts


log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class DiscoveredEngines:
    """Follows the settings and the sources that they name.

    Attributes:
        sources: by name.
    """

    _fleet: Fleet
    _configured: ConfiguredEngines
    _engines: Engines
    _tasks: Supervisor
    sources: dict[str, Source] = field(default_factory=dict)
    _entries: tuple[EngineEntry, ...] = ()
    _grace_s: float = 0.0
    _parts: Parts = field(default_factory=Parts)
    _wanted: dict[str, EngineEntry] = field(default_factory=dict)
    _waiting: frozenset[str] = frozenset()

    def follow(
        self,
        entries: Iterable[EngineEntry],
        finders: Iterable[tuple[str, Finder]],
        *,
        grace_s: float,
    ) -> EngineChanges:
        """Takes over what the settings name, at start or when they are read again.

        Args:
            entries: the engines of the settings.
            finders: the sources, by name.
            grace_s: time that requests of an engine that leaves get to end.

        Raises:
            EngineSpecError: an engine cannot be used. Nothing changed.
        """
        before = self._entries, self._grace_s, dict(self.sources)
        self._entries, self._grace_s = tuple(entries), grace_s
        wanted = dict(finders)
        for name in self.sources.keys() - wanted.keys():
            del self.sources[name]
        try:
            changes = self._settle()
        except EngineSpecError:
            self._entries, self._grace_s, sources = before
            self.sources.update(sources)
            raise
        for name in before[2].keys() - self.sources.keys():
            self._tasks.cancel(f"find {name}")
        for name, finder in wanted.items():
            source = self.sources.pop(name, None)
            if source is None or source.finder != finder:
                # With other settings, it keeps its engines until it has answered.
                source = Source(name, finder, source.found if source is not None else ())
                self._tasks.keep(f"find {name}", partial(self._ask, source))
            self.sources[name] = source  # in the settings' order
        self._tasks.keep("find engines that wait", self._retry)
        return changes

    @property
    def left(self) -> list[Callable[[Engine], None]]:
        """Called with each engine that has left because nothing names it any more."""
        return self._configured.left

    def split(self, engine: Engine, info: EngineInfo) -> bool:
        """An engine has connected, and declares the parts of its server. Whether it leaves, because others
        come in its place."""
        parts = tuple(info.models) or info.ranks
        url, was_named = engine.adapter.spec.url, self._configured.entry(engine.id) is not None
        was_known = self._parts.has(url)
        if not was_named or not self._parts.learn(url, parts):
            return False
        try:
            changes = self._settle()
        except EngineSpecError as error:
            log.warning(
                "the ranks or models of a server cannot be used by themselves",
                engine=engine.id,
                error=str(error),
            )
            self._parts.forget(url)
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
        return self._configured.entry(engine.id) is None

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
            named = self.named(each.entry for each in before)
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
            for name in named.keys() - self.named().keys():
                if self._fleet.book.is_removed(name):  # what comes to its address is another engine
                    self._fleet.book.readmit(name, now=time.time())
        elif source.error is not None:
            log.info("source of engines answers", source=source.name, engines=len(found))
        source.error = None

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(FIRST_BACKOFF_S)
            if self._waiting:
                self.settle()

    def settle(self) -> None:
        """Lets engines join and leave as settings, sources and operators say now."""
        with suppress(EngineSpecError):  # the source that changes next says so
            self._settle()

    def named(self, entries: Iterable[EngineEntry] | None = None) -> dict[str, EngineSettings]:
        """These engines by their names in operators' orders; by default all that settings and sources name.
        Engines that kvpin starts have none."""
        if entries is None:
            entries = [*self._entries, *(each.entry for _, each in self._found())]
        engines = [part for entry in entries for part in self._parts.split(entry)]
        return {
            name: engine
            for engine in engines
            if isinstance(engine, EngineSettings) and (name := _order_name(engine)) is not None
        }

    def _is_overruled(self, entry: EngineEntry) -> bool:
        """True if an operator has removed the engine, or has added it here already, with other settings."""
        name, book = _order_name(entry), self._fleet.book
        if name is None:
            return False
        return book.is_removed(name) or (
            bool(book.added(name))
            and any(
                order_name(each.adapter.spec) == name and self._configured.engine(each.id) is not each
                for each in self._fleet.engines.values()
            )
        )

    def _settle(self) -> EngineChanges:
        """Lets engines join, leave and drain as the settings and all sources say."""
        wanted = {entry.id: entry for entry in self._entries}
        drained, named = set[str](), _Named(self._entries)
        for engine_id, each in self._found():
            known = self._wanted.get(engine_id)
            if engine_id in wanted or named.has(each.entry):
                continue  # the settings come first, then the sources in their order
            if each.is_ready:
                wanted[engine_id] = each.entry
            elif known is not None:
                wanted[engine_id] = known
                drained.add(engine_id)
        parts = {engine_id: self._parts.split(entry) for engine_id, entry in wanted.items()}
        engines = {
            each.id: each for several in parts.values() for each in several if not self._is_overruled(each)
        }
        draining = frozenset(each.id for engine_id in drained for each in parts[engine_id])
        changes = self._configured.follow(engines.values(), grace_s=self._grace_s)
        for engine_id in engines:  # also one that joined again, and one that was leaving
            engine = self._configured.engine(engine_id)
            if engine is not None and (engine_id in draining or DrainReason.NOT_READY in engine.drains):
                self._engines.drain(engine, DrainReason.NOT_READY, undo=engine_id not in draining)
        waiting = frozenset(each.id for each in changes.waiting)
        for engine_id in sorted(waiting - self._waiting):
            log.info(
                "an engine waits: one that leaves has its id, or that an operator added", engine=engine_id
            )
        self._wanted = {
            engine_id: entry
            for engine_id, entry in wanted.items()
            if not waiting.issuperset(each.id for each in parts[engine_id])
        }
        self._waiting = waiting
        return changes

    def _found(self) -> Iterator[tuple[str, FoundEngine]]:
        for source in self.sources.values():
            for each in source.found:
                yield each.entry.id, each


def _order_name(entry: EngineEntry) -> str | None:
    """The engine's name in operators' orders; None for one that kvpin starts, which cannot be removed."""
    if not isinstance(entry, EngineSettings) or isinstance(entry, StartedSettings):
        return None
    return order_name(entry.spec())


class _Named:
    """The engines named so far, by server."""

    def __init__(self, entries: Iterable[EngineEntry]) -> None:
        self._at: dict[str, list[EngineSpec]] = defaultdict(list)
        for entry in entries:
            if isinstance(entry, EngineSettings):
                self.has(entry)

    def has(self, entry: EngineSettings) -> bool:
        """True if an engine was named before; it is now."""
        spec = entry.spec()
        others = self._at[spec.server]
        is_known = any(spec.is_same(other) for other in others)
        others.append(spec)
        return is_known
