"""The directory of the workers' sockets and files: the supervisor's own, from start to end."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from proxy.peers.unix_bus import MAX_PATH_BYTES
from proxy.settings import SettingsError

# What comes after the place: the directory's name (`tempfile` adds 8 characters), and the longest name in it.
_PREFIX = "kvpin-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
_MORE_BYTES = len(f"/{_PREFIX}12345678/.0123456789abcdef.sock")


class OwnDirectory:
    """A directory that only its owner may open.

    While it is there, it is locked: systemd-tmpfiles removes old files of temporary directories, but nothing
    below a directory with a lock (tmpfiles.d(5)). Workers hold the lock, too: the directory of a supervisor
    that was killed is in use until the last of them has ended. The next supervisor removes it."""

    def __init__(self) -> None:
        """Makes it. Raises SettingsError if that is not possible."""
        for place in dict.fromkeys(_places()):
            _remove_left_in(place)
        self.path = _made()
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


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


def _remove_left_in(place: str) -> None:
    """Removes those of killed supervisors: of this user, with files of workers, and without a lock."""
    for path in Path(place).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # a lock, or another supervisor removes it
            is_left = path.lstat().st_uid == os.geteuid() and any(path.glob("worker-*.alive"))
            if not is_left or not _NAME.fullmatch(path.name):
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
