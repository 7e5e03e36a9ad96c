"""The owner of the KV in each slot, written to disk: kvpin may crash while the server and its slots live on.

A record names the owner of a slot only while the slot is sure to hold nothing else. While that may change,
the slot has no known owner, so that no tenant is ever given another one's KV.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

_log = logging.getLogger("kvpin.llama_server")

# The salt of content that nobody here knows. It is new in each process: no request ever runs under it.
UNKNOWN_OWNER = uuid4().hex


class _Record(msgspec.Struct, frozen=True):
    instance: str
    owners: list[str | None]


class SlotOwners:
    """The owner of each slot: the digest of a cache salt, None for content without one.

    Args:
        directory: where the record lies; None to keep no record.
        url: address of the server, which names the record.
        instance: word of the server's process; a record of another process tells nothing.
        slots: how many slots it has.
    """

    def __init__(self, directory: Path | None, url: str, instance: str | None, slots: int) -> None:
        self._path: Path | None = None
        self._instance = instance or ""
        self._owners: list[str | None] = [UNKNOWN_OWNER] * slots
        if directory is not None and instance is not None:
            self._path = directory / f"kvpin-slots-{xxhash.xxh3_64_hexdigest(url.encode())}.owners"
            self._read(self._path)

    def __getitem__(self, slot_id: int) -> str | None:
        """The owner of a slot's content, UNKNOWN_OWNER where nothing tells it."""
        return self._owners[slot_id]

    def changes(self, slot_id: int, owner: str | None) -> None:
        """Content of `owner` is about to replace what the slot holds."""
        if self._owners[slot_id] != owner:
            self.holds(slot_id, UNKNOWN_OWNER)

    def holds(self, slot_id: int, owner: str | None) -> None:
        """The slot holds content of `owner` and nothing else."""
        if self._owners[slot_id] == owner:
            return
        self._owners[slot_id] = owner
        if self._path is not None:
            self._write(self._path)

    def _read(self, path: Path) -> None:
        with suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
            if record.instance == self._instance and len(record.owners) == len(self._owners):
                self._owners = record.owners

    def _write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(_Record(self._instance, self._owners)))
            part.replace(path)
        except OSError as error:
            _log.warning("%s cannot be written (%s): slots will not outlive a crash", path, error.strerror)
            self._path = None
            with suppress(OSError):
                path.unlink()
