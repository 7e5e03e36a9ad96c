"""Finds out which web page asks. A browser on a machine reaches kvpin's port there for any page, and the
embedded engine's.

Browsers say where a request comes from: in `origin` with every POST and WebSocket, and in `sec-fetch-site`
with all requests to addresses that they trust. No script can set either. A page whose author points its name
to 127.0.0.1 (DNS rebinding) has this server's origin, as its browser sees it. The name in `host` tells it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from functools import lru_cache

from engine_adapter.http.prepare import Headers

Address = tuple[str, int] | None
"""Host and port; None for a socket that has none."""
UNKNOWN = "null"
"""The origin of pages that their browsers do not name, as browsers write it."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Values of `sec-fetch-site`: a page of this origin, or what a person typed.
_OF_OWN_PAGES = ("same-origin", "none")
# Kubernetes sets it in each pod. No browser runs there, and services have such names.
_IN_POD = "KUBERNETES_SERVICE_HOST"
_PORT = re.compile(r":\d*$")
# Domains that nobody can own on the internet: RFC 6761, and ICANN's resolution of 2024-07-29.
_PRIVATE = (".localhost", ".internal")
# Any machine of the network may take a name in it (RFC 6762), or a name without a dot.
_OF_NETWORK = ".local"


def page_asking(headers: Headers, scheme: Callable[[], str], here: Callable[[], Address]) -> str | None:
    """The origin of the web page that asks, if it may be another than this server's; None for other clients.

    Args:
        headers: those of the request.
        scheme: tells that of the connection.
        here: tells the address of this server's end of the connection. Few requests need either.
    """
    first = headers.first
    if (b"origin" in first or b"sec-fetch-site" in first) and not is_own_page(headers, scheme):
        return headers.get("origin", UNKNOWN)
    host = first.get(b"host", b"").decode("latin-1")
    name = _without_port(host) or "localhost"
    if name in LOCAL_NAMES or not _may_be_a_pages(name):
        return None
    address = here()
    if address is None or not is_loopback(address[0]):
        return None
    return f"{scheme()}://{host}".lower()


def is_own_page(headers: Mapping[str, str], scheme: Callable[[], str]) -> bool:
    """True if no web page asks, or one of this origin. Browsers do not send `origin` with every GET."""
    origin = headers.get("origin")
    is_own = origin is None or origin == f"{scheme()}://{headers.get('host', '')}".lower()
    return is_own and headers.get("sec-fetch-site", "none") in _OF_OWN_PAGES


def name_of(headers: Mapping[str, str]) -> str:
    """The host that a client asked for, without the port; HTTP/1.0 may leave it out."""
    return _without_port(headers.get("host", "")) or "localhost"


@lru_cache(maxsize=256)
def _without_port(host: str) -> str:
    return _PORT.sub("", host).lower()


def is_loopback(host: str) -> bool:
    """True if a host, by name or address, is this machine and no other can reach it there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _may_be_a_pages(name: str) -> bool:
    """True if a web page can have this name: it is neither an address, nor private, nor this machine's."""
    if name.endswith(_PRIVATE):
        return False
    if "." not in name or name.endswith(_OF_NETWORK):
        return name not in _own_names() and _IN_POD not in os.environ
    return not is_address(name)


def is_address(name: str) -> bool:
    """True if a host is named by its address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1)
def _own_names() -> tuple[str, str]:
    name = socket.gethostname().partition(".")[0].lower()
    return name, name + _OF_NETWORK
