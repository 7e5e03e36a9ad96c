"""Keys of clients and operators. Without an admin key, the admin API answers only this machine.

Keys are compared in constant time, by their digests.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping

from starlette.requests import HTTPConnection

from engine_adapter import PRIVATE_HEADERS, Headers
from proxy.errors import Forbidden, Unauthorized
from proxy.headers import FORWARDED_HEADERS, FORWARDED_PREFIX, KEY_HEADERS
from proxy.request.tenants import Tenants
from proxy.settings import key_digest

_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)
_OF_SEVERAL = _KEY_HEADERS | PRIVATE_HEADERS
# In an ASGI scope: another kvpin of this machine passes the request on.
FROM_PEER = "kvpin.from_peer"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Values of `sec-fetch-site`: a page of this origin, or what a person typed.
_OF_OWN_PAGES = ("same-origin", "none")


def bearer(headers: Mapping[str, str]) -> str:
    """The key a client sent: `Authorization: Bearer K`, or Anthropic's `x-api-key: K`; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def authenticate(headers: Headers, tenants: Tenants) -> str | None:
    """The tenant that a data-plane request belongs to; None where requests need no key.

    Raises:
        Unauthorized: a key is needed, and it is missing or wrong.
    """
    if tenants.open:
        return None
    key = bearer(headers)
    tenant = tenants.of_key(key) if key else None
    if tenant is None:
        raise Unauthorized(
            "wrong API key" if key else "an API key is needed: Authorization: Bearer <key>, or x-api-key"
        )
    return tenant


def passed_on_headers(headers: Headers, tenants: Tenants) -> Headers:
    """A client's headers without its kvpin key, without cookies, which are keys of other sites, and without
    those that may reach another tenant's request.

    Where kvpin has no keys, the client's key is the engine's. All engines take it in `authorization`, not all
    in `x-api-key`.
    """
    if not tenants.open:
        ends_here = _OF_SEVERAL if tenants.isolated else _KEY_HEADERS
        return Headers([pair for pair in headers.raw if pair[0] not in ends_here])
    key = headers.get("x-api-key")
    if key is None or headers.get("authorization") is not None:
        return headers
    kept = [pair for pair in headers.raw if pair[0] != b"x-api-key"]
    return Headers([*kept, (b"authorization", b"Bearer " + key.encode("latin-1"))])


class AdminGuard:
    """Checks admin requests: for the admin key, or, when there is none, that they come from this machine."""

    def __init__(self, admin_key: str | None) -> None:
        """`admin_key`: as itself or hashed; None for none."""
        self._digest = key_digest(admin_key) if admin_key else None

    def right(self, connection: HTTPConnection) -> str:
        """The right by which a request is let in, for the audit log."""
        if is_from_peer(connection):
            return "another kvpin"
        return "admin_key" if self._digest is not None else "this machine"

    def check(self, connection: HTTPConnection) -> None:
        """Raises Unauthorized for a missing or wrong key, Forbidden for another machine."""
        if is_from_peer(connection):
            return  # it checked the request itself
        if self._digest is None:
            _require_local(connection)
            return
        digest = hashlib.sha256(bearer(connection.headers).encode()).digest()
        if not hmac.compare_digest(self._digest, digest):
            raise Unauthorized("the admin API needs the admin key: Authorization: Bearer <key>")


def is_from_peer(connection: HTTPConnection) -> bool:
    """Whether another kvpin of this machine passes the request on, which is trusted."""
    return bool(connection.scope.get(FROM_PEER))


def _require_local(connection: HTTPConnection) -> None:
    """Raises Forbidden unless the peer and the host name it asked for are both this machine.

    The address alone is not enough. A web page in a local browser also has it, when it rebinds a name to
    127.0.0.1 or posts across origins. Of web pages, only kvpin's own gets in.
    """
    host = connection.client.host if connection.client else ""
    named = re.sub(r":\d*$", "", connection.headers.get("host", "")).lower() or "localhost"
    forwarded = [
        name for name in connection.headers if name in FORWARDED_HEADERS or name.startswith(FORWARDED_PREFIX)
    ]
    if forwarded:
        raise Forbidden(
            f"without an admin key, the admin API answers no request through a proxy ({forwarded[0]}): start "
            "kvpin with --admin-key"
        )
    if not is_loopback(host) or named not in _LOCAL_NAMES or not _is_own_page(connection):
        raise Forbidden(
            "without an admin key, the admin API answers only this machine: start kvpin with --admin-key"
        )


def _is_own_page(connection: HTTPConnection) -> bool:
    """Whether no web page asks, or one of this origin. Browsers send both headers, no script can set them,
    and `origin` is not sent with every GET."""
    headers = connection.headers
    own = f"{connection.scope['scheme']}://{headers.get('host', '')}".lower()
    return headers.get("origin", own) == own and headers.get("sec-fetch-site", "none") in _OF_OWN_PAGES


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
