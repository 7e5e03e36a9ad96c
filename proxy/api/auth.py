"""Who may use what: keys of clients and operators, and which web pages. Without an admin key, the admin
API answers only this machine."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections.abc import Collection, Mapping

import structlog
from starlette.requests import HTTPConnection

from engine_adapter import PRIVATE_HEADERS, HeaderPairs, Headers
from engine_adapter.http.web_pages import LOCAL_NAMES, UNKNOWN, is_loopback, is_own_page, name_of, page_asking
from proxy.errors import Forbidden, Unauthorized
from proxy.headers import FORWARDED_HEADERS, FORWARDED_PREFIX, KEY_HEADERS
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import key_digest

# --- keys of clients and operators. Without an admin key, the admin API answers only this machine -------
# Keys are compared in constant time, by their digests.

log = structlog.get_logger(__name__)

_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)
_OF_SEVERAL = _KEY_HEADERS | PRIVATE_HEADERS
# In an ASGI scope: another kvpin of this machine passes the request on.
FROM_PEER = "kvpin.from_peer"
# A wrong operator's key is answered after so long, one after the other.
_WRONG_S = 0.1
_WRONG_KEYS = "wrong keys for operators' routes: someone may be guessing, or a program has an old key"
# The log tells of wrong keys once in this time.
_TELL_S = 60.0


def bearer(headers: Mapping[str, str]) -> str:
    """The key a client sent: `Authorization: Bearer K`, or Anthropic's `x-api-key: K`; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def authenticate(headers: Headers, tenants: Tenants) -> ApiKey | None:
    """The key of a data-plane request, which tells its tenant; None where requests need no key. Raises
    Unauthorized: a key is needed, and it is missing, wrong or expired. Only who sends the whole key learns
    that it has expired."""
    if tenants.open:
        return None
    key = bearer(headers)
    known = tenants.find(key) if key else None
    if known is None:
        raise Unauthorized(
            "wrong API key" if key else "an API key is needed: Authorization: Bearer <key>, or x-api-key"
        )
    if known.has_expired(time.time()):
        raise Unauthorized("this API key has expired: ask for a new one")
    return known


def passed_on_headers(headers: Headers, tenants: Tenants) -> Headers:
    """A client's headers without its kvpin key, without cookies, which are keys of other sites, and without
    those that may reach another tenant's request.

    Where kvpin has no keys, the client's key is the engine's. All engines take it in `authorization`, not all
    in `x-api-key`."""
    if not tenants.open:
        ends_here = _OF_SEVERAL if tenants.isolated else _KEY_HEADERS
        return Headers([pair for pair in headers.raw if pair[0] not in ends_here])
    key = headers.get("x-api-key")
    if key is None or headers.get("authorization") is not None:
        return headers
    kept = [pair for pair in headers.raw if pair[0] != b"x-api-key"]
    return Headers([*kept, (b"authorization", b"Bearer " + key.encode("latin-1"))])


