"""The key book on disk: `keys` in `state_dir`, which kvpins that share the directory write together.

first line   names the format
16 bytes     xxh3_128 of the rest
msgpack      a list of IssuedKey
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from proxy.core.issued_keys import IssuedKey, KeyBook
from proxy.fleet.state_dir.private_files import (
    UnusableFileError,
    check_directory,
    make_directory,
    opened,
    read,
    sealed,
    write,
)
from proxy.settings import SettingsError

_HEAD = b"kvpin-keys 1\n"
_FILE, _LOCK = "keys", "keys.lock"
# A kvpin holds the lock for milliseconds. Whoever holds it longer does not keep others waiting for ever.
_LOCK_S, _LOCK_POLL_S = 10.0, 0.01


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
        """The keys and marks in the file; none without a file. Raises SettingsError if it cannot be used, or
        if others may write to its directory."""
        check_directory(self._directory)
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
        """No other kvpin writes the file meanwhile. Raises TimeoutError if another process holds the lock for
        too long."""
        path = self._directory / _LOCK
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(lock, 0o600)  # an older kvpin let others open it, and lock it
            _take(lock, path)
            yield
        finally:
            os.close(lock)


def _take(lock: int, path: Path) -> None:
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                why = f"another process has locked {str(path)!r} for {_LOCK_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why) from None
        time.sleep(_LOCK_POLL_S)
