"""Changes of engines by the admin API, kept for a worker that starts later."""

from __future__ import annotations

from enum import Enum

import msgspec

# Where a worker tells another one its changes.
PATH = "/admin/v1/changes"


class ChangeKind(Enum):
    """The kinds of change."""

    ADD = "add"
    REMOVE = "remove"
    DRAIN = "drain"


class Change(msgspec.Struct, frozen=True):
    """A request of the admin API that was carried out: its method, its path as it was sent, and its body."""

    kind: ChangeKind
    method: str
    target: str
    body: bytes


class Changes:
    """The changes that still count, by engine. One that was added and removed again leaves nothing."""

    def __init__(self) -> None:
        self._of: dict[str, list[Change]] = {}

    def note(self, engine: str, change: Change) -> None:
        """A change of an engine was carried out."""
        before = self._of.pop(engine, [])
        is_new = bool(before) and before[0].kind is ChangeKind.ADD  # the settings do not name it
        if change.kind is ChangeKind.REMOVE and is_new:
            return
        replaced = {
            ChangeKind.ADD: (ChangeKind.ADD, ChangeKind.DRAIN),
            ChangeKind.REMOVE: (ChangeKind.ADD, ChangeKind.REMOVE, ChangeKind.DRAIN),
            ChangeKind.DRAIN: (ChangeKind.DRAIN,),
        }[change.kind]
        self._of[engine] = [*(each for each in before if each.kind not in replaced), change]

    def told(self) -> bytes:
        """All of them, in an order in which they can be carried out."""
        return msgspec.json.encode([change for changes in self._of.values() for change in changes])


def heard(told: bytes) -> list[Change]:
    """The changes of `Changes.told`."""
    return msgspec.json.decode(told, type=list[Change])
