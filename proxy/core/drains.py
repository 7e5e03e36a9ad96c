"""Which engines operators have drained. Every kvpin of a group holds the same book."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

# A book keeps this many engines, the last changed first.
MAX_MARKS = 1000
# A later order of one engine is later by at least that, whatever the clock of its kvpin says.
_STEP_S = 0.001


class DrainMark(msgspec.Struct, frozen=True, array_like=True):
    """The last order about one engine: drain it, or let it take requests again.

    Attributes:
        engine: its address, as kvpins tell it to each other.
        at: when the order was given, in Unix time. Of two orders, the later one counts.
        ended: the drained engine was removed since. A kvpin that still has it goes on draining it; an engine
            that comes to its address is another one.
    """

    engine: str
    drained: bool
    at: float
    ended: bool = False


def encode_marks(marks: list[DrainMark]) -> bytes:
    """Marks as bytes."""
    return msgspec.msgpack.encode(marks)


def decode_marks(data: bytes) -> list[DrainMark]:
    """The marks of `encode_marks`. Raises msgspec.MsgspecError if they are none."""
    try:
        return msgspec.msgpack.decode(data, type=list[DrainMark])
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("a text is not UTF-8") from error


class DrainBook:
    """The last order about each engine.

    An engine that takes requests again keeps its mark: an older order may still arrive.

    Attributes:
        listeners: called with the engines that are drained now and were not, or the other way round, or
            whose order has ended.
    """

    def __init__(self) -> None:
        self.listeners = list[Callable[[list[str]], None]]()
        self._marks = dict[str, DrainMark]()

    def is_drained(self, engine: str) -> bool:
        """True if the last order about the engine was to drain it, and it was not removed since."""
        mark = self._marks.get(engine)
        return mark is not None and mark.drained and not mark.ended

    def is_ended(self, engine: str) -> bool:
        """True if the engine was drained and then removed."""
        mark = self._marks.get(engine)
        return mark is not None and mark.ended

    def end(self, engine: str, *, now: float) -> None:
        """An operator has removed the engine, at `now` in Unix time."""
        if self.is_drained(engine):
            self.merge([DrainMark(engine, True, max(now, self._marks[engine].at + _STEP_S), ended=True)])

    def order(self, engine: str, *, drained: bool, now: float) -> None:
        """An operator orders it, at `now` in Unix time."""
        before = self._marks.get(engine)
        if drained or before is not None:
            at = now if before is None else max(now, before.at + _STEP_S)
            self.merge([DrainMark(engine, drained, at)])

    def merge(self, marks: Iterable[DrainMark]) -> None:
        """Takes over the orders that are later than those known here."""
        changed = list[str]()
        for mark in marks:
            before = self._marks.get(mark.engine)
            if before is None or (before.at, before.drained) < (mark.at, mark.drained):
                was_ended = self.is_ended(mark.engine)
                was_drained = self.is_drained(mark.engine)
                self._marks[mark.engine] = mark
                if (was_drained, was_ended) != (self.is_drained(mark.engine), mark.ended):
                    changed.append(mark.engine)
        if len(self._marks) > MAX_MARKS:
            for mark in self.marks()[MAX_MARKS:]:
                del self._marks[mark.engine]
        for listener in self.listeners if changed else ():
            listener(changed)

    def marks(self) -> list[DrainMark]:
        """All orders, the last first."""
        return sorted(self._marks.values(), key=lambda mark: (mark.at, mark.engine), reverse=True)
