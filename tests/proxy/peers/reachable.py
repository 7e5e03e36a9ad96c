"""Proxies that serve HTTP to each other over Unix sockets."""

import contextlib
import socket

from tests.fakes import serving
from tests.kv_world import until


@contextlib.asynccontextmanager
async def reachable(proxy):
    """Serves a proxy to the other ones."""
    path = proxy.peers.bus.http_socket
    await until(path.parent.is_dir)  # the bus makes it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        async with serving(proxy.site, listener, is_of_peer=True):
            yield
