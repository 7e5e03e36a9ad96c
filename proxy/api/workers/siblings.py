"""The other workers of this kvpin, and other kvpins of this machine, asked over their sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine_adapter import HeaderPairs
from proxy.http.listeners import Door

# An operation may be waited for as long as a minute. Other requests leave a hanging worker out: `kvpin stats`
# itself waits 2 s for an engine, Prometheus 10 s for a page.
_ASK_S = 70.0
_SHOW_S = 5.0
_CONNECT_S = 1.0
_AGAIN_S = 1.0
# Sockets need no TLS. Without this, each client would load all certificate authorities.
_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The answer of one worker."""

    status: int
    headers: HeaderPairs
    body: bytes

    @property
    def is_good(self) -> bool:
        """True if its status is 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004 - HTTP


class Siblings:
    """Asks the other workers. A worker that does not run or answer in time is left out.

    Attributes:
        sockets: what they listen on while they run.
        own: what this worker listens on.
    """

    def __init__(self, sockets: Sequence[Path], own: Path | None = None) -> None:
        self.sockets, self.own = [str(path) for path in sockets], own
        self._clients = [_client(path) for path in self.sockets]

    async def ask(self, method: str, target: str, headers: HeaderPairs, body: bytes) -> list[WorkerAnswer]:
        """The answers of those that answer in time. The request is not passed on any further."""
        return await _ask(self._clients, method, target, headers, body)

    async def told(self, path: str) -> list[bytes]:
        """The other workers' answers at a path that only workers may ask."""
        return [answer.body for answer in await self.ask("GET", path, [], b"") if answer.is_good]

    def __len__(self) -> int:
        return len(self._clients)

    async def stream(self, number: int, target: str) -> AsyncIterator[bytes | None]:
        """Yields the stream of one of them, for ever: None whenever it ends, before it is asked for again."""
        while True:
            try:
                async with self._clients[number].stream("GET", target) as answer:
                    async for data in answer.aiter_raw():
                        yield data
            except httpx.TransportError:
                pass
            yield None
            await asyncio.sleep(_AGAIN_S)

    async def aclose(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))


class Neighbours:
    """Asks the kvpins of this machine that are there now: other workers, and those of the exchange."""

    def __init__(self, sockets: Callable[[], Iterable[str]]) -> None:
        """`sockets`: what they listen on."""
        self._sockets = sockets

    async def ask(self, method: str, target: str, headers: HeaderPairs, body: bytes) -> list[WorkerAnswer]:
        """See `Siblings.ask`."""
        clients = [_client(path) for path in self._sockets()]
        try:
            return await _ask(clients, method, target, headers, body)
        finally:
            await asyncio.gather(*(client.aclose() for client in clients))


def _client(path: str) -> httpx.AsyncClient:
    timeout = httpx.Timeout(_ASK_S, connect=_CONNECT_S)
    transport = httpx.AsyncHTTPTransport(uds=path, verify=_NO_AUTHORITIES)
    return httpx.AsyncClient(transport=transport, base_url="http://kvpin", timeout=timeout, trust_env=False)


async def _ask(
    clients: Iterable[httpx.AsyncClient], method: str, target: str, headers: HeaderPairs, body: bytes
) -> list[WorkerAnswer]:
    timeout = httpx.Timeout(_SHOW_S if method == "GET" else _ASK_S, connect=_CONNECT_S)

    async def of(client: httpx.AsyncClient) -> WorkerAnswer | None:
        try:
            answer = await client.request(method, target, headers=headers, content=body, timeout=timeout)
        except httpx.TransportError:
            return None
        return WorkerAnswer(answer.status_code, answer.headers.raw, answer.content)

    answers = await asyncio.gather(*map(of, clients))
    return [answer for answer in answers if answer is not None]


_MODE = 0o600
_BACKLOG = 1024


class PeerPort:
    """The Unix socket on which a kvpin serves HTTP to the other kvpins of its machine, until it is closed.

    Its requests are trusted: whoever makes them is the same user. Each says so by `is_from_peer`.
    """

    def __init__(self, path: Path, connect: Callable[[], asyncio.Protocol]) -> None:
        """Listens at `path`, in a directory that only its owner may open. `connect` makes the protocol
        of each connection. Raises OSError."""
        self._path, self._door = path, Door([_bound(path)], connect)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay."""
        self._door.close()
        self._path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    """A socket that listens at `path`, in place of one that a killed process left there."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(bound.fileno(), _MODE)  # the mode that the path gets
        path.unlink(missing_ok=True)
        bound.bind(str(path))
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound
