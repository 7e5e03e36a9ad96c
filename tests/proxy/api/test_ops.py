import re
from dataclasses import replace

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from engine_adapter import HttpTransport, Role
from engine_adapter.hold import Rendezvous
from proxy.fleet.engine import EngineState
from proxy.server.app import Proxy, build_app
from proxy.settings import Settings
from tests.fakes import FakeAdapter, serving


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
