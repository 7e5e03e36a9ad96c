"""Files about a server, beside its saved files: a lock, and records that outlive a crash of kvpin.

The lock keeps a second kvpin from the server's slots. The kernel frees it when the process that holds it
ends, however it ends. A kvpin that sees another directory, or none, does not see the lock.

A server that kvpin starts has a new port each time. So whoever takes a lock removes the files about servers
of this machine that are gone.
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
from typing import Generic, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import xxhash

from engine_adapter.errors import EngineTaken

# The salt of content that nobody here knows. It is new in each process: no request ever runs under it.
UNKNOWN_OWNER = uuid4().hex

_log = logging.getLogger("kvpin.llama_server")
_Content = TypeVar("_Content")
_CONNECT_S = 0.2
_LOCALHOST = re.compile(r"(?<=://)(localhost|\[::1\])(?=[:/]|$)")


class _Holder(msgspec.Struct, frozen=True):
    """The holder of a lock: its process and machine, the Unix time when it took it, the server's address."""

    pid: int
    host: str
    since: float
    url: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class ServerLock:
    """The lock of one server, which its address names. None for no directory is no lock."""

    def __init__(self, directory: Path | None, url: str) -> None:
        self._url = _LOCALHOST.sub("127.0.0.1", url)
        self._path = None if directory is None else _path(directory, self._url, "lock")
        self._file: FileIO | None = None  # open while the lock is held
        self._has_warned = False

    @property
    def is_possible(self) -> bool:
        """True if there is a place for the lock, as far as was tried."""
        return self._path is not None and not self._has_warned

    def take(self) -> None:
        """Takes the lock; it may be held here already. Where no lock can lie, nothing is locked. EngineTaken
        means that another kvpin holds it."""
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
            holder = str(_holder(file) or "a process that did not say which")
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
        if not _is_there(file, self._path):  # it was removed in between
            file.close()
            self.take()
            return
        self._file = file
        own = _Holder(os.getpid(), socket.gethostname(), time.time(), self._url)
        with suppress(OSError):  # a full disk: the lock holds, and only its holder is not known
            file.truncate(0)
            file.write(msgspec.json.encode(own))
            _remove_gone(self._path)

    def free(self) -> None:
        """Frees the lock, if it is held here."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            text = "%s cannot be locked (%s): a second kvpin on the same server would not be noticed"
            _log.warning(text, self._path, error.strerror)
        self._has_warned = True


def _holder(file: FileIO) -> _Holder | None:
    try:
        return msgspec.json.decode(file.read(), type=_Holder)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_there(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _remove_gone(own: Path) -> None:
    """Removes the files about other servers of this machine that no kvpin uses and that do not answer."""
    for path in own.parent.glob("kvpin-slots-*.lock"):
        if path == own:
            continue
        with suppress(OSError), FileIO(os.open(path, os.O_RDWR), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder = _holder(file)
            if holder is not None and holder.host == socket.gethostname() and _is_gone(holder.url):
                for each in path.parent.glob(f"{path.stem}.*"):
                    each.unlink()


def _is_gone(url: str) -> bool:
    """True if nothing listens at an address of this machine."""
    try:
        address = urlsplit(url)
        if address.hostname != "127.0.0.1" or address.port is None:
            return False
        with socket.create_connection((address.hostname, address.port), timeout=_CONNECT_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


class ServerRecord(Generic[_Content]):
    """One record, which only this user can read; none without a directory or `instance`. `instance` is the
    word of the server's process: a record of another process counts for nothing. `name` is what it is about,
    in its file's name and in logs; `kind` is the type of its content."""

    def __init__(
        self, directory: Path | None, url: str, instance: str | None, name: str, kind: type[_Content]
    ) -> None:
        self._path = None if directory is None or instance is None else _path(directory, url, name)
        self._instance, self._name, self._kind = instance or "", name, kind
        self._has_warned = False

    def read(self) -> _Content | None:
        """The content that was written about this process; None if there is none that can be read."""
        if self._path is not None:
            with suppress(OSError, msgspec.MsgspecError):
                raw = self._path.read_bytes()
                instance, content = msgspec.msgpack.decode(raw, type=tuple[str, msgspec.Raw])
                if instance == self._instance:
                    return msgspec.msgpack.decode(content, type=self._kind)
        return None

    def write(self, content: _Content) -> None:
        """Replaces the record. One that cannot be written is removed: its content no longer holds."""
        if self._path is None:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with open(part, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.msgpack.encode((self._instance, content)))
            part.replace(self._path)
        except OSError as error:
            if not self._has_warned:
                text = "%s cannot be written (%s): %s will not outlive kvpin"
                _log.warning(text, self._path, error.strerror, self._name)
            self._has_warned = True
            for each in (part, self._path):
                with suppress(OSError):
                    each.unlink(missing_ok=True)


def _path(directory: Path, url: str, suffix: str) -> Path:
    return directory / f"kvpin-slots-{xxhash.xxh3_64_hexdigest(url.encode())}.{suffix}"
