"""Books that every kvpin of a group holds alike: operators' orders about engines, and issued keys."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from engine_adapter.body import UNREADABLE
from proxy.core.quotas import TenantLimits

# --- engine book ----------------------------------------------------------------------------------------
# The orders of operators to drain, add and remove engines. Every kvpin of a group holds the same book.

MAX_MARKS = 1000  # a book keeps this many engines, the last changed first
# Of two orders about one engine, and of two removals of keys, the later one is later by at least that,
# whatever the clock of its kvpin says.
_TICK_S = 0.001
# Clocks of kvpins may differ by about this much. A mark from later than that would count for ever: no order
# is later. A signature from earlier may be a repeated one.
MAX_SKEW_S = 300.0


class EngineMark(msgspec.Struct, frozen=True, array_like=True):
    """The orders about one engine that hold."""

    engine: str  # its name, as kvpins tell it to each other
    drained: bool  # it gets no new requests
    at: float  # When the last order was given, in Unix time. Of two marks, the later one counts.
    removed: bool = False  # no kvpin uses it, whatever settings and sources say
    # Its settings as JSON, if an operator added it; else empty: settings or sources name it.
    added: bytes = b""
    seal: bytes = b""  # proves, on an exchange that others may write to, that a kvpin of the group told it

    @property
    def order(self) -> tuple[bool, bool, bytes]:
        """The orders without their time."""
        return self.drained, self.removed, self.added


_NONE = EngineMark("", drained=False, at=-1.0)  # of an engine without orders


def encode_marks(marks: list[EngineMark]) -> bytes:
    """Marks as bytes."""
    return msgspec.msgpack.encode(marks)


def decode_marks(data: bytes) -> list[EngineMark]:
    """The marks of `encode_marks`. Raises one of `UNREADABLE` if they are none."""
    return msgspec.msgpack.decode(data, type=list[EngineMark])


class EngineBook:
    """The mark of each engine that operators gave orders about. An engine that takes requests again keeps its
    mark: an older order may still arrive."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []  # called when something else is ordered about an engine
        self._marks: dict[str, EngineMark] = {}

    def is_drained(self, engine: str) -> bool:
        """True if the last order about the engine was to drain it."""
        return self._marks.get(engine, _NONE).drained

    def is_removed(self, engine: str) -> bool:
        """True if an operator has removed the engine."""
        return self._marks.get(engine, _NONE).removed

    def drain(self, engine: str, *, drained: bool, now: float) -> None:
        """An operator drains the engine, or lets it take requests again, at `now` in Unix time."""
        if drained or engine in self._marks:
            self._order(engine, now, drained=drained)

    def add(self, engine: str, settings: bytes, *, now: float) -> None:
        """An operator adds the engine with these settings (JSON), at `now` in Unix time."""
        self._order(engine, now, removed=False, added=settings)

    def remove(self, engine: str, *, now: float) -> None:
        """An operator removes the engine, at `now` in Unix time. That ends an order to drain it."""
        self._order(engine, now, drained=False, removed=True, added=b"")

    def readmit(self, engine: str, *, now: float) -> None:
        """The removal of the engine ends, at `now` in Unix time: settings and sources count again."""
        self._order(engine, now, removed=False)

    def removals(self) -> list[EngineMark]:
        """The marks of engines that operators have removed, the last first."""
        return [mark for mark in self.marks() if mark.removed]

    def _order(self, engine: str, now: float, **changes: Any) -> None:  # noqa: ANN401 - fields of a mark
        before = self._marks.get(engine, _NONE)
        self._take([replace(before, engine=engine, at=max(now, before.at + _TICK_S), **changes)])

    def merge(self, marks: Sequence[EngineMark], *, now: float) -> bool:
        """Takes over the marks that are later than those known here. `now` is in Unix time. False if some are
        from the future, which does not count."""
        heard = [mark for mark in marks if mark.at <= now + MAX_SKEW_S]
        self._take(heard)
        return len(heard) == len(marks)

    def _take(self, marks: Sequence[EngineMark]) -> None:
        is_changed = False
        for mark in marks:
            before = self._marks.get(mark.engine, _NONE)
            if (before.at, before.order) < (mark.at, mark.order):
                self._marks[mark.engine] = mark
                is_changed |= before.order != mark.order
        if len(self._marks) > MAX_MARKS:
            for mark in self.marks()[MAX_MARKS:]:
                del self._marks[mark.engine]
        for listener in self.listeners if is_changed else ():
            listener()

    def marks(self) -> list[EngineMark]:
        """All marks, the last first."""
        return sorted(self._marks.values(), key=lambda mark: (mark.at, mark.engine), reverse=True)


