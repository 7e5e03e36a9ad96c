"""The other workers of this kvpin, and who of all speaks for all. Asks other kvpins of this machine."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from engine_adapter import EngineUnavailable, HeaderPairs, HttpTransport, OutgoingRequest
from proxy.http.listeners import Begin, Door

log = structlog.get_logger(__name__)

USES_PATH = "/workers/uses"
"""Where the supervisor asks a worker whether it uses the engine at an address; an empty answer means no."""
HOST = "http://kvpin"
"""The host of URLs that are asked over a Unix socket."""
# An operation may be waited for as long as a minute. Other requests leave a hanging worker out: `kvpin stats`
# itself waits 2 s for an engine, Prometheus 10 s for a page.
ASK_S = 70.0
_SHOW_S = 5.0
_LOCK = "speaker"
_NUMBER_BYTES = 2


def socket_of(directory: Path, number: int) -> Path:
    """What a worker listens on, in the supervisor's directory."""
    return directory / f"worker-{number}.http"


class Siblings:
    """The workers of one kvpin. One of them speaks for all, as long as it lives: it holds a lock, which the
    system takes from a process that ends. The first that asks for it after that speaks from then on.

    Attributes:
        own: what this worker listens on.
        sockets: what the others listen on while they run.
    """

    def __init__(self, directory: Path, number: int, of: int) -> None:
        """`number`: this worker, from 1 to `of`. `directory` is the supervisor's. Raises OSError."""
        self._directory, self.number = directory, number
        self.own = socket_of(directory, number)
        self.sockets = [str(socket_of(directory, each)) for each in range(1, of + 1) if each != number]
        self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._speaks = self._is_retired = False

    def speaks(self) -> bool:
        """True if this worker speaks for all. Takes that over if nobody does."""
        if not self._speaks:
            if self._is_retired:
                return False
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            os.pwrite(self._lock, self.number.to_bytes(_NUMBER_BYTES), 0)
            self._speaks = True
            log.info("this worker answers operators for all")
        return True

    @property
    def speaker(self) -> str:
        """What the one listens on that speaks for all. For a moment, it may be the one before."""
        return str(socket_of(self._directory, int.from_bytes(os.pread(self._lock, _NUMBER_BYTES, 0))))

    def retire(self) -> None:
        """This worker is about to stop: another one speaks for all from now on."""
        self._speaks, self._is_retired = False, True
        fcntl.flock(self._lock, fcntl.LOCK_UN)


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The answer of the kvpin that listens at `socket`."""

    socket: str
    status: int
    headers: HeaderPairs
    body: bytes

    @property
    def is_good(self) -> bool:
        """True if its status is 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004 - HTTP


async def ask(
    transport: HttpTransport,
    sockets: Iterable[str],
    method: str,
    target: str,
    headers: HeaderPairs = [],  # noqa: B006 - nobody changes it
    body: bytes = b"",
    *,
    within_s: float | None = None,
) -> list[PeerAnswer]:
    """The answers of those of the kvpins that run and answer in time, each for itself alone."""
    seconds = within_s or (_SHOW_S if method == "GET" else ASK_S)

    async def of(path: str) -> PeerAnswer | None:
        request = OutgoingRequest(method, f"{HOST}{target}", headers, body or None, unix=path)
        try:
            async with asyncio.timeout(seconds), await transport.send(request) as answer:
                return PeerAnswer(path, answer.status, answer.headers.raw, await answer.read())
        except (EngineUnavailable, TimeoutError):
            return None

    answers = await asyncio.gather(*map(of, sockets))
    return [answer for answer in answers if answer is not None]


_MODE = 0o600
_BACKLOG = 1024


class PeerPort:
    """The Unix socket on which a kvpin serves HTTP to the other kvpins of its machine, until it is closed.

    Its requests are trusted: whoever makes them is the same user. Each says so by `is_from_peer`."""

    def __init__(self, path: Path, begin: Begin) -> None:
        """Listens at `path`, in a directory that only its owner may open, in place of a socket that a killed
        process left there. Raises OSError."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(bound.fileno(), _MODE)  # the mode that the path gets
            path.unlink(missing_ok=True)
            bound.bind(str(path))
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise
        self._path, self._door = path, Door([bound], begin)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay."""
        self._door.close()
        self._path.unlink(missing_ok=True)
