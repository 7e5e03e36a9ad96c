"""The use of tenants on disk: `use` in `state_dir`. It outlives what makes `state` useless.

first line   names the format
16 bytes     xxh3_128 of the rest
msgpack      a list of pairs: UseKey, Used
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import structlog

from proxy.core.tenant_use import UseBook, Used, UseKey
from proxy.fleet.state_dir.private_files import UnusableFileError, opened, read, sealed, write

log = structlog.get_logger(__name__)

_HEAD = b"kvpin-use 1\n"
_FILE = "use"
_decode = msgspec.msgpack.Decoder(list[tuple[UseKey, Used]]).decode


class UseFile:
    """The file of a use book."""

    def __init__(self, directory: Path, book: UseBook) -> None:
        """Puts what is in the file into `book`. If it cannot be used, logs a warning and begins without."""
        self._path, self._book = directory / _FILE, book
        self._saved = b""
        try:
            book.update(_decode(opened(_HEAD, read(self._path))))
        except FileNotFoundError:
            pass
        except (OSError, UnusableFileError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning(
                "the saved use of tenants cannot be read: counting begins anew",
                file=str(self._path),
                why=str(error),
            )

    async def save(self) -> None:
        """Writes the book, if it has changed. Logs a failure."""
        self._book.prune(time.time())
        data = sealed(_HEAD, msgspec.msgpack.encode(list(self._book.items())))
        if data == self._saved:
            return
        try:
            await asyncio.to_thread(write, self._path, data)
        except OSError as error:
            log.warning(
                "the use of tenants is not saved: a restart would lose it; check the room in state_dir",
                file=str(self._path),
                error=error.strerror,
            )
        else:
            self._saved = data
