"""Keys: data and admin apart, compared in constant time; without an admin key, admin is for this machine."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from proxy.errors import Forbidden, Unauthorized
from proxy.request.tenants import Tenants

_KEY_HEADERS = ("authorization", "x-api-key")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def bearer(headers: Headers) -> str:
    """The key a client sent: `Authorization: Bearer K`, or Anthropic's `x-api-key: K`; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def authenticate(headers: Headers, tenants: Tenants) -> str | None:
    """The tenant a data-plane request belongs to. Raises Unauthorized when it needs a key and has none."""
    if tenants.open:
        return None
    key = bearer(headers)
    tenant = tenants.of_key(key) if key else None
    if tenant is None:
        raise Unauthorized("wrong API key" if key else "an API key is needed: Authorization: Bearer <key>")
    return tenant


def passed_on_headers(headers: Headers, tenants: Tenants) -> dict[str, str]:
    """A client's headers less the key it showed us; without keys of ours, its key is for the engine."""
    if tenants.open:
        return dict(headers)
    return {name: value for name, value in headers.items() if name not in _KEY_HEADERS}


class AdminGuard:
    """Lets admin requests in: with the admin key, or, when there is none, from this machine."""

    def __init__(self, admin_key: str | None) -> None:
        self._digest = hashlib.sha256(admin_key.encode()).digest() if admin_key else None

    def check(self, connection: HTTPConnection) -> None:
        """Raises Unauthorized or Forbidden."""
        if self._digest is None:
            _require_local(connection)
            return
        digest = hashlib.sha256(bearer(connection.headers).encode()).digest()
        if not hmac.compare_digest(self._digest, digest):
            raise Unauthorized("the admin API needs the admin key: Authorization: Bearer <key>")


def _require_local(connection: HTTPConnection) -> None:
    """The peer is this machine, and so is the name it asked for: a web page that rebinds a name to
    127.0.0.1, or posts across origins, runs in a local browser and would pass on the address alone."""
    host = connection.client.host if connection.client else ""
    named = re.sub(r":\d*$", "", connection.headers.get("host", "")).lower() or "localhost"
    if not is_loopback(host) or named not in _LOCAL_NAMES or "origin" in connection.headers:
        raise Forbidden(
            "without an admin key the admin API answers this machine only: start with --admin-key"
        )


def is_loopback(host: str) -> bool:
    """Whether a peer address is this machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
