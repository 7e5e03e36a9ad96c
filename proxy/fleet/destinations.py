"""The destination of a request: the pool of its model, or the engine that keeps the response it names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from msgspec import Struct

from engine_adapter import ADAPTER_FIELDS, Finding, JsonBody, Rendezvous, Role
from engine_adapter.causes import Code
from proxy.errors import Forbidden, ModelRefused, NotFound
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import MAX_NAME, Fleet
from proxy.fleet.pool import Pool
from proxy.request.calls import Call
from proxy.request.known_routes import (
    CONTINUING,
    Home,
    NamedResponse,
    ResponseHomes,
    ResponseNoter,
    check_fields,
    check_items,
    response_of,
)
from proxy.request.translate import RESPONSES_PATH, may_name_more
from proxy.request.translate.responses_store import MAX_ID

# --- roles ----------------------------------------------------------------------------------------------
# What keeps a pool's engines from passing KV to each other, serving requests together, or sharing KV.

_KEEPS_NO_KV = (
    "it computed a prompt for another engine and kept no KV for it: until it restarts, it is in no pair"
)


def of_role(engine: Engine, pool: Pool | None) -> tuple[Finding, ...]:
    """The finding about an engine that kept no KV, or whose role has no counterpart in its pool. `pool`: None
    while it is not connected."""
    if pool is None:
        return ()
    transfer = engine.adapter.transfer
    if engine.keeps_no_kv and transfer is not None:
        return (Finding(_KEEPS_NO_KV, transfer.remedy),)
    if (rendezvous := engine.adapter.rendezvous) is not None:
        return _of_half(engine, rendezvous, pool)
    there = {each.role for each in pool.engines.values()} if engine.role is not Role.BOTH else set()
    if engine.role is Role.PREFILL and Role.DECODE not in there:
        use = "only when no other engine can" if Role.BOTH in there else "itself"
        return (_without(Role.DECODE, "prefills", f"it answers {use}"),)
    if engine.role is Role.DECODE and Role.PREFILL not in there:
        return (_without(Role.PREFILL, "decoding", "it computes all prompts"),)
    return ()


def of_sharing(engine: Engine, pool: Pool | None) -> tuple[Finding, ...]:
    """The finding about an engine whose KV tenants may share, beside engines whose KV they may not."""
    if pool is None or not engine.adapter.spec.share_kv or pool.shares_kv:
        return ()
    others = sorted(name for name, each in pool.engines.items() if not each.adapter.spec.share_kv)
    return (
        Finding(
            f"tenants may share its KV, and not that of {', '.join(others)}: all requests of its model have "
            "their tenant's salt",
            "set share_kv=true on all engines of the model, or on none that can keep tenants apart",
        ),
    )


def _without(role: Role, meant_for: str, follows: str) -> Finding:
    """The finding about an engine whose pool has none of the other `role` now."""
    return Finding(
        f"it is meant for {meant_for}, and no engine of its model with role={role} is connected: {follows}",
        f"start one, give another engine of the model role={role}, or take its role away",
    )


def _of_half(engine: Engine, rendezvous: Rendezvous, pool: Pool) -> tuple[Finding, ...]:
    """The finding about an engine that serves half of each request, and that no other one meets."""
    others = {
        each.role
        for each in pool.engines.values()
        if each.adapter.rendezvous is not None and each.adapter.rendezvous.name == rendezvous.name
    }
    if {Role.PREFILL, Role.DECODE} <= others:
        return ()
    other = "decode" if engine.role is Role.PREFILL else "prefill"
    does = f"it does only the {engine.role} half of each request"
    return (
        Finding(
            f"{does}, and no engine of its model the {other} half: it gets no requests", rendezvous.remedy
        ),
    )


# --- destinations ---------------------------------------------------------------------------------------

# Routes whose requests name further models in files.
_NAMING_UNSEEN = ("/v1/batches", "/v1/messages/batches")
_HEALTH = "/v1/health"
_PREVIOUS = "Previous response", Code.PREVIOUS_RESPONSE_NOT_FOUND


class Destination(Struct, frozen=True):
    """Where a request may go."""

    pool: Pool  # the engines that serve its model
    model: str | None  # the name by which they know the model; None for their own
    home: str | None = None  # the one engine that can serve it; None if all can


class Destinations:
    """Finds destinations, and remembers which engine keeps which responses of whom. `isolated`: there are
    several tenants, who must not reach what engines keep for others."""

    def __init__(self, fleet: Fleet, tenants: Iterable[str] = ()) -> None:
        """`tenants`: see `divide`."""
        self._fleet = fleet
        self._homes = ResponseHomes()
        self.divide(tenants)

    def divide(self, tenants: Iterable[str]) -> None:
        """There are only these tenants from now on. What is known of others' responses is forgotten."""
        names = frozenset(tenants)
        self.isolated = len(names) > 1
        self._homes.divide(names)

    def by_model_alone(self, call: Call) -> Destination | None:
        """The destination of a request that has only its model to go by, and a key for any; None for others,
        and for a model that nothing serves: see `find`."""
        if call.models is not None or self.isolated or call.model is None:
            return None
        pool = self._fleet.pools.get(call.model)
        if pool is None or not (isinstance(call.body, JsonBody) and call.body.is_plain):
            return None
        return Destination(pool, call.model)

    def find(self, call: Call) -> Coroutine[Any, Any, Destination]:
        """The destination of a request.

        Where its key names models, only these count: what else is served, or not, makes no difference to the
        error. A request that names no model needs a key for the one that it would get.

        Raises:
            ModelRefused: its key is not for that model.
            Forbidden: kvpin cannot see which models it will name, or it chooses an adapter beside its model.
            NotFound, Forbidden, BadRequest, msgspec.DecodeError, NoEngine: see `_find`.
        """
        return self._find(call) if call.models is None else self._find_of(call, call.models)

    async def _find_of(self, call: Call, models: frozenset[str]) -> Destination:
        if call.socket is not None or call.route.startswith(_NAMING_UNSEEN):
            what = "WebSockets and batches: kvpin does not see the models that they name"
            raise Forbidden(f"a key for some models cannot use {what}")
        if call.model is not None and call.model not in models:
            raise refused_model(call.model, models)
        for name in call.models_in_query - models:  # the engine may read another one than kvpin
            raise refused_model(name, models)
        if isinstance(call.body, JsonBody) and call.body.has_any(ADAPTER_FIELDS):
            raise Forbidden("a key for some models cannot choose an adapter by a field: name it as `model`")
        try:
            to = await self._find(call)
        except NotFound as error:
            if error.code is not Code.MODEL_NOT_FOUND:
                raise
            raise refused_model(call.model, models) from None
        names = {call.model} if call.model is not None else self._fleet.names_of(to.model or to.pool.model)
        is_elsewhere = (
            to.home is not None and call.model is not None and self._fleet.pool(call.model) is not to.pool
        )
        if is_elsewhere or models.isdisjoint(names):
            raise refused_model(call.model, models)
        return to

    async def _find(self, call: Call) -> Destination:
        """The destination of a request for any model.

        A response that kvpin did not see may be on any engine. With several tenants it may be another
        tenant's, so it is refused.

        Raises:
            NotFound: nothing serves its model, or a response cannot be reached.
            Forbidden: it names what may be another tenant's.
            msgspec.DecodeError: its body cannot be decoded.
            NoEngine: no engine has connected yet, or an engine that may serve the model is still connecting.
        """
        if self.isolated:
            await self._check(call)
        if (named := response_of(call)) is not None:
            if (home := self._homes.find(call.tenant, named.id)) is not None:
                return self._at(home, call, named)
            if not self.isolated:  # kvpin did not see it
                if call.route in CONTINUING:
                    return Destination(*self._fleet.find(call.model))
                pools = self._fleet.pools.values()
                keepers = [each for each in pools if RESPONSES_PATH not in each.served_as_chats]
                if len(keepers) != 1:
                    raise _no_response(named)
                return Destination(keepers[0], None)
            if not self._keeps_responses(call):
                raise _no_response(named)
        try:
            return self._by_model(call)
        except NotFound:
            if call.model is None or not await self._fleet.look_up():
                raise
            return self._by_model(call)

    def _by_model(self, call: Call) -> Destination:
        """The destination of a request that names no response. A read that names no model goes to that of its
        key, if the key is for one that is served, and for all its LoRA adapters, which the answer may show.
        Any other that names no model goes where its route is served, if only one pool serves it, or any may.
        Raises NotFound and NoEngine, see `Fleet.find`."""
        if call.model is None and call.models is not None and call.method in ("GET", "HEAD"):
            aliases, pools = self._fleet.served_aliases(), self._fleet.pools
            named = {aliases.get(name, name) for name in call.models}
            own = [pools[name] for name in named if name in pools]
            if len(own) == 1 and own[0].loras <= named:
                return Destination(own[0], None)
        if call.model is None and len(pools := self._fleet.pools) > 1:
            route = call.native or call.route
            able = [
                each for each in pools.values() if any(one.serves(route) for one in each.engines.values())
            ]
            if len(able) == 1 or (able and route == _HEALTH):
                return Destination(able[0], None)
        return Destination(*self._fleet.find(call.model))

    def knows(self, tenant: str | None, response_id: str) -> bool:
        """True if an engine keeps that response for a tenant."""
        return self._homes.find(tenant, response_id) is not None

    def note(self, tenant: str | None, response_id: str, engine_id: str) -> None:
        """An engine has made a response for a tenant."""
        home = Home(engine_id, _instance_of(self._fleet.engines.get(engine_id)))
        self._homes.keep(tenant, response_id, home)

    def noter(self, call: Call, engine_id: Callable[[], str]) -> ResponseNoter | None:
        """Notes the response that the answer to a request makes; None if it makes none.

        `engine_id` tells, once the answer has begun, which engine gives it.
        """
        if call.route != RESPONSES_PATH or call.method != "POST":
            return None
        tenant = call.tenant
        return ResponseNoter(lambda made: self.note(tenant, made, engine_id()))

    async def _check(self, call: Call) -> None:
        """Raises Forbidden if a request of one of several tenants names what engines keep."""
        await check_fields(call)
        body = call.body
        if not isinstance(body, JsonBody) or not call.route.startswith(RESPONSES_PATH):
            return
        if may_name_more(body) and not self._keeps_responses(call):
            await check_items(body)

    def _keeps_responses(self, call: Call) -> bool:
        """True if kvpin itself looks up what a request continues: engines of its model get chats."""
        return call.route in CONTINUING and RESPONSES_PATH in self._fleet.find(call.model)[0].served_as_chats

    def _at(self, home: Home, call: Call, named: NamedResponse) -> Destination:
        engine = self._fleet.engines.get(home.engine)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        if pool is None or _instance_of(engine) != home.instance:
            raise _no_response(named, f": engine {home.engine!r}, which made it, was restarted")
        model = self._fleet.find(call.model)[1] if call.model is not None else None
        return Destination(pool, model, home.engine)


def refused_model(model: str | None, models: frozenset[str]) -> ModelRefused:
    """The error of a request for a model that its key may not use, or that does not exist."""
    why = (
        "this key needs the name of a model, in the body or as ?model=NAME"
        if model is None
        else f"the model {model[:MAX_NAME]!r} does not exist, or this key may not use it"
    )
    others = ", ".join(sorted(models - {model})) or "no other model"
    return ModelRefused(f"{why}; for this key: {others}", param="model")


def _instance_of(engine: Engine | None) -> str | None:
    """The engine's present process; None if the engine is gone or not connected."""
    return engine.info.instance if engine is not None and engine.info is not None else None


def _no_response(named: NamedResponse, why: str = "") -> NotFound:
    """The error for an unknown response. Another tenant's response gets the same error."""
    what, code = ("Response", None) if named.param is None else _PREVIOUS
    return NotFound(f"{what} with id {named.id[:MAX_ID]!r} not found{why}.", param=named.param, code=code)
