"""Which requests are the data plane's."""

import contextlib
from dataclasses import replace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from engine_adapter import HttpTransport, Role
from engine_adapter.hold import Rendezvous
from proxy.api.dispatch import Dispatcher
from proxy.fleet.engine import EngineState
from proxy.server.app import Proxy, build_app
from proxy.settings import Settings
from tests.fakes import CHAT, FakeAdapter, connect_to, is_openai_error, post, serving


@pytest.mark.parametrize("path", [CHAT, "/%761/chat/completions", "/v1%2Fchat/completions", "/v1/x?a=/y"])
async def test_what_is_under_v1_however_it_is_spelt(engine, proxy, path):
    reader, writer = await connect_to(proxy)
    writer.write(post(path, b'{"model": "m"}'))
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [exchange.target for exchange in engine.seen] == [path]


async def test_the_rest_is_not(engine, client):
    assert (await client.get("/v1x/models")).status_code == 404
    assert is_openai_error(await client.get("/v1"), 404, "not_found")
    assert not engine.seen


async def echo(request: Request):
    body = await request.body()
    fields = dict(request.query_params), request.client.host, request.headers["x-one"]
    return JSONResponse([len(body), request.url.path, *fields])


async def parts(_request):
    async def pieces():
        for _ in range(3):
            yield b"x" * 100_000

    return StreamingResponse(pieces())


async def crash(_request):
    raise RuntimeError("a secret")


async def odd(_scope, _receive, _send):
    raise RuntimeError("a secret")


@contextlib.asynccontextmanager
async def beside(app):
    """A client of a site that has no data plane."""
    async with serving(Dispatcher(None, app)) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


@pytest.fixture
async def others():
    routes = [Route("/echo a", echo, methods=["POST"]), Route("/parts", parts)]
    async with beside(Starlette(routes=routes)) as client:
        yield client


@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_a_request_arrives_whole(others, size):
    answer = await others.post("/echo%20a?q=1", content=b"x" * size, headers={"x-one": "two"})
    assert answer.json() == [size, "/echo a", {"q": "1"}, "127.0.0.1", "two"]


@pytest.mark.parametrize("app", [Starlette(routes=[Route("/x", crash)]), odd], ids=["a route's", "its own"])
async def test_a_crash_of_the_application_is_a_500_that_tells_nothing(app):
    async with beside(app) as client:
        answer = await client.get("/x")
    assert (answer.status_code, "secret" in answer.text) == (500, False)


async def test_an_answer_comes_in_pieces(others):
    assert len((await others.get("/parts")).content) == 300_000


async def test_health_is_what_clients_of_an_engine_expect(proxy, client):
    for path in ("/health", "/health/live"):
        response = await client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    proxy.fleet.engines["a"].state = EngineState.DOWN
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "unavailable"})
    assert response.headers["retry-after"] == "1"
    assert (await client.get("/health/live")).status_code == 200  # kvpin itself is well


async def test_ready_while_an_engine_is(proxy, client):
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "engines": {"a": "ready"}})
    proxy.fleet.engines["a"].state = EngineState.SUSPECT
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()["engines"]) == (503, {"a": "suspect"})
    assert response.headers["retry-after"] == "1"


async def test_not_ready_before_every_engine_was_tried(proxy, client):
    proxy.add(FakeAdapter("b")).state = EngineState.CONNECTING
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()["engines"]) == (503, {"a": "ready", "b": "connecting"})
    proxy.fleet.engines["b"].state = EngineState.DOWN
    assert (await client.get("/health/ready")).status_code == 200


async def test_not_ready_without_any_engine(proxy, client):
    proxy.fleet.remove(proxy.fleet.engine("a"))
    assert "no engine is connected" in (await client.get("/health/ready")).json()["why"]
    proxy.fleet.book.remove("http://a", now=1.0)
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert "`kvpin engines` lists those that an operator has removed" in response.json()["why"]


async def test_not_ready_while_one_half_of_a_pair_is(proxy, client):
    engine = proxy.fleet.engines["a"]
    engine.adapter.spec = replace(engine.adapter.spec, role=Role.PREFILL)
    engine.adapter.rendezvous = Rendezvous("nixl", "", frozenset(), dict)
    proxy.fleet.join(engine, engine.info)
    engine.state = EngineState.READY
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()["engines"]) == (503, {"a": "ready"})
    assert "no engine that does the decode half of requests is ready" in response.json()["why"]
    assert (await client.get("/health")).status_code == 503


async def test_metrics_are_openmetrics_for_who_asks(client):
    asks = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"  # Prometheus
    response = await client.get("/metrics", headers={"accept": asks})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert {"kvpin_requests", "kvpin_engine_ready", "kvpin_restores_ahead"} <= names


async def test_metrics_need_a_key_where_there_are_tenants():
    """They tell what each of them does."""
    settings = Settings(api_keys=[{"key": "k1"}], metrics_key="scrape", admin_key="admin")
    proxy = Proxy(settings, HttpTransport())
    async with serving(build_app(proxy)) as url, httpx.AsyncClient(base_url=url) as client:
        for key, status in (("scrape", 200), ("admin", 200), ("k1", 401), ("other", 401)):
            headers = {"authorization": f"Bearer {key}", "x-request-id": "r"}
            answer = await client.get("/metrics", headers=headers)
            assert (answer.status_code, "kvpin_" in answer.text) == (status, status == 200)
        assert (answer.json()["error"]["code"], answer.headers["x-request-id"]) == ("invalid_api_key", "r")
    await proxy.transport.aclose()
