"""Engines and statistics."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import EngineSpecError
from proxy.api.admin.endpoint import Endpoint, answer, read_body
from proxy.api.admin.request_bodies import Drain
from proxy.control.engines import (
    DrainedEngine,
    EngineAnswer,
    RemovalAnswer,
    RemovedEngine,
    describe_drained,
    describe_engine,
    names_served,
    warning_of,
)
from proxy.control.pinning import Pinning
from proxy.control.reconciler import Reconciler
from proxy.control.stats import Stats, stats
from proxy.errors import BadRequest
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.peers.peers import Peers
from proxy.settings import EngineSettings


class SourceAnswer(msgspec.Struct):
    """A source that kvpin finds engines in. `engines` are the ids that it named last. They may be
    old if there is an `error`."""

    source: str
    engines: list[str]
    error: str | None


class EngineList(msgspec.Struct):
    """All engines, and the sources that some of them were found in. `removed` are the engines that operators
    have removed, the last first: those that settings or sources name, and those of the last day."""

    engines: list[EngineAnswer]
    sources: list[SourceAnswer]
    removed: list[RemovedEngine]


def engine_routes(
    fleet: Fleet,
    reconciler: Reconciler,
    pinning: Pinning,
    peers: Peers | None = None,
    *,
    reuse: bool,
) -> tuple[Endpoint, ...]:
    """Lists, adds, removes and drains engines, and tells what they hold."""

    def named(request: Request) -> Engine:
        return fleet.engine(request.path_params["engine_id"])

    def is_told() -> bool:
        return peers is None or peers.bus.is_connected

    def described(engine: Engine) -> EngineAnswer:
        return describe_engine(engine, fleet.pool_of(engine))

    async def get_stats(_request: Request) -> Response:
        return answer(await stats(fleet, pinning.active(), peers, reuse=reuse))

    async def list_engines(_request: Request) -> Response:
        found = [
            SourceAnswer(source.name, [each.entry.id for each in source.found], source.error)
            for source in reconciler.sources.values()
        ]
        listed = [described(engine) for engine in fleet.engines.values()]
        return answer(EngineList(listed, found, reconciler.removed()))

    async def post_engine(request: Request) -> Response:
        settings = _settings(await read_body(request, dict[str, Any]))
        return answer(described(reconciler.add(settings)), 201)

    async def delete_engine(request: Request) -> Response:
        engine = named(request)
        names = names_served(engine, fleet)
        undo = f"they fail; {await reconciler.remove(engine)} brings {engine.id} back"
        warning = warning_of(fleet, names, undo, is_told=is_told())
        return answer(RemovalAnswer(id=engine.id, warning=warning))

    async def post_drain(request: Request) -> Response:
        body = await read_body(request, Drain)
        engine = reconciler.drain(named(request), undo=body.undo)
        return answer(describe_drained(engine, fleet, is_told=is_told()))

    return (
        Endpoint("GET", "/stats", get_stats, "What every pool and engine holds and has predicted.", Stats),
        Endpoint("GET", "/engines", list_engines, "All engines, and where they were found.", EngineList),
        Endpoint(
            "POST",
            "/engines",
            post_engine,
            "Adds an engine at all kvpins of the group; 409 when its id or its address is taken.",
            EngineAnswer,
            body=EngineSettings,
            statuses=(201,),
            others="follow",
        ),
        Endpoint(
            "DELETE",
            "/engines/{engine_id}",
            delete_engine,
            "Drops an engine at all kvpins of the group; its requests in flight go on to their end.",
            RemovalAnswer,
            others="follow",
        ),
        Endpoint(
            "POST",
            "/engines/{engine_id}/drain",
            post_drain,
            "No kvpin of the group sends the engine new requests; with `undo`, they do again.",
            DrainedEngine,
            body=Drain,
            others="follow",
        ),
    )


def _settings(body: dict[str, Any]) -> EngineSettings:
    """The engine that a body describes, checked as in the settings; raises BadRequest naming the field."""
    values = {name: value for name, value in body.items() if value is not None}
    try:
        return EngineSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # about several fields; the message names them
            raise BadRequest(message, param=first.get("ctx", {}).get("param")) from error
        name = str(first["loc"][0])
        if name == "kind" and message.startswith("unknown engine kind"):
            raise EngineSpecError(message) from error
        raise BadRequest(f"{name}: {message}", param=name) from error
