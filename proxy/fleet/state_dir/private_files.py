"""Writes files whole or not at all, for this user alone, and reads only such files."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from proxy.settings import SettingsError

_PART = ".part"
# No file is longer.
MAX_BYTES = 2 << 30
# A part this old was left by a process that was killed; a younger one may be another kvpin's.
_LEFT_S = 600.0


def make_directory(directory: Path) -> None:
    """Makes the directory, which may exist, and removes parts of files that killed processes left there.
    Raises SettingsError if it cannot be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(directory / "writable", b"")
        (directory / "writable").unlink(missing_ok=True)  # another kvpin may do the same now
        for part in directory.glob(f"*{_PART}"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _LEFT_S:
                    part.unlink()
    except OSError as error:
        raise SettingsError(f"state_dir: {str(directory)!r} cannot be written: {error.strerror}") from error


def write(path: Path, data: bytes) -> None:
    """Replaces the file. Raises OSError; the old file stays then."""
    descriptor, part = mkstemp(suffix=_PART, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(part).replace(path)
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