class WrongKeys:
    """Tells the log of requests without a right key: of the first at once, then once a minute, with their
    number and the last one's address. Each line costs disk, and whoever reaches kvpin can make some."""

    def __init__(self) -> None:
        self._count, self._told = 0, -math.inf
        self._last: dict[str, str | None] = {}
        self._due: asyncio.TimerHandle | None = None

    def tell(self, event: str, peer: str | None, **fields: str) -> None:
        """One more request came. Logs the `event`, now or when it is time."""
        self._count, self._last = self._count + 1, {"event": event, "peer": peer, **fields}
        wait_s = self._told + _TELL_S - time.monotonic()
        if wait_s <= 0:
            self._log()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(wait_s, self._log)

    def _log(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        log.warning(refused=self._count, **self._last)
        self._count, self._told = 0, time.monotonic()


class AdminGuard:
    """Checks requests of operators: for one of some keys, or, when there is none, that they come from this
    machine."""

    def __init__(self, *keys: str | None, what: str = "the admin API", needs: str = "the admin key") -> None:
        """`keys`: as themselves or hashed; None for none. `what` they open and what that
        `needs` are for errors."""
        self._digests = [key_digest(key) for key in keys if key]
        self._what, self._needs = what, needs
        self._turn, self._wrong = asyncio.Lock(), WrongKeys()

    def right(self, connection: HTTPConnection) -> str:
        """The right by which a request is let in, for the audit log."""
        if is_from_peer(connection):
            return "another kvpin"
        return "admin_key" if self._digests else "this machine"

    async def admit(self, connection: HTTPConnection) -> None:
        """Like `check`. Wrong keys are answered one after the other, ten a second, and the log tells of them
        once a minute."""
        try:
            self.check(connection)
        except Unauthorized:
            if bearer(connection.headers):
                peer = connection.client.host if connection.client is not None else None
                self._wrong.tell(_WRONG_KEYS, peer, what=self._what)
                async with self._turn:
                    await asyncio.sleep(_WRONG_S)
            raise

    def check(self, connection: HTTPConnection) -> None:
        """Raises Unauthorized for a missing or wrong key, Forbidden for another machine."""
        if is_from_peer(connection):
            return  # it checked the request itself
        if not self._digests:
            self._require_local(connection)
            return
        given = hashlib.sha256(bearer(connection.headers).encode()).digest()
        if not any(hmac.compare_digest(each, given) for each in self._digests):
            raise Unauthorized(f"{self._what} needs {self._needs}: Authorization: Bearer <key>")

    def _require_local(self, connection: HTTPConnection) -> None:
        """Raises Forbidden unless the peer and the host name it asked for are both this machine.

        The address alone is not enough. A web page in a local browser also has it, when it rebinds a name to
        127.0.0.1 or posts across origins. Of web pages, only kvpin's own gets in."""
        host = connection.client.host if connection.client else ""
        headers = connection.headers
        for name in headers:
            if name in FORWARDED_HEADERS or name.startswith(FORWARDED_PREFIX):
                raise Forbidden(
                    f"without an admin key, {self._what} answers no request through a proxy ({name}): "
                    "start kvpin with --admin-key"
                )
        is_here = is_loopback(host) and name_of(headers) in LOCAL_NAMES
        if not (is_here and is_own_page(headers, lambda: connection.scope["scheme"])):
            raise Forbidden(
                f"without an admin key, {self._what} answers only this machine: start kvpin with --admin-key"
            )


class MetricsGuard:
    """Checks requests for `/metrics`. Where there are no tenants to spy on, it needs no key."""

    def __init__(self, admin_key: str | None, metrics_key: str | None, tenants: Tenants) -> None:
        """The keys: as themselves or hashed; None for none."""
        names = {"what": "/metrics", "needs": "the admin key or metrics_key"}
        self._guard = AdminGuard(admin_key, metrics_key, **names)
        self._has_own_key, self._tenants = metrics_key is not None, tenants

    async def admit(self, connection: HTTPConnection) -> None:
        """Raises Unauthorized for a missing or wrong key, Forbidden for another machine or a web page."""
        if self._has_own_key or not self._tenants.open:
            await self._guard.admit(connection)
        elif not is_from_peer(connection):
            scope = connection.scope
            page = page_asking(
                Headers(connection.headers.raw), lambda: scope["scheme"], lambda: scope["server"]
            )
            if page is not None:
                raise Forbidden("/metrics answers no web page: ask as http://127.0.0.1, or set metrics_key")


def is_from_peer(connection: HTTPConnection) -> bool:
    """True if another kvpin of this machine passes the request on, which is trusted."""
    return bool(connection.scope.get(FROM_PEER))


# --- cors -----------------------------------------------------------------------------------------------
# CORS: which web pages may use the data plane from a browser (https://fetch.spec.whatwg.org/#http-cors-
# protocol).
#
# A browser asks first with OPTIONS, the *preflight*, which carries no key. It shows a page an answer of
# another origin only if the answer names that origin. kvpin reads no cookies, so it never allows
# credentials: an API key in `authorization` is a header like any other.

SERVED = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""Methods of the data plane. Engines get no others: TRACE would repeat kvpin's key for the engine."""
METHODS = ", ".join(SERVED)
# Seconds for which a browser need not ask again.
_MAX_AGE = "600"
_ORIGIN = b"access-control-allow-origin"
# A page may read all headers of an answer, `x-request-id` and kvpin's own among them.
_EXPOSED = (b"access-control-expose-headers", b"*")
# A cache must not give one origin the answer to another.
_VARIES = (b"vary", b"origin")


class Cors:
    """The origins whose pages may use the data plane."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: as browsers send them; `*` stands for all."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._is_open = b"*" in self._origins

    def headers(self, request: Headers) -> HeaderPairs:
        """The headers of every answer to this request."""
        if self._is_open:
            return [(_ORIGIN, b"*"), _EXPOSED]
        origin = request.get("origin", "").encode("latin-1")
        return [(_ORIGIN, origin), _EXPOSED, _VARIES] if origin in self._origins else [_VARIES]

    def allows(self, origin: str) -> bool:
        """True if pages of this origin may use the data plane."""
        return self._is_open or origin.encode("latin-1") in self._origins


def is_preflight(headers: Headers) -> bool:
    """True if an OPTIONS asks what a page may send."""
    return "origin" in headers and "access-control-request-method" in headers


def check_origin(cors: Cors | None, origin: str | None) -> None:
    """Raises Forbidden for a page whose origin may not use the data plane. None: no page asks."""
    if origin is not None and (cors is None or not cors.allows(origin)):
        if origin == UNKNOWN:
            # Any page can have this origin, so that no narrower flag would help.
            why = "pages whose browser does not name their origin may not use kvpin"
            raise Forbidden(f"{why}: start it with --cors-origin '*', which allows all pages")
        raise Forbidden(f"pages of {origin!r} may not use kvpin: start it with --cors-origin {origin}")


def preflight(cors: Cors | None, headers: Headers) -> dict[str, str]:
    """The headers of the answer to a preflight, beside those of every answer. All headers may be sent. Raises
    Forbidden: pages of this origin may not use the data plane."""
    check_origin(cors, headers.get("origin"))
    asked = headers.get("access-control-request-headers")
    wanted = {"access-control-allow-headers": asked} if asked else {}
    return {"access-control-allow-methods": METHODS, **wanted, "access-control-max-age": _MAX_AGE}
