"""Writes files whole or not at all, for this user alone, and reads only such files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import TypeVar

import msgspec
import structlog
import xxhash

from engine_adapter import PromptTable, PromptTableError
from proxy.core.books import IssuedKey, KeyBook
from proxy.core.quotas import UseBook, Used, UseKey
from proxy.errors import ProxyError
from proxy.prompt import RegisteredTables
from proxy.settings import SettingsError

_PART = ".part"
# No file is longer.
MAX_BYTES = 2 << 30
# A part this old was left by a process that was killed; a younger one may be another kvpin's.
_LEFT_S = 600.0
_DIGEST_BYTES = 16
_ROOT = 0
_OTHER_VERSION = "another version of kvpin wrote it"
_Content = TypeVar("_Content")


class UnusableFileError(OSError):
    """The content of a file cannot be used. The text says why."""


def sealed(head: bytes, body: bytes) -> bytes:
    """A file's bytes: `head`, a line that names format and version; 16 bytes of xxh3_128 of the body; the
    body, which is msgpack."""
    return head + xxhash.xxh3_128_digest(body) + body


def opened(head: bytes, data: bytes, kind: type[_Content]) -> _Content:
    """The body of `sealed`, decoded. Raises UnusableFileError if it is damaged, or of another version."""
    if not data.startswith(head):
        is_other = data.startswith(head.partition(b" ")[0])
        raise UnusableFileError(_OTHER_VERSION if is_other else "it is damaged")
    body = data[len(head) + _DIGEST_BYTES :]
    if xxhash.xxh3_128_digest(body) != data[len(head) : len(head) + _DIGEST_BYTES]:
        raise UnusableFileError("it is damaged")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableFileError(_OTHER_VERSION) from error


def check_directory(directory: Path) -> None:
    """Raises SettingsError if the directory exists and others may put files there, or take some away."""
    try:
        status = directory.stat()
    except OSError:
        return  # those who use it say so
    name = f"state_dir: {str(directory)!r}"
    if status.st_uid not in (os.geteuid(), _ROOT):
        raise SettingsError(f"{name} belongs to another user, who may change what is in it: chown it")
    if stat.S_ISDIR(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise SettingsError(
            f"{name}: others may change what is in it (mode {mode:o}): chmod 700 it, or name a directory "
            "within it, which kvpin makes"
        )


def make_directory(directory: Path) -> None:
    """Makes the directory, which may exist, and removes parts of files that killed processes left there.
    Raises SettingsError if it cannot be written, or if others may write there."""
    try:
        for place in (*reversed(directory.parents), directory):
            if not place.exists():
                place.mkdir(mode=0o700, exist_ok=True)
        check_directory(directory)
        write(directory / "writable", b"")
        (directory / "writable").unlink(missing_ok=True)  # another kvpin may do the same now
        for part in directory.glob(f"*{_PART}"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _LEFT_S:
                    part.unlink()
    except OSError as error:
        raise SettingsError(f"state_dir: {str(directory)!r} cannot be written: {error.strerror}") from error


def write(path: Path, data: bytes, *, synced: bool = False, is_first: bool = False) -> None:
    """Replaces the file. With `synced`, the new one outlives a crash of the machine. Raises OSError; the old
    file stays then. With `is_first`, an old file is such an error: FileExistsError."""
    descriptor, part = mkstemp(suffix=_PART, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        if is_first:
            os.link(part, path)  # of several kvpins that start, one succeeds
            Path(part).unlink()
        else:
            Path(part).replace(path)
        if synced:
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError:
        with suppress(OSError):
            Path(part).unlink()
        raise


def read(path: Path) -> bytes:
    """The file's bytes. Raises OSError if it cannot be read, is a link, or others may change it."""
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "another user may have written it")
        if status.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it is longer than {MAX_BYTES >> 30} GiB")
        return file.read()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe without a writer would wait


# --- prompt tables on disk: `TABLE.EXTRA_ID.safetensors`, the table's own bytes -------------------------

log = structlog.get_logger(__name__)

_SUFFIX = ".safetensors"


