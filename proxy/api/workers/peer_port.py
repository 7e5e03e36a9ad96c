"""The Unix socket on which a kvpin serves HTTP to the other kvpins of its machine.

Its requests are trusted: whoever makes them is the same user. Each says so by `is_from_peer`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

_MODE = 0o600
_BACKLOG = 1024


class PeerPort:
    """A socket that accepts connections until it is closed."""

    def __init__(self, path: Path, server: asyncio.Server) -> None:
        self._path, self._server = path, server

    @classmethod
    async def open(cls, path: Path, connect: Callable[[], asyncio.Protocol]) -> PeerPort:
        """Listens at `path`, in a directory that only its owner may open. `connect` makes the protocol
        of each connection. Raises OSError."""
        listener = _bound(path)
        try:
            server = await asyncio.get_running_loop().create_unix_server(
                connect, sock=listener, backlog=_BACKLOG
            )
        except OSError:
            listener.close()
            raise
        return cls(path, server)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay."""
        self._server.close()
        self._path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    """A socket at `path`, in place of one that a killed process left there."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(bound.fileno(), _MODE)  # the mode that the path gets
        path.unlink(missing_ok=True)
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound
