"""Where a request may go: to the pool of its model, or to the engine that made the response it names."""

from __future__ import annotations

from msgspec import Struct

from proxy.errors import NotFound
from proxy.errors.codes import Code
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.request.calls import Call
from proxy.request.translate import CONTINUING, RESPONSES_PATH, ResponseHome, ResponseHomes, response_named


class Destination(Struct, frozen=True):
    """Where a request may go.

    Attributes:
        pool: the engines that serve its model.
        model: the name by which they know the model; None for their own.
        home: the one engine that can serve it; None if all can.
    """

    pool: Pool
    model: str | None
    home: str | None = None


class Destinations:
    """Finds destinations, and remembers which engine made which response.

    Attributes:
        isolated: there are several tenants, who must not reach each other's responses.
    """

    def __init__(self, fleet: Fleet, *, isolated: bool) -> None:
        self._fleet = fleet
        self.isolated = isolated
        self._homes = ResponseHomes()

    def find(self, call: Call) -> Destination:
        """The destination of a request.

        A response that kvpin did not see may be on any engine. With several tenants it may be another
        tenant's, so it is refused.

        Raises:
            NotFound: nothing serves its model, or the response cannot be reached.
            NoEngine: no engine has connected yet, or an engine that may serve the model is still connecting.
        """
        name = response_named(call)
        home = self._homes.find(call.tenant, name) if name is not None else None
        if name is None:
            return Destination(*self._fleet.find(call.model))
        if home is not None:
            return self._at(home, call, name)
        if call.route in CONTINUING:
            pool, model = self._fleet.find(call.model)
            if self.isolated and RESPONSES_PATH not in pool.served_as_chats:
                raise _no_response(call, name)
            return Destination(pool, model)
        keepers = [each for each in self._fleet.pools.values() if RESPONSES_PATH not in each.served_as_chats]
        if self.isolated or len(keepers) != 1:
            raise _no_response(call, name)
        return Destination(keepers[0], None)

    def knows(self, tenant: str | None, response_id: str) -> bool:
        """Whether an engine has made that response for a tenant."""
        return self._homes.find(tenant, response_id) is not None

    def note(self, tenant: str | None, response_id: str, engine_id: str) -> None:
        """An engine has made a response for a tenant."""
        self._homes.keep(
            tenant, response_id, ResponseHome(engine_id, _instance_of(self._fleet.engines.get(engine_id)))
        )

    def _at(self, home: ResponseHome, call: Call, name: str) -> Destination:
        engine = self._fleet.engines.get(home.engine)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        if pool is None or _instance_of(engine) != home.instance:
            raise _no_response(call, name, f": engine {home.engine!r}, which made it, was restarted")
        model = self._fleet.find(call.model)[1] if call.model is not None else None
        return Destination(pool, model, home.engine)


def _instance_of(engine: Engine | None) -> str | None:
    """The engine's present process; None if the engine is gone or not connected."""
    return engine.info.instance if engine is not None and engine.info is not None else None


def _no_response(call: Call, name: str, why: str = "") -> NotFound:
    """The error for an unknown response. Another tenant's response gets the same error."""
    if call.route in CONTINUING:
        return NotFound(
            f"Previous response with id {name!r} not found{why}.",
            param="previous_response_id",
            code=Code.PREVIOUS_RESPONSE_NOT_FOUND,
        )
    return NotFound(f"Response with id {name!r} not found{why}.")
