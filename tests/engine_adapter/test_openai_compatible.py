"""What engines do that the contract suite's own does not: no health route, no models, keys."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter import EngineRejected, EngineUnavailable
from tests.engines import served
from tests.fakes import FakeEngine


async def models(request: Request) -> JSONResponse:
    if request.headers.get("authorization") != "Bearer k":
        return JSONResponse({"error": "no key"}, 401)
    return JSONResponse({"data": [{"id": "m", "max_model_len": 512}, {"id": "n"}]})


def answering(status: int):
    return lambda _: JSONResponse({}, status)


@pytest.fixture
def connect(make):
    return lambda url, **fields: make("openai_compatible", url, **fields)


@pytest.mark.parametrize(
    "routes", [[], [Route("/health", answering(200))], [Route("/health", answering(401))]]
)
async def test_with_and_without_a_health_route(connect, routes):
    with served(Starlette(routes=[Route("/v1/models", models), *routes])) as url:
        adapter = connect(f"{url}/v1", api_key="k")
        info = await adapter.connect()
        assert (info.model, info.max_model_len, info.capabilities) == ("m", 512, frozenset())
        await adapter.load()


async def test_a_health_route_that_was_not_there_once_is_looked_for_at_the_next_connection(connect):
    """A proxy before the engine answers 404 while the engine is deployed."""
    status = [404]
    health = Route("/health", lambda _: JSONResponse({}, status[0]))
    with served(Starlette(routes=[Route("/v1/models", models), health])) as url:
        adapter = connect(url, api_key="k")
        await adapter.connect()
        status[0] = 200
        await adapter.connect()
        status[0] = 500
        with pytest.raises(EngineUnavailable, match="/health answered 500"):
            await adapter.load()


async def test_the_operator_names_model_and_tokenizer(connect):
    with served(Starlette(routes=[Route("/v1/models", models)])) as url:
        info = await connect(url, api_key="k", model="n", tokenizer="/t").connect()
    assert (info.model, info.tokenizer) == ("n", "/t")


@pytest.mark.parametrize(("status", "is_chat"), [(400, False), (200, False), (404, True), (405, True)])
async def test_responses_are_chats_where_the_engine_has_none(connect, status, is_chat):
    routes = [Route("/v1/models", models), Route("/v1/responses", answering(status), methods=["POST"])]
    with served(Starlette(routes=routes)) as url:
        info = await connect(url, api_key="k").connect()
    assert ("/v1/responses" in info.served_as_chats) == is_chat


async def test_an_engine_that_breaks_the_probe_off_has_no_responses(connect):
    async def serve(exchange):
        if exchange.target == "/v1/responses":
            exchange.die(abort=True)
        else:
            await exchange.send({"data": [{"id": "m"}]})

    async with FakeEngine("e", serve) as engine:
        info = await connect(engine.url).connect()
    assert "/v1/responses" in info.served_as_chats


async def test_a_wrong_key_is_told(connect):
    with served(Starlette(routes=[Route("/v1/models", models)])) as url:
        with pytest.raises(EngineRejected, match="no key") as caught:
            await connect(url).connect()
        with pytest.raises(EngineRejected):
            await connect(url).load()
    assert caught.value.status == 401


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_that_is_not_well(connect, status):
    with served(Starlette(routes=[Route("/health", answering(status))])) as url:
        adapter = connect(url)
        for call in (adapter.load, adapter.connect):
            with pytest.raises(EngineUnavailable):
                await call()
