"""CORS: which web pages may use the data plane from a browser (https://fetch.spec.whatwg.org/#http-cors-protocol).

A browser asks first with OPTIONS, the *preflight*, which carries no key. It shows a page an answer of another
origin only if the answer names that origin. kvpin reads no cookies, so it never allows credentials: an API
key in `authorization` is a header like any other.
"""

from __future__ import annotations

from collections.abc import Collection

from engine_adapter import HeaderPairs, Headers
from engine_adapter.http.web_pages import UNKNOWN
from proxy.errors import Forbidden

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
    """The headers of the answer to a preflight, beside those of every answer. All headers may be sent.

    Raises:
        Forbidden: pages of this origin may not use the data plane.
    """
    check_origin(cors, headers.get("origin"))
    asked = headers.get("access-control-request-headers")
    wanted = {"access-control-allow-headers": asked} if asked else {}
    return {"access-control-allow-methods": METHODS, **wanted, "access-control-max-age": _MAX_AGE}
