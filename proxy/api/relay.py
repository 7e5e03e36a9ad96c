"""Passes requests on to another kvpin: the one that owns the engine, or keeps the response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from math import inf
from time import monotonic
from urllib.parse import quote

from engine_adapter import (
    EngineDied,
    EngineGarbled,
    EngineUnavailable,
    HeaderPairs,
    HttpTransport,
    JsonBody,
    OutgoingRequest,
    Upload,
)
from proxy.api.siblings import HOST, ask
from proxy.errors import NoEngine, NotFound, TimeLimit
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.headers import CHANGED_HEADER
from proxy.http.exchange import Exchange
from proxy.peers.owners import ToldClaim
from proxy.peers.peers import Peers
from proxy.request.calls import Call, Reply
from proxy.request.translate import RESPONSES_PATH

# --- passes a request on to another kvpin of this machine -----------------------------------------------
# The request goes there unchanged, with the client's key, and the answer comes back unchanged. A request is
# passed on only once.

# Headers that end at each server, and those that the transport writes itself.
_OF_ONE_HOP = frozenset(
    {
        b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"te", b"trailer",
        b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
# Headers of an answer that this kvpin writes itself.
_OWN = frozenset({b"connection", b"date", b"keep-alive", b"trailer", b"transfer-encoding", b"upgrade"})
_CORS = b"access-control-"
_CHANGED = CHANGED_HEADER.encode()
_EVENTS = "text/event-stream"


async def pass_on(
    transport: HttpTransport, socket: str, call: Call, exchange: Exchange, reply: Reply, silent_s: float
) -> None:
    """Lets the kvpin that serves HTTP at `socket` answer a request.

    Args:
        transport: sends the request.
        socket: the other kvpin's.
        call: the request.
        exchange: the same, as its client sent it.
        reply: the way to the client.
        silent_s: how long the other kvpin may be silent. It has its own limits: this is for one that hangs.

    Raises:
        EngineUnavailable: it went away before its answer began.
        TimeLimit: it was silent for too long before that.
    """
    if call.socket is not None:
        silent_s = inf
    clock = asyncio.get_running_loop().time
    try:
        async with (
            asyncio.timeout_at(clock() + silent_s) as limit,
            # Nothing here keeps the request: its body may be long.
            await transport.send(_request(socket, call, exchange)) as response,
        ):
            if isinstance(call.body, JsonBody):
                call.body.forget()
            is_stream = response.headers.get("content-type", "").startswith(_EVENTS)
            await reply.start(response.status, _kept(response.headers.raw, call), is_events=is_stream)
            if call.socket is not None:
                await reply.write(b"")  # the client waits for the head before it sends
            while chunk := await response.receive():
                await reply.write(chunk)
                limit.reschedule(clock() + silent_s)
    except (EngineUnavailable, TimeoutError) as failed:
        text = (
            f"the kvpin that got the request was silent for {silent_s:g} s, the time of all attempts "
            "(timeouts.first_byte_s, limits.queue_s, retries)"
        )
        error = TimeLimit(text) if isinstance(failed, TimeoutError) else failed
        if not reply.started:
            raise error from failed
        reply.break_off(error, call.answer_id)
        return  # without an end, on purpose: clients take that for a whole answer
    await reply.finish()


def headers_of(exchange: Exchange) -> HeaderPairs:
    """The client's headers, as far as they are not those of its connection or its body's length."""
    return [pair for pair in exchange.headers.raw if pair[0] not in _OF_ONE_HOP]


def _request(socket: str, call: Call, exchange: Exchange) -> OutgoingRequest:
    """The client's request, for the other kvpin."""
    headers = headers_of(exchange)
    body = call.body.raw if isinstance(call.body, JsonBody) else None
    chunks = call.body.chunks if isinstance(call.body, Upload) else None
    if isinstance(call.body, Upload) and call.body.length is not None:
        headers.append((b"content-length", b"%d" % call.body.length))
    url = f"{HOST}{exchange.target.decode('latin-1')}"
    return OutgoingRequest(exchange.method, url, headers, chunks or body, socket=call.socket, unix=socket)


def _kept(headers: HeaderPairs, call: Call) -> HeaderPairs:
    """The headers of the other kvpin's answer, and what was changed in the body before it was passed on."""
    kept = [pair for pair in headers if pair[0] not in _OWN and not pair[0].startswith(_CORS)]
    return [*kept, (_CHANGED, ",".join(call.changed).encode())] if call.changed else kept


# --- passes requests on to the kvpin that uses an engine which only one kvpin may use -------------------
# While the engine changes hands, requests wait, but not for long. If the owner dies before the first byte
# of an answer, the request waits for the next owner.

# The longest wait for an engine that changes hands. That takes 0.1 to 2 s, and longer on a busy machine.
WAIT_S = 15.0
_POLL_S = 0.05
# A request that lost this many owners probably kills them: it is not passed on again.
_MAX_DROPPED = 2


