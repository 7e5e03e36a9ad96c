"""Which requests are the data plane's."""

import contextlib
import re
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


async def test_the_rest_is_not(engine, proxy, client):
    assert (await client.get("/health")).json() == {"status": "ok"}
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
    routes = [Route("/echo a", echo, methods=["POST"]), Route("/parts", parts), Route("/crash", crash)]
    async with beside(Starlette(routes=routes)) as client:
        yield client


@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_a_request_arrives_whole(others, size):
    answer = await others.post("/echo%20a?q=1", content=b"x" * size, headers={"x-one": "two"})
    assert answer.json() == [size, "/echo a", {"q": "1"}, "127.0.0.1", "two"]


async def test_a_crash_is_a_500_that_tells_nothing(others):
    answer = await others.get("/crash")
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert (await others.get("/parts")).status_code == 200


async def test_so_is_one_of_the_application_itself():
    async with beside(odd) as client:
        answer = await client.get("/x")
    assert (answer.status_code, "secret" in answer.text) == (500, False)


async def test_live_while_it_serves(proxy, client):
    proxy.fleet.engines["a"].state = EngineState.DOWN
    response = await client.get("/health/live")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_health_is_what_clients_of_an_engine_expect(proxy, client):
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    proxy.fleet.engines["a"].state = EngineState.DOWN
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "unavailable"})
    assert response.headers["retry-after"] == "1"


async def test_the_root_names_the_addresses_of_everything(client):
    page = (await client.get("/")).text
    named = re.findall(r"http://\S+", page.replace(";", " ").replace(":  ", " "))
    paths = {url.removeprefix(str(client.base_url)).strip("/:") for url in named}
    assert paths == {"v1", "admin/v1", "health", "health/live", "metrics"}


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
    proxy = Proxy(
        Settings(api_keys=[{"key": "k1"}], metrics_key="scrape", admin_key="admin"), HttpTransport()
    )
    async with serving(build_app(proxy)) as url, httpx.AsyncClient(base_url=url) as client:
        answers = {
            key: (await client.get("/metrics", headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("scrape", "admin", "k1", "other")
        }
        assert answers == {"scrape": 200, "admin": 200, "k1": 401, "other": 401}
        refused = await client.get("/metrics")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert "kvpin_" not in refused.text
    await proxy.transport.aclose()
