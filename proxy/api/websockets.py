"""WebSockets: which ones kvpin passes on, and the keys that browsers send in their subprotocols.

Their frames are not read: their prompts get no tenant's salt, and nobody checks which responses they name. So
with several tenants, no WebSocket is passed on.
"""

from __future__ import annotations

from http import HTTPStatus

from typing_extensions import override

from engine_adapter import NATIVE_ROUTES, HeaderPairs, Headers, websocket
from proxy.errors import Forbidden, NotFound
from proxy.request.stages import Stage

_SUBPROTOCOLS = b"sec-websocket-protocol"
# A page cannot set headers on a WebSocket: OpenAI's API takes its key as a subprotocol.
_KEY = "openai-insecure-api-key."


def check_websocket(path: str, *, isolated: bool) -> None:
    """Raises NotFound for a WebSocket that no kind of engine has, and Forbidden if there are several tenants
    (`isolated`)."""
    route = path.partition("?")[0]
    if websocket(route) not in NATIVE_ROUTES:
        raise NotFound(f"there is no WebSocket {route!r}")
    if isolated:
        raise Forbidden(
            "kvpin passes no WebSockets on while it has several tenants: it could not keep their KV apart"
        )


def with_key(headers: Headers) -> Headers:
    """The headers of an opening handshake. A key among the subprotocols moves to `authorization`."""
    offered = _offered(headers)
    keys = [each for each in offered if each.startswith(_KEY)]
    if not keys:
        return headers
    kept = [pair for pair in headers.raw if pair[0] not in (_SUBPROTOCOLS, b"authorization")]
    kept.append((b"authorization", f"Bearer {keys[0].removeprefix(_KEY)}".encode("latin-1")))
    others = ", ".join(each for each in offered if each not in keys)
    return Headers([*kept, (_SUBPROTOCOLS, others.encode("latin-1"))] if others else kept)


class Subprotocol(Stage):
    """Gives the client of a WebSocket the first of its subprotocols if the engine chooses none: most engines
    know none, and without a choice browsers close the WebSocket again."""

    marks, reads_head = (), True

    def __init__(self, headers: Headers) -> None:
        """`headers`: those of the opening handshake, without a key."""
        self._first = next(iter(_offered(headers)), None)

    @override
    def begin(self, headers: HeaderPairs) -> HeaderPairs:
        is_chosen = any(name == _SUBPROTOCOLS for name, _ in headers)
        if self.status == HTTPStatus.SWITCHING_PROTOCOLS and self._first is not None and not is_chosen:
            return [*headers, (_SUBPROTOCOLS, self._first.encode("latin-1"))]
        return headers


def _offered(headers: Headers) -> list[str]:
    """The subprotocols that the client offers, best first."""
    lists = [value.decode("latin-1") for name, value in headers.raw if name == _SUBPROTOCOLS]
    return [each for text in lists for each in map(str.strip, text.split(",")) if each]