class PassedToOwner:
    """Finds the kvpin that serves a request in place of this one, and passes the request on."""

    def __init__(self, fleet: Fleet, peers: Peers, transport: HttpTransport) -> None:
        self._fleet, self._peers, self._transport = fleet, peers, transport

    @property
    def models(self) -> frozenset[str]:
        """The models that other kvpins serve for this one."""
        told = self._peers.owners.elsewhere.values()
        return frozenset().union(*(each.models for each in told if each.socket is not None))

    def way(self, model: str | None, exchange: Exchange) -> ToldClaim | None:
        """The kvpin that gets a request for this model; None if the request stays here.

        A request stays here if this kvpin, or no kvpin, owns an engine of the model. Raises NoEngine: that
        kvpin cannot be reached, or another one has just passed the request on."""
        told = self._peers.owners.elsewhere
        if not told or self._is_served_here(model):
            return None
        to = self._owner_of(model, [*told.values()])
        if to is None:
            return None
        if exchange.is_from_peer:
            raise NoEngine("the engine has just gone to another kvpin; try again shortly")
        if to.socket is None:
            raise NoEngine(
                "another kvpin uses the engine of this model, and requests cannot be passed on to it: "
                f"send them to the kvpin {to.name}"
            )
        return to

    async def serve(
        self,
        model: str | None,
        call: Call,
        exchange: Exchange,
        reply: Reply,
        here: Callable[[], Awaitable[object]],
        silent_s: float,
    ) -> None:
        """Answers a request for a model: by `here` in this kvpin, or by the owner of its engine, which may be
        silent for `silent_s` seconds. Raises ProxyError, EngineError: the request failed before the answer
        began."""
        deadline, dropped = monotonic() + WAIT_S, 0
        while True:
            to, is_late = self.way(model, exchange), monotonic() > deadline
            waits = not is_late and (dropped or self._is_changing_hands) and not self._is_served_here(model)
            if to is None and not waits:
                await here()
                return
            if to is not None and to.socket is not None:
                try:
                    await pass_on(self._transport, to.socket, call, exchange, reply, silent_s)
                except EngineUnavailable as error:
                    if isinstance(error, (EngineDied, EngineGarbled)):  # it waits for the next owner
                        deadline, dropped, is_late = monotonic() + WAIT_S, dropped + 1, False
                    # What a client streams is gone once it is sent.
                    is_streamed = call.socket is not None or isinstance(call.body, Upload)
                    if is_late or dropped == _MAX_DROPPED or is_streamed:
                        raise NoEngine(
                            "the kvpin that uses the engine of this model went away; try again shortly"
                        ) from error
                else:
                    self._fleet.passed_on[to.name] += call.method == "POST"
                    return
            await asyncio.sleep(_POLL_S)

    @property
    def is_concerned(self) -> bool:
        """True if there are engines that only one kvpin may use."""
        return self._peers.owners.has_claimed

    @property
    def _is_changing_hands(self) -> bool:
        """True if an engine is not yet this kvpin's or another one's."""
        return any(
            engine.adapter.one_owner and engine.state is EngineState.CONNECTING
            for engine in self._fleet.engines.values()
        )

    def _is_served_here(self, model: str | None) -> bool:
        """False also for a name that only another kvpin knows: an engine that takes any name, or the default
        model, does not answer for it."""
        try:
            pool, served = self._fleet.find(model)
        except (NotFound, NoEngine):
            return False
        names = {model, self._fleet.aliases.get(model or "")} - {None}
        is_named = served is None or served in names
        told = self._peers.owners.elsewhere.values()
        return bool(pool.engines) and (is_named or all(names.isdisjoint(each.models) for each in told))

    def _owner_of(self, model: str | None, told: Sequence[ToldClaim]) -> ToldClaim | None:
        """The kvpin with the most engines of the model. Without own engines, this kvpin does not know the
        names of models: then the other kvpin looks the model up."""
        own = any(pool.engines for pool in self._fleet.pools.values())
        names = (model, self._fleet.aliases.get(model or ""), self._fleet.default_model)
        for name in names:
            if name is not None and (serving := [each for each in told if name in each.models]):
                return _first_of(serving)
        return None if own else _first_of(told)


def _first_of(told: Sequence[ToldClaim]) -> ToldClaim:
    names = [each.name for each in told]
    return max(told, key=lambda each: (each.socket is not None, names.count(each.name)))


# --- responses that another kvpin of this machine knows: their requests are passed on to that one -------
# A kvpin keeps the responses that it served, and knows which engines keep those that it passed on. Where a
# request names another one, the kvpins of the machine are asked side by side, with the client's key: each
# knows only what that key may see.

# A kvpin that has not answered by then counts as not keeping the response.
ASK_S = 1.0
_ASKS = "HEAD"


class PassedToKeeper:
    """Finds the kvpin that keeps a response, and passes requests on to it."""

    def __init__(self, sockets: Callable[[], Sequence[str]], transport: HttpTransport) -> None:
        """`sockets`: where the other kvpins of this machine serve HTTP now."""
        self._sockets, self._transport = sockets, transport

    async def serve(
        self,
        response_id: str,
        call: Call,
        exchange: Exchange,
        reply: Reply,
        here: Callable[[], Awaitable[object]],
        silent_s: float,
    ) -> None:
        """Answers a request: by the kvpin that keeps the response, which may be silent for `silent_s`
        seconds, or by `here` if there is none."""
        if (socket := await self._find(response_id, exchange)) is not None:
            with suppress(EngineUnavailable):  # it went away, and with it what it kept
                await pass_on(self._transport, socket, call, exchange, reply, silent_s)
                return
        await here()

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
