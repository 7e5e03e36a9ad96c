"""The pins of one server, written to disk: kvpin may crash while the server and its slots live on."""

from __future__ import annotations

import logging
import os
from array import array
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from engine_adapter.types import TokenIds

_log = logging.getLogger("kvpin.llama_server")


class RecordedPin(msgspec.Struct, frozen=True):
    """One pin: its id, its tokens as int32, the digest of their cache salt, and its end in Unix time."""

    pin_id: str
    tokens: bytes
    salt: str | None
    until: float

    @property
    def token_ids(self) -> TokenIds[int]:
        """The tokens that it protects."""
        return array("i", self.tokens)


class _Record(msgspec.Struct, frozen=True):
    instance: str
    pins: list[RecordedPin]


class PinRecord:
    """Writes and reads the pins.

    Args:
        directory: where the record lies, beside the saved files; None to keep no record.
        url: address of the server, which names the record.
        instance: word of the server's process; a record of another process counts for nothing.
    """

    def __init__(self, directory: Path | None, url: str, instance: str | None) -> None:
        self._path: Path | None = None
        self._instance = instance or ""
        if directory is not None and instance is not None:
            self._path = directory / f"kvpin-slots-{xxhash.xxh3_64_hexdigest(url.encode())}.pins"

    def read(self) -> list[RecordedPin]:
        """The pins that this process of the server has; none if the record cannot be read."""
        if self._path is not None:
            with suppress(OSError, msgspec.MsgspecError):
                record = msgspec.msgpack.decode(self._path.read_bytes(), type=_Record)
                if record.instance == self._instance:
                    return record.pins
        return []

    def write(self, pins: list[RecordedPin]) -> None:
        """Replaces the record, which only this user can read: it holds prompts."""
        if self._path is None:
            return
        part = self._path.with_suffix(".pins.part")
        try:
            with open(part, "wb", opener=_open_private) as file:
                file.write(msgspec.msgpack.encode(_Record(self._instance, pins)))
            part.replace(self._path)
        except OSError as error:
            _log.warning("%s cannot be written (%s): pins will not outlive kvpin", self._path, error.strerror)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
