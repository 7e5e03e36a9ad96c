"""The address of an engine's event socket, as this machine reaches it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

RANKS = "name it in the settings or in a source of engines, and kvpin uses each rank as an engine of its own"
"""How a server with several data-parallel ranks is used fully."""

WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - nothing is bound here
_LOOPBACKS = ("localhost", "127.", "[::1]")
_ADDRESS = re.compile(r"tcp://(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):\d{1,5}|ipc://\S+", re.ASCII)


def check_address(name: str, address: str | None) -> None:
    """Raises ValueError if the setting `name` is no ZMQ address that can be connected to."""
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ValueError(f"{name}: {address!r} is no address to connect to, such as tcp://HOST:PORT")


def reachable_endpoint(endpoint: str, engine_url: str) -> str | None:
    """Turns a socket's bind address into one to connect to; None if it is no ZMQ address, or if only the
    engine's machine can reach it.

    Args:
        endpoint: ZMQ address, e.g. `tcp://*:5557`; a wildcard becomes the engine's host.
        engine_url: address of the engine's HTTP server.
    """
    host = _host(engine_url)
    scheme, _, address = endpoint.partition("://")
    bound, _, port = address.rpartition(":")
    if scheme == "tcp" and bound in WILDCARDS:
        endpoint, bound = f"tcp://{host}:{port}", host
    is_local = scheme == "ipc" or _is_loopback(bound)
    if not _ADDRESS.fullmatch(endpoint) or (is_local and not _is_loopback(host)):
        return None
    return endpoint


def address_of_rank(address: str, rank: int) -> str:
    """The address of a data-parallel rank, where `address` is that of rank 0: each has the next port."""
    start, _, port = address.rpartition(":")
    return f"{start}:{int(port) + rank}" if port.isdecimal() else address


def _host(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    return host.startswith(_LOOPBACKS)
