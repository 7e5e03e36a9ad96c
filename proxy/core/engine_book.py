"""The orders of operators to drain, add and remove engines. Every kvpin of a group holds the same book."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

# A book keeps this many engines, the last changed first.
MAX_MARKS = 1000
# A later order of one engine is later by at least that, whatever the clock of its kvpin says.
_STEP_S = 0.001
# Clocks of kvpins may differ by about this much. A later mark would count for ever: no order is later.
MAX_AHEAD_S = 300.0


class EngineMark(msgspec.Struct, frozen=True, array_like=True):
    """The orders about one engine that hold.

    Attributes:
        engine: its name, as kvpins tell it to each other.
        drained: it gets no new requests.
        at: when the last order was given, in Unix time. Of two marks, the later one counts.
        removed: no kvpin uses it, whatever settings and sources say.
        added: its settings as JSON, if an operator added it; else empty: settings or sources name it.
        seal: proves, on an exchange that others may write to, that a kvpin of the group told it.
    """

    engine: str
    drained: bool
    at: float
    removed: bool = False
    added: bytes = b""
    seal: bytes = b""

    @property
    def order(self) -> tuple[bool, bool, bytes]:
        """The orders without their time."""
        return self.drained, self.removed, self.added


def encode_marks(marks: list[EngineMark]) -> bytes:
    """Marks as bytes."""
    return msgspec.msgpack.encode(marks)


def decode_marks(data: bytes) -> list[EngineMark]:
    """The marks of `encode_marks`. Raises msgspec.MsgspecError if they are none."""
    try:
        return msgspec.msgpack.decode(data, type=list[EngineMark])
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("a text is not UTF-8") from error


class EngineBook:
    """The mark of each engine that operators gave orders about.

    An engine that takes requests again keeps its mark: an older order may still arrive.

    Attributes:
        listeners: called with the engines about which something else is ordered now.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[list[str]], None]] = []
        self._marks: dict[str, EngineMark] = {}

    def is_drained(self, engine: str) -> bool:
        """True if the last order about the engine was to drain it."""
        mark = self._marks.get(engine)
        return mark is not None and mark.drained

    def is_removed(self, engine: str) -> bool:
        """True if an operator has removed the engine."""
        mark = self._marks.get(engine)
        return mark is not None and mark.removed

    def added(self, engine: str) -> bytes:
        """The settings of an engine that an operator has added; empty for another."""
        mark = self._marks.get(engine)
        return mark.added if mark is not None else b""

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
        before = self._marks.get(engine, EngineMark(engine, drained=False, at=now - _STEP_S))
        self._take([replace(before, at=max(now, before.at + _STEP_S), **changes)])

    def merge(self, marks: Iterable[EngineMark], *, now: float) -> bool:
        """Takes over the marks that are later than those known here. `now` is in Unix time. False if some are
        from the future, which does not count."""
        told = [*marks]
        heard = [mark for mark in told if mark.at <= now + MAX_AHEAD_S]
        self._take(heard)
        return len(heard) == len(told)

    def _take(self, marks: Iterable[EngineMark]) -> None:
        changed: list[str] = []
        for mark in marks:
            before = self._marks.get(mark.engine, EngineMark(mark.engine, drained=False, at=-1.0))
            if (before.at, before.order) < (mark.at, mark.order):
                self._marks[mark.engine] = mark
                if before.order != mark.order:
                    changed.append(mark.engine)
        if len(self._marks) > MAX_MARKS:
            for mark in self.marks()[MAX_MARKS:]:
                del self._marks[mark.engine]
        for listener in self.listeners if changed else ():
            listener(changed)

    def marks(self) -> list[EngineMark]:
        """All marks, the last first."""
        return sorted(self._marks.values(), key=lambda mark: (mark.at, mark.engine), reverse=True)
