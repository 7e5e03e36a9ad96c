"""Writes files whole or not at all, for this user alone."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from proxy.settings import SettingsError

_PART = ".part"
# A part this old was left by a process that was killed; a younger one may be another kvpin's.
_LEFT_S = 600.0


def make_directory(directory: Path) -> None:
    """Makes the directory, which may exist, and removes parts of files that killed processes left there.

    Raises:
        SettingsError: it cannot be written.
    """
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
