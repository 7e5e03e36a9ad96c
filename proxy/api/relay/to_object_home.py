"""Responses that another kvpin of this machine knows: their requests are passed on to that one.

A kvpin keeps the responses that it served, and knows which engines keep those that it passed on. Where a
request names another one, the kvpins of the machine are asked side by side, with the client's key: each knows
only what that key may see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from urllib.parse import quote

from engine_adapter import EngineUnavailable, HttpTransport
from proxy.api.relay.pass_on import headers_of, pass_on
from proxy.api.workers.siblings import ask
from proxy.http.exchange import Exchange
from proxy.request.calls import Call, Reply
from proxy.request.translate import RESPONSES_PATH

# A kvpin that has not answered by then counts as not keeping the response.
ASK_S = 1.0
_ASKS = "HEAD"


class PassedToKeeper:
    """Finds the kvpin that keeps a response, and passes requests on to it."""

    def __init__(self, sockets: Callable[[], Sequence[str]], transport: HttpTransport) -> None:
        """`sockets`: where the other kvpins of this machine serve HTTP now."""
        self._sockets, self._transport = sockets, transport

    async def serve(
        self, response_id: str, call: Call, exchange: Exchange, reply: Reply, silent_s: float
    ) -> bool:
        """Lets the kvpin that keeps the response answer a request. It may be silent for `silent_s` seconds.
        False if there is none."""
        socket = await self._find(response_id, exchange)
        if socket is None:
            return False
        try:
            await pass_on(self._transport, socket, call, exchange, reply, silent_s)
        except EngineUnavailable:
            return False  # it went away, and with it what it kept
        return True

    async def _find(self, response_id: str, exchange: Exchange) -> str | None:
        """The socket of the kvpin that keeps a response; None if none says that it does."""
        target = f"{RESPONSES_PATH}/{quote(response_id, safe='')}"
        to = self._transport, self._sockets(), _ASKS, target, headers_of(exchange)
        keeps = (
            each.socket for each in await ask(*to, within_s=ASK_S) if each.status == HTTPStatus.NO_CONTENT
        )
        return next(keeps, None)


def is_asked(exchange: Exchange) -> bool:
    """True if another kvpin asks whether this one keeps a response."""
    return exchange.is_from_peer and exchange.method == _ASKS
