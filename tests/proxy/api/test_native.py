"""Routes beside `/v1`: which requests reach which engine."""

from dataclasses import replace

import pytest

from engine_adapter.llama_server.options import ROUTES as LLAMA
from engine_adapter.llama_server.options import SERVED
from engine_adapter.vllm.options import ROUTES as VLLM
from proxy.fleet.engine import EngineState
from tests.fakes import ASK, INFO, FakeAdapter, FakeEngine, is_openai_error


@pytest.fixture
def engine_with_routes(proxy, engine):
    """The engine of the proxy declares llama-server's routes."""
    proxy.fleet.engines["a"].info = replace(INFO, routes=LLAMA)
    return engine


async def test_a_declared_route_reaches_the_engine_and_one_like_that_of_v1_becomes_it(
    engine_with_routes, client
):
    for path in ("/completion?x=1", "/chat/completions?x=1"):
        assert (await client.post(path, json=ASK)).status_code == 200
    assert (await client.get("/props")).status_code == 200
    assert (await client.get("/models")).json()["data"][0]["id"] == "m"
    seen = [(exchange.method, exchange.target) for exchange in engine_with_routes.seen]
    assert seen == [("POST", "/completion?x=1"), ("POST", "/v1/chat/completions?x=1"), ("GET", "/props")]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/props", 404, "not_found"),
        ("DELETE", "/slots", 404, "not_found"),
        ("GET", "/completion", 405, "method_not_allowed"),
        ("POST", "/pooling", 404, "not_found"),
    ],
    ids=["another method", "an operator's", "only POST", "of no engine"],
)
async def test_other_methods_and_routes_do_not(engine_with_routes, client, method, path, status, code):
    answer = await client.request(method, path, json={"model": "m"})
    assert is_openai_error(answer, status, code)
    if status == 405:
        told = await client.options(path)
        assert answer.headers["allow"] == told.headers["allow"] == "POST, OPTIONS"
    assert not engine_with_routes.seen


async def test_only_an_engine_that_has_the_route_gets_it(proxy, engine_with_routes, client):
    async with FakeEngine("b") as other:
        added = proxy.add(FakeAdapter("b", other.url))
        proxy.fleet.join(added, replace(INFO, routes=VLLM))
        added.state = EngineState.READY
        for _ in range(3):
            assert (await client.get("/version")).status_code == 200
            assert (await client.get("/slots")).status_code == 200
        assert {exchange.target for exchange in other.seen} == {"/version"}
        assert {exchange.target for exchange in engine_with_routes.seen} == {"/slots"}


async def test_a_lost_engine_may_have_the_route(proxy, engine_with_routes, client):
    proxy.fleet.leave(proxy.fleet.engines["a"])
    assert is_openai_error(await client.get("/props"), 503)


async def test_with_several_pools_the_query_names_the_model(proxy, engine_with_routes, client):
    other = proxy.add(FakeAdapter("b", model="n"))
    proxy.fleet.join(other, replace(INFO, model="n"))
    assert (await client.get("/props?model=m")).status_code == 200
    assert [exchange.target for exchange in engine_with_routes.seen] == ["/props?model=m"]
    other.info = replace(INFO, model="n", routes=LLAMA)
    assert is_openai_error(await client.get("/props"), 404, "model_not_found")


@pytest.mark.parametrize("default", [None, "n"])
async def test_without_a_name_the_only_model_whose_engines_have_the_route_serves_it(
    proxy, engine_with_routes, client, default
):
    other = proxy.add(FakeAdapter("b", model="n"))
    proxy.fleet.join(other, replace(INFO, model="n", routes=VLLM))
    proxy.fleet.default_model = default
    proxy.fleet.engines["a"].info = replace(INFO, routes=SERVED)
    assert (await client.post("/infill", json={"input_prefix": "a"})).status_code == 200
    assert (await client.get("/v1/health")).status_code == 200
    other.info = replace(INFO, model="n", routes=SERVED)
    assert (await client.get("/v1/health")).status_code == 200  # any may answer
    assert [exchange.target for exchange in engine_with_routes.seen] == ["/infill"] + ["/v1/health"] * 2
