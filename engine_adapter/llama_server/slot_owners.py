"""The owner of the KV in each slot, also after a crash of kvpin.

A record names the owner of a slot only while the slot is sure to hold nothing else. While that may change,
the slot has no known owner, so that no tenant is ever given another one's KV.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from engine_adapter.llama_server.server_record import ServerRecord

# The salt of content that nobody here knows. It is new in each process: no request ever runs under it.
UNKNOWN_OWNER = uuid4().hex


class SlotOwners:
    """The owner of each slot: the digest of a cache salt, None for content without one.

    Args:
        directory, url, instance: see `ServerRecord`.
        slots: how many slots the server has.
    """

    def __init__(self, directory: Path | None, url: str, instance: str | None, slots: int) -> None:
        self._record = ServerRecord(directory, url, instance, "owners", list[str | None])
        self._owners: list[str | None] = [UNKNOWN_OWNER] * slots
        recorded = self._record.read()
        if recorded is not None and len(recorded) == slots:
            self._owners = recorded

    def __getitem__(self, slot_id: int) -> str | None:
        """The owner of a slot's content, UNKNOWN_OWNER where nothing tells it."""
        return self._owners[slot_id]

    def changes(self, slot_id: int, owner: str | None) -> None:
        """Content of `owner` is about to replace what the slot holds."""
        if self._owners[slot_id] != owner:
            self.holds(slot_id, UNKNOWN_OWNER)

    def holds(self, slot_id: int, owner: str | None) -> None:
        """The slot holds content of `owner` and nothing else."""
        if self._owners[slot_id] != owner:
            self._owners[slot_id] = owner
            self._record.write(self._owners)
