"""The lock that keeps a second kvpin from a server's slots: a file in the directory of its saved files.

The kernel frees the lock when the process that holds it ends, however it ends. A kvpin that sees another
directory, or none, does not see the lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec
import xxhash

from engine_adapter.errors import EngineTaken

_log = logging.getLogger("kvpin.llama_server")

_LOCALHOST = re.compile(r"(?<=://)(localhost|\[::1\])(?=[:/]|$)")


class _Holder(msgspec.Struct, frozen=True):
    """The holder of a lock: its process, its machine, and the Unix time when it took the lock."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class ServerLock:
    """The lock of one server.

    Args:
        directory: where the lock lies, beside the saved files; None for no lock.
        url: address of the server, which names the lock.
    """

    def __init__(self, directory: Path | None, url: str) -> None:
        self._path: Path | None = None
        self._file: FileIO | None = None  # open while the lock is held
        self._has_warned = False
        if directory is not None:
            digest = xxhash.xxh3_64_hexdigest(_LOCALHOST.sub("127.0.0.1", url).encode())
            self._path = directory / f"kvpin-slots-{digest}.lock"

    @property
    def is_possible(self) -> bool:
        """Whether there is a place for the lock, as far as was tried."""
        return self._path is not None and not self._has_warned

    def take(self) -> None:
        """Takes the lock; it may be held here already. Where no lock can lie, nothing is locked.

        Raises:
            EngineTaken: another kvpin holds it.
        """
        if self._file is not None or self._path is None:
            return
        try:
            file = FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        except OSError as error:
            self._warn(error)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(file)
            file.close()
            raise EngineTaken(
                f"another kvpin uses it ({holder}), and its slots take only one: stop one of the two, or "
                "start both with the same --exchange",
                holder=holder,
            ) from None
        except OSError as error:
            file.close()
            self._warn(error)
            return
        self._file = file
        own = _Holder(os.getpid(), socket.gethostname(), time.time())
        with suppress(OSError):  # a full disk: the lock holds, and only its holder is not known
            file.truncate(0)
            file.write(msgspec.json.encode(own))

    def free(self) -> None:
        """Frees the lock, if it is held here."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s cannot be locked (%s): a second kvpin on the same server would not be noticed",
                self._path,
                error.strerror,
            )


def _read(file: FileIO) -> str:
    """The holder of the lock, for people."""
    try:
        return str(msgspec.json.decode(file.read(), type=_Holder))
    except (OSError, msgspec.MsgspecError):
        return "a process that did not say which"
