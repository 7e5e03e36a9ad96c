"""The directory of the workers' sockets and files: the supervisor's own, from start to end."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from proxy.peers.unix_bus import MAX_PATH_BYTES
from proxy.settings import SettingsError

# What comes after the place: the directory's name (`tempfile` adds 8 characters), and the longest name in it.
_PREFIX = "kvpin-"
_MORE_BYTES = len(f"/{_PREFIX}12345678/.0123456789abcdef.sock")


class OwnDirectory:
    """A directory that only its owner may open.

    While it is there, it is locked: systemd-tmpfiles removes old files of temporary directories, but nothing
    below a directory with a lock (tmpfiles.d(5))."""

    def __init__(self) -> None:
        """Makes it. Raises SettingsError if that is not possible."""
        self.path = _made()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _made() -> Path:
    """A new directory in the first place that allows it: sockets need short paths, and TMPDIR may be long."""
    for place in _places():
        if len(os.fsencode(place)) + _MORE_BYTES <= MAX_PATH_BYTES:
            try:
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            except OSError:
                continue
    raise SettingsError(
        f"workers have no place for their sockets: TMPDIR must name a directory that can be written, with a "
        f"path of at most {MAX_PATH_BYTES - _MORE_BYTES} bytes"
    )


def _places() -> Iterator[str]:
    yield tempfile.gettempdir()
    if "XDG_RUNTIME_DIR" in os.environ:
        yield os.environ["XDG_RUNTIME_DIR"]
    yield from ("/tmp", "/dev/shm")  # noqa: S108 - `mkdtemp` makes a name that nobody knows
