"""Requests for engines that only one kvpin may use, where another one does: they are passed on to that one.

The whole request goes there as the client sent it, with its key, and the answer comes back as it is. What was
passed on is never passed on again. While the engine changes hands, requests wait, but not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from engine_adapter import EngineUnavailable, HeaderPairs, JsonBody, OutgoingRequest, Transport, Upload
from proxy.api.exchange import Exchange
from proxy.errors import NoEngine, NotFound
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.peers.owners import ToldClaim
from proxy.peers.peers import Peers
from proxy.request.calls import Call, Reply
from proxy.request.forward import tell_broken

# The longest wait for an engine that changes hands. After a kvpin of the machine was killed, that takes 1 s.
WAIT_S = 4.0
_POLL_S = 0.05
# Headers that end at each server, and those that the transport writes itself.
_OF_ONE_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Headers of an answer that this kvpin writes itself.
_OWN = frozenset({b"connection", b"date", b"keep-alive", b"trailer", b"transfer-encoding", b"upgrade"})
_CORS = b"access-control-"
_EVENTS = "text/event-stream"


class Elsewhere:
    """Finds the kvpin that serves a request in place of this one, and passes the request on."""

    def __init__(self, fleet: Fleet, peers: Peers, transport: Transport) -> None:
        self._fleet, self._peers, self._transport = fleet, peers, transport

    @property
    def models(self) -> frozenset[str]:
        """The models that other kvpins serve for this one."""
        told = self._peers.elsewhere.values()
        return frozenset(each.model for each in told if each.model is not None and each.socket is not None)

    def way(self, model: str | None, exchange: Exchange) -> ToldClaim | None:
        """The kvpin to which a request for a model goes; None if it stays here.

        A request stays where an engine of its model is this kvpin's, or nobody's.

        Raises:
            NoEngine: that kvpin cannot be reached, or another one has just passed the request on.
        """
        told = self._peers.elsewhere
        if not told or self._is_served_here(model):
            return None
        to = self._owner_of(model, [*told.values()])
        if to is None:
            return None
        if exchange.is_from_peer:
            raise NoEngine("the engine has just gone to another kvpin; try again shortly")
        if to.socket is None:
            raise NoEngine(
                f"only the kvpin {to.name} may use the engine of this model, and this one cannot reach that "
                "kvpin: send the request there"
            )
        return to

    async def serve(
        self,
        model: str | None,
        call: Call,
        exchange: Exchange,
        reply: Reply,
        here: Callable[[], Awaitable[None]],
    ) -> None:
        """Lets this kvpin answer a request for a model, by `here`, or the one that uses its engine.

        Raises:
            ProxyError, EngineError: the request failed before the answer began.
        """
        deadline = monotonic() + WAIT_S
        while True:
            to, is_late = self.way(model, exchange), monotonic() > deadline
            if to is None and (is_late or not self._is_changing_hands(model)):
                return await here()
            if to is not None:
                try:
                    return await self.pass_on(to, call, exchange, reply)
                except EngineUnavailable as error:
                    if is_late or error.dropped or isinstance(call.body, Upload):
                        raise NoEngine(
                            f"the kvpin {to.name}, which uses the engine, went away; try again shortly"
                        ) from error
            await asyncio.sleep(_POLL_S)

    async def pass_on(self, to: ToldClaim, call: Call, exchange: Exchange, reply: Reply) -> None:
        """Lets another kvpin answer a request.

        Raises:
            EngineUnavailable: it went away before its answer began.
        """
        try:
            # Nothing here keeps the request: its body may be long.
            async with await self._transport.send(_request(to, call, exchange)) as response:
                if isinstance(call.body, JsonBody):
                    call.body.forget()
                is_stream = response.headers.get("content-type", "").startswith(_EVENTS)
                await reply.start(response.status, _kept(response.headers.raw))
                if call.socket is not None:
                    await reply.write(b"")  # the client waits for the head before it sends
                while chunk := await response.receive():
                    await reply.write(chunk)
        except EngineUnavailable as error:
            if not reply.started:
                raise
            if is_stream and not reply.complete:
                await tell_broken(reply, error)
            return  # without an end, on purpose: clients take that for a whole answer
        await reply.finish()

    @property
    def is_concerned(self) -> bool:
        """Whether there are engines that only one kvpin may use."""
        return self._peers.claims_engines

    def _is_changing_hands(self, model: str | None) -> bool:
        """Whether an engine that may serve the model is not yet this kvpin's or another one's."""
        coming = (
            engine.adapter.one_owner and engine.state is EngineState.CONNECTING
            for engine in self._fleet.engines.values()
        )
        return any(coming) and not self._is_served_here(model)

    def _is_served_here(self, model: str | None) -> bool:
        try:
            return bool(self._fleet.find(model)[0].engines)
        except (NotFound, NoEngine):
            return False

    def _owner_of(self, model: str | None, told: Sequence[ToldClaim]) -> ToldClaim | None:
        """The kvpin with the most engines of the model. Without engines of its own, this one does not know
        which names a model has: then any model is the others' to find."""
        own = any(pool.engines for pool in self._fleet.pools.values())
        names = (model, self._fleet.aliases.get(model or ""), self._fleet.default_model)
        for name in names:
            if name is not None and (serving := [each for each in told if each.model == name]):
                return _first_of(serving)
        return None if own else _first_of(told)


def _first_of(told: Sequence[ToldClaim]) -> ToldClaim:
    names = [each.name for each in told]
    return max(told, key=lambda each: (each.socket is not None, names.count(each.name)))


def _request(to: ToldClaim, call: Call, exchange: Exchange) -> OutgoingRequest:
    """The client's request, for the other kvpin."""
    headers = [pair for pair in exchange.headers.raw if pair[0] not in _OF_ONE_HOP]
    body = call.body.raw if isinstance(call.body, JsonBody) else None
    chunks = call.body.chunks if isinstance(call.body, Upload) else None
    if isinstance(call.body, Upload) and call.body.length is not None:
        headers.append((b"content-length", b"%d" % call.body.length))
    url = f"http://kvpin{exchange.target.decode('latin-1')}"
    return OutgoingRequest(exchange.method, url, headers, chunks or body, socket=call.socket, unix=to.socket)


def _kept(headers: HeaderPairs) -> HeaderPairs:
    return [pair for pair in headers if pair[0] not in _OWN and not pair[0].startswith(_CORS)]
