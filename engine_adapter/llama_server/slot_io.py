"""The operations of a slot over HTTP: save, restore, erase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from engine_adapter.http.control import ControlClient

# Tens of gigabytes to a slow disk take minutes. A server that dies meanwhile is noticed by its health.
MOVE_S = 1800.0


class _SaveTime(msgspec.Struct):
    save_ms: float


class _Saved(msgspec.Struct):
    n_saved: int
    n_written: int
    timings: _SaveTime


class _RestoreTime(msgspec.Struct):
    restore_ms: float


class _Restored(msgspec.Struct):
    n_restored: int
    n_read: int
    timings: _RestoreTime


class _Erased(msgspec.Struct):
    n_erased: int


_Answer = TypeVar("_Answer", _Saved, _Restored, _Erased)


@dataclass(frozen=True, slots=True)
class Moved:
    """The size of a save or restore: tokens, bytes, and the seconds in which the server did nothing else."""

    tokens: int
    size: int
    seconds: float


class SlotIo:
    """Slot operations of one server. The caller must never run two at once on one slot.

    Each raises EngineUnavailable when no answer comes, and EngineRejected for an error. A rejected restore
    has wiped its slot.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    async def save(self, slot_id: int, name: str) -> Moved:
        """Writes the slot to file `name` of the server's save path."""
        answer = await self._act(slot_id, "save", _Saved, {"filename": name})
        return Moved(answer.n_saved, answer.n_written, answer.timings.save_ms / 1000)

    async def restore(self, slot_id: int, name: str) -> Moved:
        """Replaces the slot's content with file `name`."""
        answer = await self._act(slot_id, "restore", _Restored, {"filename": name})
        return Moved(answer.n_restored, answer.n_read, answer.timings.restore_ms / 1000)

    async def erase(self, slot_id: int) -> int:
        """Empties the slot; returns the number of tokens it held."""
        return (await self._act(slot_id, "erase", _Erased, {})).n_erased

    async def _act(self, slot_id: int, action: str, kind: type[_Answer], fields: dict[str, str]) -> _Answer:
        path = f"/slots/{slot_id}?action={action}"
        return await self._control.read(kind, "POST", path, json=fields, answer_s=MOVE_S)
