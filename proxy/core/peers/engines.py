"""What several kvpins agree on about engines: who owns one that only one may use, and what operators ordered.

    free ──bid──→ bidding ──SETTLE_S without a better claim──→ owner
    any ──a better claim of another kvpin──→ free

The better of two claims is the one whose kvpin uses the engine; then the one with the greater epoch; then
the one whose kvpin drew the smaller number. A bid has a greater epoch than all known claims. So an owner
stays when other kvpins join. If two kvpins became owners without contact, the later one stays. A claim ends
with its kvpin.

Operators order to drain, add and remove engines. Every kvpin of a group holds the same book of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

# A kvpin bids for that long before it is the owner: longer than a message to another one and its answer take.
SETTLE_S = 1.0


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A kvpin's claim to an engine: its epoch, and whether the kvpin uses the engine or still bids for it."""

    epoch: int
    is_held: bool


class OwnClaim:
    """This kvpin's claim to one engine.

    Attributes:
        is_owner: this kvpin may use the engine.
        is_locked_out: a kvpin that could not be heard holds the engine's lock.
    """

    def __init__(self, kvpin: int) -> None:
        """`kvpin` is the number that this kvpin drew."""
        self.is_owner = False
        self.is_locked_out = False
        self._kvpin = kvpin
        self._epoch = 0  # of its own claim; without one, the greatest that was heard of
        self._since: float | None = None  # when it bid; None without a claim

    @property
    def claim(self) -> Claim | None:
        """The claim as the others are told it; None without one."""
        return self._claim if self._since is not None else None

    @property
    def _claim(self) -> Claim:
        return Claim(self._epoch, self.is_owner and not self.is_locked_out)

    @property
    def is_bidding(self) -> bool:
        """True if it waits for a better claim."""
        return self._since is not None and not self.is_owner

    def decide(
        self,
        now: float,
        others: Mapping[int, Claim],
        *,
        may_bid: bool,
        is_alone: bool = False,
    ) -> None:
        """Bids, becomes the owner, or gives up.

        Args:
            now: monotonic seconds.
            others: the claims of the other kvpins that were heard lately, by the numbers that they drew.
            may_bid: others would hear the bid, or a lock keeps the engine from a second owner.
            is_alone: there is no other kvpin.
        """
        if self._since is not None and any(
            _rank(claim, kvpin) > _rank(self._claim, self._kvpin) for kvpin, claim in others.items()
        ):
            self._since, self.is_owner = None, False
        if self._since is None:
            self._epoch = max([self._epoch, *(claim.epoch for claim in others.values())])
            if others or not may_bid:
                return
            self._epoch, self._since = self._epoch + 1, now
        if is_alone or now - self._since >= SETTLE_S:
            self.is_owner = True

    def doubt(self, now: float) -> None:
        """This kvpin was paused: another one may own the engine by now. It bids again."""
        if self.is_owner:
            self.is_owner, self._since = False, now


def holder_of(claims: Mapping[int, Claim]) -> int | None:
    """The kvpin that uses an engine, by the claims to it; None if none does."""
    held = {kvpin: claim for kvpin, claim in claims.items() if claim.is_held}
    return max(held, key=lambda kvpin: _rank(held[kvpin], kvpin), default=None)


def _rank(claim: Claim, kvpin: int) -> tuple[bool, int, int]:
    return claim.is_held, claim.epoch, -kvpin


# --- the orders of operators --------------------------------------------------------------------------------


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
