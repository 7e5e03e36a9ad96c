"""Which engines should exist: those that settings, sources and operators name, without those that operators
have removed. Pure: `reconciler.py` brings the fleet there.

An engine that several name is used once. In this order, what counts is

1. the order by which an operator added it, if it joined by that order: settings count from the next start
2. the settings
3. the sources, in the order of the settings. One that is not ready has to have joined before
4. the order by which an operator added it, here before the start, or at another kvpin
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from engine_adapter import EngineSpec
from proxy.fleet.discovery import FoundEngine
from proxy.fleet.engine import order_name
from proxy.settings import EngineEntry, EngineSettings, StartedSettings, are_alike, kept_ids


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """An engine that somebody names."""

    entry: EngineEntry  # its adapter, and its process, are made from this
    # Its name in operators' orders; None for one that kvpin starts, which cannot be removed.
    order: str | None
    # The entry that names it: that of a server with several ranks or models stands for several.
    whole: EngineEntry
    # The settings by which an operator added it. They may differ from `entry` in the id. None for one that
    # settings or sources name.
    ordered: EngineSettings | None = None
    is_ready: bool = True  # False if its source says that it should get no new requests
    # False for one that is named elsewhere, too, and that counts there; and for one that has never been ready
    counts: bool = True
    is_overruled: bool = False  # an operator has removed it, or has added it with other settings

    @property
    def id(self) -> str:
        """Its id in kvpin."""
        return self.entry.id

    @property
    def should_exist(self) -> bool:
        """True if kvpin should use it."""
        return self.counts and not self.is_overruled


class Parts(dict[str, tuple[int, ...] | tuple[str, ...]]):
    """The data-parallel ranks of servers, or their models, by address. Each is an engine of its own, with its
    own cache.

    A server tells its parts when it connects. From then on, its entry in the settings stands for as many
    engines.
    """

    def learn(self, url: str, parts: tuple[int, ...] | tuple[str, ...]) -> bool:
        """A server has these ranks, or models; none if it does not tell. Whether that is new."""
        if not parts and all(isinstance(part, str) for part in self.get(url, ())):  # a router always tells
            return self.pop(url, None) is not None
        ranks = [part for part in parts if isinstance(part, int)]
        whole = tuple(ranks[:1])  # a single rank is the server, a single model of a router is not
        if not parts or self.get(url, whole) == parts:
            return False
        self[url] = parts
        if parts == whole:
            del self[url]
        return True

    def split(self, entry: EngineEntry) -> list[EngineEntry]:
        """The engines that an entry stands for."""
        if not isinstance(entry, EngineSettings):
            return [entry]
        parts: list[EngineEntry] = [entry.of_part(part) for part in self.get(entry.url, ())]
        return [entry] if entry in parts or not parts else parts


def named_engines(
    settings: Iterable[EngineEntry],
    found: Iterable[FoundEngine],  # of all sources
    added: Mapping[str, EngineSettings],  # by operators; by their names in orders
    removed: Container[str],  # by operators; names in orders
    parts: Parts,
    have: Iterable[NamedEngine] = (),  # the last result, without those that have not joined: ids stay
) -> list[NamedEngine]:
    """All engines that somebody names."""
    have = list(have)
    ordered = (each for each in have if each.ordered is not None)
    joined = {each.order: each for each in ordered if added.get(each.order or "") == each.ordered}
    named = [
        replace(each, entry=part, order=order, is_overruled=order in joined or order in removed)
        for each in _by_settings_and_sources(settings, found, have)
        for part in parts.split(each.whole)
        for order in (each.order if part is each.whole else order_of(part),)
    ]
    named = _with_kept_ids(named, have)
    used = {each.order: each.entry for each in have if each.should_exist and each.ordered is None}
    kept = {each.id for each in joined.values()}
    ids = {each.id for each in named if each.should_exist}
    here = [each for each in named if each.should_exist and each.id not in kept]
    served = {each.order for each in here}
    served |= {order_of(each.whole) for each in here if each.whole is not each.entry}
    for order, entry in added.items():
        if order in joined:
            named.append(joined[order])
        elif order not in served:
            # What is named as an operator ordered it, but for its id, stays when nobody else names it.
            same = used.get(order, entry)
            as_used = same if are_alike(same, entry) and same.id not in ids else entry
            named.append(NamedEngine(as_used, order, as_used, ordered=entry))
    return named


def order_of(entry: EngineEntry, spec: EngineSpec | None = None) -> str | None:
    """The engine's name in operators' orders; None for one that kvpin starts, which cannot be removed.
    `spec`: its description, if it is at hand."""
    if not isinstance(entry, EngineSettings) or isinstance(entry, StartedSettings):
        return None
    return order_name(spec or entry.spec())


def _by_settings_and_sources(
    settings: Iterable[EngineEntry], found: Iterable[FoundEngine], have: Iterable[NamedEngine]
) -> Iterator[NamedEngine]:
    """What they name, not yet split into parts."""
    ids, servers = set[str](), defaultdict[str, list[EngineSpec]](list)
    before = {each.whole.id: each.whole for each in have if each.ordered is None and each.counts}

    def named(entry: EngineEntry, *, is_found: bool = False, is_ready: bool = True) -> NamedEngine:
        """It counts if nothing has its id or its server yet, and it is ready, or was."""
        spec = entry.spec() if isinstance(entry, EngineSettings) else None
        others = servers[spec.server] if spec is not None and entry.id not in ids else []
        is_new = entry.id not in ids and not (spec is not None and any(map(spec.is_same, others)))
        others += [spec] if spec is not None else []
        counts = not is_found or (is_new and (is_ready or entry.id in before))
        ids.update([entry.id] if counts else [])
        return NamedEngine(entry, order_of(entry, spec), entry, is_ready=is_ready, counts=counts)

    for entry in settings:
        yield named(entry)
    for each in found:
        entry = each.entry if each.is_ready else before.get(each.entry.id, each.entry)
        yield named(entry, is_found=True, is_ready=each.is_ready)


def _with_kept_ids(named: list[NamedEngine], have: Iterable[NamedEngine]) -> list[NamedEngine]:
    """Gives engines without an id of their own the ones that they have. Of two with one id, the first
    counts."""
    before = {each.id: each.entry for each in have if each.ordered is None and each.should_exist}
    wanted = [at for at, each in enumerate(named) if each.should_exist]
    taken = set[str]()
    for at, entry in zip(wanted, kept_ids(before, [named[at].entry for at in wanted]), strict=True):
        named[at] = replace(named[at], entry=entry, counts=entry.id not in taken)
        taken.add(entry.id)
    return named
