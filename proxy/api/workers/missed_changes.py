"""Changes of engines by the admin API, kept for a worker that starts later."""

from __future__ import annotations

from enum import Enum

import msgspec

from proxy.core.drains import DrainBook, DrainMark

# Where a worker tells another one its changes.
PATH = "/admin/v1/changes"


class ChangeKind(Enum):
    """The kinds of change."""

    ADD = "add"
    REMOVE = "remove"


class Change(msgspec.Struct, frozen=True):
    """A request of the admin API that was carried out: its method, its path as it was sent, and its body."""

    kind: ChangeKind
    method: str
    target: str
    body: bytes


class Changes:
    """The changes that still count, by engine. One that was added and removed again leaves nothing."""

    def __init__(self, drains: DrainBook) -> None:
        """`drains` holds the engines that are drained."""
        self._drains = drains
        self._of: dict[str, list[Change]] = {}

    def note(self, engine: str, change: Change) -> None:
        """A change of an engine was carried out."""
        before = self._of.pop(engine, [])
        is_new = bool(before) and before[0].kind is ChangeKind.ADD  # the settings do not name it
        if change.kind is ChangeKind.REMOVE and is_new:
            return
        replaced = {
            ChangeKind.ADD: (ChangeKind.ADD,),
            ChangeKind.REMOVE: (ChangeKind.ADD, ChangeKind.REMOVE),
        }[change.kind]
        self._of[engine] = [*(each for each in before if each.kind not in replaced), change]

    def told(self) -> bytes:
        """All of them, in an order in which they can be carried out."""
        changes = [change for several in self._of.values() for change in several]
        return msgspec.json.encode(ToldChanges(changes, self._drains.marks()))


class ToldChanges(msgspec.Struct, frozen=True):
    """What a worker tells one that starts later."""

    changes: list[Change]
    drains: list[DrainMark]


def heard(told: bytes) -> ToldChanges:
    """The changes of `Changes.told`."""
    return msgspec.json.decode(told, type=ToldChanges)
