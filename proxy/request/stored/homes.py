"""Whose a stored object is, and which engine keeps it.

An engine keeps its objects in its own process, so a request that names one must go to the same engine. It
knows no tenants: kvpin lets a tenant name only the objects that it got. Of each kind, a tenant has at most
`MAX_NAMES` names; the one used longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
from typing_extensions import override

from engine_adapter import UNREADABLE, HeaderPairs
from proxy.request.stages import Event, Stage
from proxy.request.stored.names import Name
from proxy.request.stored.routes import FOLLOWED, Kind

MAX_NAMES = 10_000
"""The most objects of a kind whose engines are known, for each tenant."""
MAX_NAME = 256
"""The most characters of an id that is kept."""
_FAILED = 300


class Home(NamedTuple):
    """The process that keeps an object: an engine's id, and its `EngineInfo.instance`."""

    engine: str
    instance: str | None


class ObjectHomes:
    """Object → engine, of each tenant."""

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        """`tenants`: see `divide`."""
        self._homes: dict[str | None, dict[Kind, OrderedDict[str, Home]]] = {}
        self.divide(tenants)

    def divide(self, tenants: Iterable[str]) -> None:
        """Only these tenants have objects from now on; none are one without a name. Names of others go."""
        names: set[str | None] = {*tenants} or {None}
        self._homes = {
            name: self._homes.get(name) or {kind: OrderedDict() for kind in FOLLOWED} for name in names
        }

    def keep(self, tenant: str | None, name: Name, home: Home) -> None:
        """A tenant got an object from an engine. An engine may give an id again, after a restart or a DELETE:
        then the object is the last one's alone."""
        if tenant not in self._homes or len(name.id) > MAX_NAME:
            return
        for owned in self._homes.values():
            if owned[name.kind].get(name.id) == home:
                del owned[name.kind][name.id]
        homes = self._homes[tenant][name.kind]
        homes[name.id] = home
        if len(homes) > MAX_NAMES:
            homes.popitem(last=False)

    def forget(self, tenant: str | None, name: Name) -> None:
        """A tenant's object was deleted."""
        if tenant in self._homes:
            self._homes[tenant][name.kind].pop(name.id, None)

    def find(self, tenant: str | None, name: Name) -> Home | None:
        """The engine that keeps a tenant's object; None if that is not known."""
        homes = self._homes.get(tenant, {}).get(name.kind)
        if homes is None or (home := homes.get(name.id)) is None:
            return None
        homes.move_to_end(name.id)
        return home


class _Made(msgspec.Struct):
    """An answer with a new object, or an event of its stream."""

    id: str | None = None
    response: _Made | None = None
    file: _Made | None = None


_decode = msgspec.json.Decoder(_Made).decode


class AnswerNoter(Stage):
    """Notes the new objects in an answer, or that its object is gone."""

    reads_head = True

    def __init__(
        self, makes: Mapping[str, Kind], note: Callable[[Name], None], gone: Callable[[], None] | None = None
    ) -> None:
        """Args:
        makes: the field that holds the id of a new object → its kind.
        note: is told each new object.
        gone: is called if the answer is no error.
        """
        self._makes, self._note, self._gone = makes, note, gone

    @override
    def begin(self, headers: HeaderPairs) -> HeaderPairs:
        if self.status >= _FAILED or not self._makes:
            self.marks = ()
        if self.status < _FAILED and self._gone is not None:
            self._gone()
        return headers

    @override
    def event(self, event: Event) -> Iterable[Event]:
        """Looks for the ids in a whole answer, or in the first event of a stream that says something."""
        if event.data and self.marks is None:
            self.marks = ()
            with suppress(*UNREADABLE):
                made = event.read(_decode)
                made = made.response or made
                ids = {"id": made.id, "file": made.file.id if made.file is not None else None}
                for field, kind in self._makes.items():
                    if (given := ids[field]) is not None:
                        self._note(Name(kind, given))
        return (event,)
