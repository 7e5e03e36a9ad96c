"""Proxies that serve HTTP to each other over Unix sockets."""

import contextlib
import socket

from proxy.http.http1 import Http1Protocol
from tests.fakes import serving


class OfPeer(Http1Protocol):
    is_of_peer = True
    __slots__ = ()


@contextlib.asynccontextmanager
async def reachable(proxy):
    """Serves a proxy to the other ones."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(proxy.peers.bus.http_socket))
        async with serving(proxy.site, listener, OfPeer):
            yield
