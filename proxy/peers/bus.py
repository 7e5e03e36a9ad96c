"""How frames reach the other kvpins: the seam, its Unix sockets, and the seal of operators' orders."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import msgspec
import structlog
from msgspec.structs import replace

from proxy.core.books import EngineMark, encode_marks
from proxy.runtime import until, within

# --- the seam between a kvpin and how frames reach the others -------------------------------------------


@dataclass(frozen=True, slots=True)
class BusCallbacks:
    """The callbacks of an exchange."""

    receive: Callable[[bytes], None]  # each frame that comes, in the order in which its sender published them
    joined: Callable[[], None]  # there is somebody new, or the exchange works again
    ended: Callable[[int], None] = lambda _kvpin: None  # the process of the kvpin of that number
    kept: Callable[[bytes | None], None] = lambda _data: None  # what `Bus.keep` left, as the exchange begins


class Bus(Protocol):
    """Carries frames to every other kvpin, at most once, in order. Frames may be lost."""

    dropped: int  # frames that were not sent because too much was waiting
    is_private: bool  # nobody but this user can read or write frames
    http_socket: Path | None  # serves HTTP to the other kvpins; None if none can reach it

    def reaches(self, socket: str) -> bool:
        """True if the HTTP socket that another kvpin announced is its own, on this machine."""

    @property
    def is_connected(self) -> bool:
        """True if frames go out."""

    @property
    def is_alone(self) -> bool:
        """True if it is known that there is no other kvpin."""

    def publish(self, frame: bytes) -> None:
        """Sends a frame soon. Never waits: if the buffer is full, the frame is dropped, which the others
        notice.
        """

    def keep(self, data: bytes) -> None:
        """Leaves data for kvpins that start when all others are gone. Replaces what was left before. Has no
        effect if the exchange keeps nothing."""

    async def run(self, callbacks: BusCallbacks) -> None:
        """Carries frames until it is cancelled. Logs when it stops working and when it works again. Raises
        OSError if it cannot work at all: it is run again a little later."""

    async def aclose(self) -> None:
        """Sends the waiting frames, but not for long."""


# --- seals operators' orders on an exchange that others than this user may read and write ---------------
# An engine that is added gets prompts. So a kvpin takes such an order only from one that has the same admin
# key, and tells no engine's key or headers. All other orders can do no more harm than the other messages.

# Settings of an engine that are told to nobody who may listen.
_SECRET = ("api_key", "headers")
NEEDS_KEY = "the key itself (admin_key_file), not its digest (sha256:…)"
"""What kvpins must be given to seal and to sign."""
_HASHED = "sha256:"


def secret_of(admin_key: str | None) -> bytes | None:
    """What seals and signs for the kvpins that have this admin key. None if the settings have none, or only
    its digest: that stands in files that others may read, and must open and sign nothing."""
    return None if admin_key is None or admin_key.startswith(_HASHED) else admin_key.encode()


def sealed_marks(marks: Iterable[EngineMark], key: bytes | None) -> list[EngineMark]:
    """Those that may be told to kvpins that have this key of `secret_of`, sealed."""
    return [
        replace(mark, seal=_seal(mark, key)) if mark.added and key else mark
        for mark in marks
        if not mark.added or (key and not any(map(msgspec.json.decode(mark.added).get, _SECRET)))
    ]


def proven_marks(marks: Iterable[EngineMark], key: bytes | None) -> list[EngineMark]:
    """Those that a kvpin with the same key told."""
    return [
        replace(mark, seal=b"")
        for mark in marks
        if not mark.added or (key and hmac.compare_digest(mark.seal, _seal(mark, key)))
    ]


def _seal(mark: EngineMark, key: bytes) -> bytes:
    return hmac.digest(key, encode_marks([replace(mark, seal=b"")]), hashlib.sha256)


# --- unix bus -------------------------------------------------------------------------------------------
# Frames between the kvpins of one machine: each listens on a socket in a directory and connects to the
# others that it finds there.
#
# A frame is its length in four bytes, then its bytes. Whoever can open the directory is trusted, so only its
# owner may.

log = structlog.get_logger(__name__)

_LOOK_S = 1.0
_LENGTH_BYTES = 4
# The suffix of the socket on which a kvpin serves HTTP.
_HTTP = ".http"
# Names of the sockets on which kvpins hear each other: the number of each.
_SOCKETS = "[0-9a-f]" * 16 + ".sock"
# A peer that does not read misses frames beyond this size.
OUTBOX_BYTES = 32 * 2**20
# No frame is longer: requests in flight and contents are told in parts.
MAX_FRAME_BYTES = 64 * 2**20
# Linux: `sun_path` has 108 bytes.
MAX_PATH_BYTES = 107
_CLOSE_S = 0.5


def prepare(directory: Path) -> None:
    """Makes the directory if it is missing. Raises OSError if it cannot be made, or others than its owner may
    open it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} must belong to the user who runs kvpin and be closed to others (chmod 700)"
        )


