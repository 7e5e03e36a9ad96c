"""Which paths reach which engine, as the very bytes that come over a socket."""

import asyncio
from dataclasses import replace

import pytest

from engine_adapter.llama_server.options import ROUTES as LLAMA
from engine_adapter.llama_server.options import SERVED
from engine_adapter.types import RESPONSES_ROUTES
from engine_adapter.vllm.options import ROUTES as VLLM
from proxy.fleet.engine import EngineState
from tests.fakes import (
    ASK,
    CHAT,
    INFO,
    FakeAdapter,
    FakeEngine,
    client_of,
    connect_to,
    is_openai_error,
    post,
    proxy_over,
)


async def raw(proxy, request: bytes) -> bytes:
    """What comes back for these very bytes."""
    reader, writer = await connect_to(proxy)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "path",
    [
        "load_lora_adapter", "unload_lora_adapter/", "load%5flora_adapter", "stream", "%73tream/",
        "/stream?from=0", "streams/lookup", "chat/completions/control", "chat/completions//control/?x=1",
    ],
)  # fmt: skip
async def test_what_changes_an_engine_or_running_answers_of_others(engine, client, path):
    """llama-server keeps streams by a name that its client chooses, and changes answers by their ids."""
    for method in ("GET", "POST"):
        answer = await client.request(method, f"/v1/{path}", json={"lora_name": "ada"})
        assert is_openai_error(answer, 404)
    assert not engine.seen


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../kv/flush", "/v1/%2e%2e/kv/flush", "/v1/%2E%2E%2Fkv/flush", "/v1/%252e%252e/kv/flush",
        "/v1/..;/kv/flush", "/v1/.;a=b/../kv", "/v1/x/../../kv/flush", "/v1\\..\\kv", "/v1/..\\kv/flush",
        "/v1/%5c..%5ckv", "/v1/./kv", "//v1/../kv/flush", "/v1/x%2f..%2f..%2fkv", "/v1/zażółć",
        "/kv/flush", "/slots", "/v2/x", "//kv/flush", "/V1/models",
    ],
)  # fmt: skip
async def test_a_path_that_climbs_or_is_not_under_v1(engine, proxy, path):
    content = await raw(proxy, post(path, b"{}").replace(path.encode("latin-1", "replace"), path.encode()))
    assert content.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
    assert not engine.seen


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1", ": OpenAI's API begins here; /v1/models lists the models"),
        ("/v1/", ": OpenAI's API begins here; /v1/models lists the models"),
        ("/v1/v1/chat/completions", ": write /v1 once, as the end of base_url"),
    ],
)
async def test_a_wrong_base_url(engine, client, path, hint):
    response = await client.get(path)
    assert is_openai_error(response, 404)
    assert response.json()["error"]["message"] == f"there is no route {path!r}{hint}"
    assert not engine.seen


async def test_a_base_url_of_anthropics_clients_that_ends_with_v1(engine, client):
    """They add /v1 themselves, and show errors in their own shape only."""
    response = await client.post("/v1/v1/messages", json={})
    assert (response.status_code, response.json()["type"]) == (404, "error")
    assert response.json()["error"] == {
        "type": "not_found_error",
        "message": "there is no route '/v1/v1/messages': Anthropic's clients add /v1 themselves: "
        "set base_url to http://HOST:PORT",
    }
    assert not engine.seen


_ODD = "/v1/files/a%2Fb%20c%7E~;p=1?q=%41&r=+%2B"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        (f"{CHAT}/", CHAT),
        (f"{CHAT}/?x=%41", f"{CHAT}?x=%41"),
        ("/v1//completions", "/v1//completions"),
        ("/v1/files/a/", "/v1/files/a/"),  # it names an object: only the engine knows it
        (_ODD, _ODD),
    ],
)
async def test_an_engine_gets_a_known_route_without_a_slash_at_its_end(engine, proxy, path, target):
    """FastAPI redirects a path with a slash at its end, and llama-server has no such route."""
    await raw(proxy, post(path, b'{"model": "m", "messages": [], "prompt": "a"}'))
    assert engine.seen[0].target == target


@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings?model=m"])
async def test_a_route_that_takes_only_post(engine, client, method, path):
    response = await client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, "POST, OPTIONS")
    if method != "HEAD":
        assert response.json()["error"]["message"] == f"{path.partition('?')[0]} takes POST, not {method}"
    assert not engine.seen


@pytest.mark.parametrize("keeps", [True, False])
async def test_chats_are_listed_by_engines_that_may_keep_them(engine, keeps):
    served_as_chats = frozenset[str]() if keeps else RESPONSES_ROUTES
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=served_as_chats))
    async with proxy_over(adapter) as proxy, client_of(proxy) as client:
        response = await client.get(CHAT)
    assert response.status_code == (200 if keeps else 405)
    assert len(engine.seen) == keeps


# --- routes beside `/v1`


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
