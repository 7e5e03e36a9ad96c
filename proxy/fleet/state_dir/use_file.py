"""The use of tenants on disk: `use` in `state_dir`. It outlives what makes `state` useless.

first line   names the format
16 bytes     xxh3_128 of the rest
msgpack      a list of pairs: UseKey, Used
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from proxy.core.quotas import UseBook, Used, UseKey
from proxy.fleet.state_dir.private_files import UnusableFileError, opened, read, sealed, write

log = structlog.get_logger(__name__)

_HEAD = b"kvpin-use 1\n"
_FILE, _UNREAD = "use", "use.unread"
_ARRAY = b"\xdd"  # of msgpack: its length in 4 bytes follows
_AT_ONCE = 2048
_decode = msgspec.msgpack.Decoder(list[tuple[UseKey, Used]]).decode


class UseFile:
    """The file of a use book."""

    def __init__(self, directory: Path, book: UseBook, left: Sequence[Path] = ()) -> None:
        """Puts what is in the file into `book`, and what is in those of the directories that workers `left`
        because there are more or fewer now. Of one that cannot be used, logs a warning."""
        self._path, self._book = directory / _FILE, book
        self._saved = b""
        self._left = list[Path]()  # files that the first save makes superfluous
        for each in (directory, *left):
            rows = _rows(each)
            book.add(rows or ())
            if each is not directory and rows is not None:
                self._left.append(each / _FILE)

    async def save(self) -> None:
        """Writes the book, if it has changed. Logs a failure."""
        self._book.prune()
        data = sealed(_HEAD, await _encoded(self._book))
        if data == self._saved:
            return
        try:
            await asyncio.to_thread(write, self._path, data, synced=True)
        except OSError as error:
            log.warning(
                "the use of tenants is not saved: a restart would lose it; check the room in state_dir",
                file=str(self._path),
                error=error.strerror,
            )
        else:
            self._saved = data
            while self._left:
                with suppress(OSError):
                    await asyncio.to_thread(self._left.pop().unlink)


def _rows(directory: Path) -> list[tuple[UseKey, Used]] | None:
    """The rows of the file in a directory; None without one that can be read."""
    path = directory / _FILE
    try:
        return _decode(opened(_HEAD, read(path)))
    except FileNotFoundError:
        pass
    except (OSError, UnusableFileError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        aside = directory / _UNREAD
        with suppress(OSError):
            path.replace(aside)
        log.warning(
            "the saved use of tenants cannot be read: counting begins anew", file=str(aside), why=str(error)
        )
    return None


async def _encoded(book: UseBook) -> bytes:
    """The rows, encoded a few thousand at a time: 100,000 would hold up the loop for 0.1 s."""
    keys, pieces = list(book), list[bytes]()
    for at in range(0, len(keys), _AT_ONCE):
        pieces += (msgspec.msgpack.encode((key, book[key])) for key in keys[at : at + _AT_ONCE])
        await asyncio.sleep(0)
    return b"".join((_ARRAY, len(keys).to_bytes(4), *pieces))
