"""Writes files whole or not at all, for this user alone, and reads only such files."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

import xxhash

from proxy.settings import SettingsError

_PART = ".part"
# No file is longer.
MAX_BYTES = 2 << 30
# A part this old was left by a process that was killed; a younger one may be another kvpin's.
_LEFT_S = 600.0
_DIGEST_BYTES = 16
_ROOT = 0


class UnusableFileError(Exception):
    """The content of a file cannot be used. The text says why."""


def sealed(head: bytes, body: bytes) -> bytes:
    """A file's bytes: `head`, which is a line that names format and version; the digest of the body; the
    body."""
    return head + xxhash.xxh3_128_digest(body) + body


def opened(head: bytes, data: bytes) -> bytes:
    """The body of `sealed`. Raises UnusableFileError if it is damaged, or of another version."""
    if not data.startswith(head):
        is_other = data.startswith(head.partition(b" ")[0])
        raise UnusableFileError("another version of kvpin wrote it" if is_other else "it is damaged")
    body = data[len(head) + _DIGEST_BYTES :]
    if xxhash.xxh3_128_digest(body) != data[len(head) : len(head) + _DIGEST_BYTES]:
        raise UnusableFileError("it is damaged")
    return body


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


def write(path: Path, data: bytes, *, synced: bool = False) -> None:
    """Replaces the file. With `synced`, the new one outlives a crash of the machine. Raises OSError; the old
    file stays then."""
    descriptor, part = mkstemp(suffix=_PART, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        Path(part).replace(path)
        if synced:
            _sync(path.parent)
    except OSError:
        with suppress(OSError):
            Path(part).unlink()
        raise


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