class UnixBus:
    """Carries frames over sockets in a directory, which is private, see `Bus`."""

    def __init__(self, directory: Path, owner: int) -> None:
        """`owner` names the socket. Raises ValueError if its path is too long."""
        self.dropped, self.is_private = 0, True
        self._directory = directory
        self._own = directory / f"{owner:016x}.sock"
        if len(os.fsencode(self._own)) + 1 > MAX_PATH_BYTES:  # a dot comes in front while it is made
            raise ValueError(f"the path {str(directory)!r} is too long for a socket")
        # The server makes and removes it; that of a kvpin that was killed is removed here.
        self.http_socket: Path | None = self._own.with_suffix(_HTTP)
        self._peers: dict[str, _Outgoing] = {}  # by the name of their socket
        self._incoming = set[_Incoming]()
        self._lost = set[str]()  # names of sockets whose connection ended since the last look
        self._unreachable = set[str]()  # names of sockets that could not be connected to at the last look
        self._look_now = asyncio.Event()
        self.is_connected = False

    @property
    def is_alone(self) -> bool:
        """True if there is no other kvpin in the directory."""
        return self.is_connected and not self._peers and not self._incoming

    def reaches(self, _socket: str) -> bool:
        """True: all kvpins in the directory are on this machine and of this user."""
        return True

    def publish(self, frame: bytes) -> None:
        """Sends a frame to each peer that has read enough of the earlier ones."""
        if not self._peers:
            return
        data = len(frame).to_bytes(_LENGTH_BYTES, "little") + frame
        for peer in self._peers.values():
            if peer.transport.get_write_buffer_size() + len(data) <= OUTBOX_BYTES:
                peer.transport.write(data)
            else:
                self.dropped += 1

    def keep(self, data: bytes) -> None:
        """Sockets keep nothing: `state_dir` does."""

    async def run(self, callbacks: BusCallbacks) -> None:
        """Listens, and looks for other kvpins every second. Raises OSError if it cannot listen."""
        prepare(self._directory)
        loop, hidden = asyncio.get_running_loop(), self._own.with_name(f".{self._own.name}")
        server = await loop.create_unix_server(
            lambda: _Incoming(self._incoming, self._look_now, callbacks), hidden
        )
        try:
            hidden.rename(self._own)  # it is seen only when it accepts connections
            while True:
                await self._look(callbacks)
                self.is_connected = True
                self._look_now.clear()
                await within(_LOOK_S, self._look_now.wait())
        finally:
            self.is_connected = False
            self._own.unlink(missing_ok=True)
            server.close()
            for peer in [*self._peers.values()]:
                peer.transport.abort()
            for connection in [*self._incoming]:
                connection.transport.abort()

    async def _look(self, callbacks: BusCallbacks) -> None:
        """Connects to kvpins that are new. Removes the sockets of those that are gone, and tells of them."""
        paths, lost = sorted(filter(Path.is_socket, self._directory.glob(_SOCKETS))), self._lost
        unreachable = self._unreachable
        self._lost, self._unreachable = set(), set()
        for name in lost - {path.name for path in paths}:
            callbacks.ended(_kvpin_of(name))
        for path in paths:
            if path == self._own or path.name in self._peers:
                continue
            peer = partial(_Outgoing, path.name, self._peers, self._lost_one)
            try:
                await asyncio.get_running_loop().create_unix_connection(peer, str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                path.with_suffix(_HTTP).unlink(missing_ok=True)
                callbacks.ended(_kvpin_of(path.name))
            except OSError as error:
                self._unreachable.add(path.name)
                if path.name not in unreachable:
                    log.warning("another kvpin cannot be reached", socket=str(path), error=str(error))
            else:
                callbacks.joined()

    def _lost_one(self, name: str) -> None:
        self._lost.add(name)
        self._look_now.set()

    async def aclose(self) -> None:
        """Waits until peers have read what was sent, but not for long."""
        peers = self._peers.values()
        await until(lambda: not any(each.transport.get_write_buffer_size() for each in peers), _CLOSE_S)


def _kvpin_of(name: str) -> int:
    """The number of the kvpin whose socket has this name."""
    return int(name.partition(".")[0], 16)


class _Outgoing(asyncio.Protocol):
    """The connection to one peer."""

    transport: asyncio.WriteTransport

    def __init__(self, name: str, peers: dict[str, _Outgoing], lost: Callable[[str], None]) -> None:
        self._name, self._peers, self._tell_lost = name, peers, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It reads from now on."""
        self.transport = cast("asyncio.WriteTransport", transport)
        self._peers[self._name] = self

    def connection_lost(self, _error: Exception | None) -> None:
        """It is gone, or starts anew."""
        self._peers.pop(self._name, None)
        self._tell_lost(self._name)


class _Incoming(asyncio.Protocol):
    """The connection that a peer made, on which its frames come."""

    transport: asyncio.Transport

    def __init__(
        self, all_incoming: set[_Incoming], look_now: asyncio.Event, callbacks: BusCallbacks
    ) -> None:
        self._all, self._look_now, self._callbacks = all_incoming, look_now, callbacks
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new kvpin connects: it listens, too."""
        self.transport = cast("asyncio.Transport", transport)
        self._all.add(self)
        self._look_now.set()

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            end = start + int.from_bytes(buffer[at:start], "little")
            if end - start > MAX_FRAME_BYTES:
                self.transport.abort()
                return
            if end > len(buffer):
                break
            self._callbacks.receive(bytes(buffer[start:end]))
            at = end
        del buffer[:at]

    def connection_lost(self, _error: Exception | None) -> None:
        """The peer is gone, or starts anew."""
        self._all.discard(self)
