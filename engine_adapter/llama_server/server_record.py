"""Records about one server process, on disk: kvpin may crash while the server and its slots live on."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import xxhash

_log = logging.getLogger("kvpin.llama_server")
_Content = TypeVar("_Content")


class ServerRecord(Generic[_Content]):
    """One record, which only this user can read.

    Args:
        directory: where it lies, beside the saved files; None to keep no record.
        url: address of the server, which names the record.
        instance: word of the server's process. A record of another process counts for nothing.
        name: what it is about, for its file's name and for logs.
        kind: type of its content.
    """

    def __init__(
        self, directory: Path | None, url: str, instance: str | None, name: str, kind: type[_Content]
    ) -> None:
        self._path: Path | None = None
        self._instance, self._name, self._kind = instance or "", name, kind
        self._has_warned = False
        if directory is not None and instance is not None:
            self._path = directory / f"kvpin-slots-{xxhash.xxh3_64_hexdigest(url.encode())}.{name}"

    def read(self) -> _Content | None:
        """The content that was written about this process; None if there is none that can be read."""
        if self._path is not None:
            with suppress(OSError, msgspec.MsgspecError):
                raw = self._path.read_bytes()
                instance, content = msgspec.msgpack.decode(raw, type=tuple[str, msgspec.Raw])
                if instance == self._instance:
                    return msgspec.msgpack.decode(content, type=self._kind)
        return None

    def write(self, content: _Content) -> None:
        """Replaces the record. One that cannot be written is removed: its content no longer holds."""
        if self._path is None:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with open(part, "wb", opener=_open_private) as file:
                file.write(msgspec.msgpack.encode((self._instance, content)))
            part.replace(self._path)
        except OSError as error:
            if not self._has_warned:
                _log.warning(
                    "%s cannot be written (%s): %s will not outlive kvpin",
                    self._path,
                    error.strerror,
                    self._name,
                )
            self._has_warned = True
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