# --- the keys that the admin API has issued. Every kvpin of a group holds the same book -----------------

MAX_KEYS = 2000  # a book holds this many keys, and as many marks of removed ones, the newest
_SIGNATURE, _SIGNATURE_BYTES = "sha256", 32


class IssuedKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that the admin API issued, without the key itself."""

    id: str
    tenant: str
    digest: bytes  # SHA-256 of the key
    ending: str  # its last four characters, by which people recognise it
    created: float  # when it was issued, in Unix time
    name: str = ""  # what its operator calls it; may be empty
    models: tuple[str, ...] | None = None  # the names that its requests may have as `model`; None for all
    expires: float | None = None  # when it ends, in Unix time; None for never
    # When it was removed, in Unix time; 0 before that. Then it opens nothing any more. Its entry stays as a
    # mark: another kvpin may still tell of it.
    removed: float = 0.0
    # Those of its tenant from then on, also once the key is removed; None leaves them as they are.
    limits: TenantLimits | None = None


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What one kvpin tells another. `at`: when, in Unix time."""

    at: float
    entries: list[IssuedKey]


def signed(entries: list[IssuedKey], secret: bytes, now: float) -> bytes:
    """Entries as bytes for another kvpin that has the same secret. Whoever lacks it can issue no key. `now`
    is in Unix time."""
    data = msgspec.msgpack.encode(_Told(now, entries))
    return hmac.digest(secret, data, _SIGNATURE) + data


def verified(told: bytes, secret: bytes, now: float | None) -> list[IssuedKey] | None:
    """The entries of `signed`; None if another secret signed them, or they are none. Also None MAX_SKEW_S
    after they were signed, as `now` says: whoever may write to the exchange could repeat what it told before
    a key was removed. With `now` None, only this user may write there, and age is no matter."""
    signature, data = told[:_SIGNATURE_BYTES], told[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(hmac.digest(secret, data, _SIGNATURE), signature):
        return None
    try:
        heard = msgspec.msgpack.decode(data, type=_Told)
    except UNREADABLE:
        return None
    return heard.entries if now is None or abs(now - heard.at) <= MAX_SKEW_S else None


@dataclass(slots=True)
class KeyBook:
    """The issued keys and the marks of removed ones."""

    listeners: list[Callable[[], None]] = field(default_factory=list)  # called when a key came or was removed
    _entries: dict[str, IssuedKey] = field(default_factory=dict)

    @property
    def has_issued(self) -> bool:
        """True if a key was ever issued, also if none is left. Then no request is served without a key."""
        return bool(self._entries)

    def issued(self) -> list[IssuedKey]:
        """The keys that are not removed, the first issued first."""
        return [entry for entry in self.entries() if not entry.removed]

    def limits(self) -> dict[str, TenantLimits]:
        """The limits of each tenant that the keys name some for: those of the newest key that does."""
        return {entry.tenant: entry.limits for entry in self.entries() if entry.limits is not None}

    def entries(self) -> list[IssuedKey]:
        """The keys and the marks, the first issued first."""
        return sorted(self._entries.values(), key=lambda entry: (entry.created, entry.id))

    def removal(self, key: IssuedKey, now: float) -> IssuedKey:
        """The mark of a key that is removed at `now`, in Unix time. It is the newest mark, whatever the clock
        says: the oldest ones are dropped."""
        newest = max((entry.removed for entry in self._entries.values()), default=0.0)
        return replace(key, name="", models=None, removed=max(now, newest + _TICK_S))

    def merge(self, entries: Iterable[IssuedKey]) -> None:
        """Takes over what is new here. A removal counts for good, while its mark is among the newest."""
        before = dict(self._entries)
        for entry in entries:
            known = self._entries.get(entry.id)
            if known is None or entry.removed > known.removed:
                self._entries[entry.id] = entry
        marks = [entry for entry in self._entries.values() if entry.removed]
        if len(marks) > MAX_KEYS:
            # An entry that tells the limits of a tenant with a key stays: without it there would be none.
            tenants = {key.tenant for key in self.issued()}
            telling = {entry.tenant: entry.id for entry in self.entries() if entry.limits is not None}
            marks.sort(key=lambda entry: (entry.removed, entry.id))
            for mark in marks[:-MAX_KEYS]:
                if mark.tenant not in tenants or telling.get(mark.tenant) != mark.id:
                    del self._entries[mark.id]
        for listener in self.listeners if self._entries != before else ():
            listener()
