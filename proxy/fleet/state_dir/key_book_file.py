"""The key book on disk: `keys` in `state_dir`, which kvpins that share the directory write together.

first line   names the format
16 bytes     xxh3_128 of the rest
msgpack      a list of IssuedKey
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from proxy.core.issued_keys import IssuedKey, KeyBook
from proxy.fleet.state_dir.private_files import (
    UnusableFileError,
    make_directory,
    opened,
    read,
    sealed,
    write,
)
from proxy.settings import SettingsError

_HEAD = b"kvpin-keys 1\n"
_FILE, _LOCK = "keys", "keys.lock"


class KeyBookFile:
    """The file of the issued keys. Its methods block."""

    def __init__(self, directory: Path) -> None:
        """Neither the directory nor the file needs to exist."""
        self._directory, self._path = directory, directory / _FILE

    @property
    def version(self) -> tuple[int, int] | None:
        """Differs after each change of the file; None if there is none."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read(self) -> list[IssuedKey]:
        """The keys and marks in the file; none without a file. Raises SettingsError if it cannot be used."""
        try:
            return msgspec.msgpack.decode(opened(_HEAD, read(self._path)), type=list[IssuedKey])
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            why = error.strerror or str(error)
        except UnusableFileError as error:
            why = str(error)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            why = "another version of kvpin wrote it"
        raise SettingsError(
            f"state_dir: the keys in {str(self._path)!r} cannot be read: {why}; put a backup of the file in "
            "its place, or delete it to begin without issued keys"
        )

    def add(self, entries: list[IssuedKey]) -> list[IssuedKey]:
        """Adds what the file lacks. Returns all that it then holds.

        Raises:
            OSError: it cannot be written.
            SettingsError: what it holds cannot be used; it stays as it is.
        """
        make_directory(self._directory)
        with self._locked():
            book, kept = KeyBook(), self.read()
            book.merge([*kept, *entries])
            if (all_entries := book.entries()) != kept:
                write(self._path, sealed(_HEAD, msgspec.msgpack.encode(all_entries)), synced=True)
        return all_entries

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No other kvpin writes the file meanwhile."""
        with (self._directory / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