class TableFiles:
    """The files of the registered tables. Its methods block. A failure is logged: tables work without it."""

    def __init__(self, directory: Path) -> None:
        """Raises SettingsError if the directory cannot be written."""
        make_directory(directory)
        self._directory = directory

    def load(self, tables: RegisteredTables) -> None:
        """Registers the tables, oldest first."""
        paths = [(path.lstat().st_mtime_ns, path) for path in self._directory.glob(f"*{_SUFFIX}")]
        for _, path in sorted(paths):
            name, _, extra_id = path.name.removesuffix(_SUFFIX).rpartition(".")
            try:
                tables.put(read(path), table_id=name, extra_id=int(extra_id, 16))
            except (ProxyError, PromptTableError, OSError, ValueError) as error:
                log.warning("a saved prompt table is not used", file=str(path), error=str(error))

    def put(self, table: PromptTable) -> None:
        """Writes a table's file."""
        try:
            write(self._path(table), table.data)
        except OSError as error:
            log.warning(
                "a prompt table is not saved: a restart of kvpin loses it",
                table=table.table_id,
                error=error.strerror,
            )

    def delete(self, table: PromptTable) -> None:
        """Removes a table's file, if there is one."""
        try:
            self._path(table).unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "the file of a prompt table is not removed", table=table.table_id, error=error.strerror
            )

    def _path(self, table: PromptTable) -> Path:
        return self._directory / f"{table.table_id}.{table.extra_id:016x}{_SUFFIX}"


# --- the use of tenants on disk: `use` in `state_dir`. It outlives what makes `state` useless -----------
# `sealed`: a list of pairs, UseKey and Used.

_USE_HEAD = b"kvpin-use 1\n"
_USE_FILE, _UNREAD = "use", "use.unread"
_ARRAY = b"\xdd"  # of msgpack: its length in 4 bytes follows
_AT_ONCE = 2048


class UseFile:
    """The file of a use book."""

    def __init__(self, directory: Path, book: UseBook, left: Sequence[Path] = ()) -> None:
        """Puts what is in the file into `book`, and what is in those of the directories that workers `left`
        because there are more or fewer now. Of one that cannot be used, logs a warning."""
        self._path, self._book = directory / _USE_FILE, book
        self._saved = b""
        self._left = list[Path]()  # files that the first save makes superfluous
        for each in (directory, *left):
            rows = _rows(each)
            book.add(rows or ())
            if each is not directory and rows is not None:
                self._left.append(each / _USE_FILE)

    async def save(self) -> None:
        """Writes the book, if it has changed. Logs a failure."""
        self._book.prune()
        keys, pieces = list(self._book), list[bytes]()
        for at in range(0, len(keys), _AT_ONCE):  # 100,000 in a row would hold up the loop for 0.1 s
            pieces += (msgspec.msgpack.encode((key, self._book[key])) for key in keys[at : at + _AT_ONCE])
            await asyncio.sleep(0)
        data = sealed(_USE_HEAD, b"".join((_ARRAY, len(keys).to_bytes(4), *pieces)))
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
    path = directory / _USE_FILE
    try:
        return opened(_USE_HEAD, read(path), list[tuple[UseKey, Used]])
    except FileNotFoundError:
        pass
    except OSError as error:
        aside = directory / _UNREAD
        with suppress(OSError):
            path.replace(aside)
        log.warning(
            "the saved use of tenants cannot be read: counting begins anew", file=str(aside), why=str(error)
        )
    return None


# --- key book file --------------------------------------------------------------------------------------
# The key book on disk: `keys` in `state_dir`, which kvpins that share the directory write together.
# `sealed`: a list of IssuedKey.

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
            return opened(_HEAD, read(self._path), list[IssuedKey])
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SettingsError(
                f"state_dir: the keys in {str(self._path)!r} cannot be read: {error.strerror or error}; put "
                "a backup of the file in its place, or delete it to begin without issued keys"
            ) from error

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
        path, until = self._directory / _LOCK, time.monotonic() + _LOCK_S
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(lock, 0o600)  # an older kvpin let others open it, and lock it
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        why = f"another process has locked {str(path)!r} for {_LOCK_S:g} s"
                        raise TimeoutError(errno.ETIMEDOUT, why) from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(lock)
