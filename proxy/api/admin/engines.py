"""Engines and statistics."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import EngineSpec
from proxy.api.admin.answers import EngineAnswer, Engines, Stats
from proxy.api.admin.bodies import AddEngine, Drain
from proxy.api.admin.endpoint import Endpoint, answer, read_body
from proxy.control import Control
from proxy.control.engines import add_engine, describe_engine, drain_engine, free_id, remove_engine
from proxy.control.stats import stats
from proxy.errors import BadRequest
from proxy.settings import EngineSettings


async def get_stats(control: Control, _request: Request) -> Response:
    """What everything holds."""
    return answer(Stats, await stats(control))


async def list_engines(control: Control, _request: Request) -> Response:
    """All engines."""
    engines = [describe_engine(control, engine) for engine in control.fleet.engines.values()]
    return answer(Engines, {"engines": engines})


async def post_engine(control: Control, request: Request) -> Response:
    """Takes an engine in."""
    body = await read_body(request, control.max_body_bytes, AddEngine)
    engine = add_engine(control, _spec(control, body))
    return answer(EngineAnswer, describe_engine(control, engine), 201)


async def delete_engine(control: Control, request: Request) -> Response:
    """Drops an engine."""
    await remove_engine(control, request.path_params["engine_id"])
    return Response(status_code=204)


async def post_drain(control: Control, request: Request) -> Response:
    """No new requests, or some again."""
    body = await read_body(request, control.max_body_bytes, Drain)
    engine = drain_engine(control, request.path_params["engine_id"], undo=body.undo)
    return answer(EngineAnswer, describe_engine(control, engine))


def _spec(control: Control, body: msgspec.Struct) -> EngineSpec:
    """Checked as the settings' own engines are; raises BadRequest naming the field."""
    values = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
    try:
        spec = EngineSettings.model_validate(values).spec()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # an option of its kind, named in the message
            raise BadRequest(message, param=first.get("ctx", {}).get("param")) from error
        name = str(first["loc"][0])
        raise BadRequest(f"{name}: {message}", param=name) from error
    return spec if spec.id else replace(spec, id=free_id(control, spec.kind))


ENDPOINTS = (
    Endpoint("GET", "/stats", get_stats, "What every pool and engine holds and has predicted.", Stats),
    Endpoint("GET", "/engines", list_engines, "All engines.", Engines),
    Endpoint(
        "POST",
        "/engines",
        post_engine,
        "Adds an engine and looks after it; 409 when its id is taken.",
        EngineAnswer,
        body=AddEngine,
        statuses=(201,),
    ),
    Endpoint(
        "DELETE",
        "/engines/{engine_id}",
        delete_engine,
        "Drops an engine that kvpin did not start; requests in flight on it end as they would.",
        None,
        statuses=(204,),
    ),
    Endpoint(
        "POST",
        "/engines/{engine_id}/drain",
        post_drain,
        "Gives an engine no new requests, or with `undo` some again.",
        EngineAnswer,
        body=Drain,
    ),
)
