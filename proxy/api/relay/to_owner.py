"""Passes requests on to the kvpin that uses an engine which only one kvpin may use.

While the engine changes hands, requests wait, but not for long. If the owner dies before the first byte of an
answer, the request waits for the next owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from engine_adapter import EngineDied, EngineGarbled, EngineUnavailable, HttpTransport, Upload
from proxy.api.relay.pass_on import pass_on
from proxy.errors import NoEngine, NotFound
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.http.exchange import Exchange
from proxy.peers.owners import ToldClaim
from proxy.peers.peers import Peers
from proxy.request.calls import Call, Reply

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
        return frozenset(each.model for each in told if each.model is not None and each.socket is not None)

    def way(self, model: str | None, exchange: Exchange) -> ToldClaim | None:
        """The kvpin that gets a request for this model; None if the request stays here.

        A request stays here if this kvpin, or no kvpin, owns an engine of the model.

        Raises:
            NoEngine: that kvpin cannot be reached, or another one has just passed the request on.
        """
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
        silent for `silent_s` seconds.

        Raises:
            ProxyError, EngineError: the request failed before the answer began.
        """
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
                    if is_late or dropped == _MAX_DROPPED or not _is_repeatable(call):
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
        try:
            return bool(self._fleet.find(model)[0].engines)
        except (NotFound, NoEngine):
            return False

    def _owner_of(self, model: str | None, told: Sequence[ToldClaim]) -> ToldClaim | None:
        """The kvpin with the most engines of the model. Without own engines, this kvpin does not know the
        names of models: then the other kvpin looks the model up."""
        own = any(pool.engines for pool in self._fleet.pools.values())
        names = (model, self._fleet.aliases.get(model or ""), self._fleet.default_model)
        for name in names:
            if name is not None and (serving := [each for each in told if each.model == name]):
                return _first_of(serving)
        return None if own else _first_of(told)


def _is_repeatable(call: Call) -> bool:
    """True if another kvpin can get the same request: what a client streams is gone once it is sent."""
    return call.socket is None and not isinstance(call.body, Upload)


def _first_of(told: Sequence[ToldClaim]) -> ToldClaim:
    names = [each.name for each in told]
    return max(told, key=lambda each: (each.socket is not None, names.count(each.name)))
