import time
from datetime import datetime

import pytest

from proxy.api.admin.engine_routes import engine_routes
from proxy.fleet.engine import EngineState
from proxy.peers.peers import Peers
from tests.fakes import FakeEngine
from tests.kv_world import tokens, until
from tests.proxy.peers.world import Wire


async def test_an_engine_comes_drains_and_goes(world, client):
    async with FakeEngine("a") as server:
        answer = await client.post("/engines", json={"kind": "openai-compatible", "url": server.url})
        assert (answer.status_code, answer.json()["id"]) == (201, "openai_compatible-0")
        engine = world.fleet.engine("openai_compatible-0")
        await until(lambda: engine.state is EngineState.READY)
        listed = (await client.get("/engines")).json()["engines"]
        assert [(e["id"], e["state"], e["model"]) for e in listed] == [(engine.id, "ready", "m")]
        drained = await client.post(f"/engines/{engine.id}/drain")
        assert drained.json()["state"] == "draining"
        assert drained.json()["warning"] == (
            "no engine takes requests for m now: they get 503 no_engine; "
            "kvpin engines drain openai_compatible-0 --undo ends that"
        )
        undone = await client.post(f"/engines/{engine.id}/drain", json={"undo": True})
        assert undone.json()["warning"] is None
        await until(lambda: engine.state is EngineState.READY)
        gone = await client.delete(f"/engines/{engine.id}")
        assert (gone.status_code, gone.json()["id"]) == (200, "openai_compatible-0")
        assert gone.json()["warning"] == (
            "no engine takes requests for m now: they fail; "
            "kvpin engines add KIND=URL brings openai_compatible-0 back"
        )
        listed = (await client.get("/engines")).json()
        assert (listed["engines"], listed["sources"]) == ([], [])
        (removed,) = listed["removed"]
        assert removed.pop("engine").startswith(server.url)
        assert abs(datetime.fromisoformat(removed.pop("removed")).timestamp() - time.time()) < 60
        assert removed == {"named": False, "undo": "kvpin engines add KIND=URL"}


async def test_the_last_engine_of_a_model_is_drained_with_a_warning(client, pair):
    async def drain(engine, **body):
        return (await client.post(f"/engines/{engine}/drain", json=body)).json()["warning"]

    assert await drain("a") is None
    assert (await drain("b")).startswith("no engine takes requests for m now: ")
    assert await drain("a", undo=True) is None
    assert await drain("b") is None  # a is back


async def test_a_drain_while_the_exchange_is_gone_has_a_warning(world, pair):
    bus = Wire([])
    peers = Peers(bus, 1, world.fleet, world.tenants)
    world.endpoints = engine_routes(world.fleet, world.proxy.engines, world.pinning, peers, reuse=True)
    async with world.client() as client:
        for bus.is_connected, warning in ((True, None), (False, "the exchange is gone: other kvpins follow")):
            told = (await client.post("/engines/a/drain")).json()["warning"]
            assert (told and told.partition(" this order")[0]) == warning
        assert (await client.delete("/engines/a")).json()["warning"].startswith(warning)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "vllm"}, "url"),
        ({"kind": "vllm", "url": "gpu1:8000"}, "url"),
        ({"kind": "vllm", "url": "http://u:p@gpu1"}, "url"),
        ({"kind": "vllm", "url": "http://gpu1", "id": "a b"}, "id"),
        ({"kind": "vllm", "url": "http://gpu1", "dp_rank": -1}, "dp_rank"),
        ({"kind": "llama_server", "url": "http://gpu1", "host_cache_bytes": 0}, "host_cache_bytes"),
        ({"kind": "llama_server", "url": "http://gpu1", "disk_cache_bytes": "lots"}, "disk_cache_bytes"),
        ({"kind": "vllm", "url": "http://gpu1", "nickname": "x"}, "nickname"),
        ({"kind": "vllm", "url": "http://gpu1", "host_cache_dir": "/mem"}, "host_cache_dir"),
    ],
)
async def test_a_wrong_description_names_its_field(client, body, param):
    answer = await client.post("/engines", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_ids_are_taken_once_and_kinds_are_known(client, pair):
    body = {"kind": "vllm", "url": "http://127.0.0.1:1", "id": "a"}
    assert (await client.post("/engines", json=body)).status_code == 409
    answer = await client.post("/engines", json={**body, "kind": "teapot", "id": "t"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_engine")
    for answer in (await client.delete("/engines/z"), await client.post("/engines/z/drain")):
        assert answer.status_code == 404


async def test_an_engines_key_is_not_shown(world, client):
    body = {"kind": "vllm", "url": "http://127.0.0.1:1", "id": "v", "api_key": "secret-key"}
    answer = await client.post("/engines", json=body | {"headers": "X-Team: secret-team"})
    assert "secret-" not in answer.text + (await client.get("/engines")).text
    spec = world.fleet.engine("v").adapter.spec
    assert (spec.api_key, spec.headers) == ("secret-key", {"X-Team": "secret-team"})


async def test_the_prefixes_of_the_last_prompts(world, client, pair):
    world.served(pair[0], tokens(64))
    world.record("r1", tokens(64))
    answer = (await client.get("/prefixes?depth=2&limit=5")).json()
    assert (answer["requests"], answer["tokens"]) == (1, 64)
    (only,) = answer["prefixes"]
    assert only["holders"] == [{"engine": "a", "tokens": {"gpu": 64}}]
    assert (await client.get(f"/prefixes?under={only['id']}")).json()["path"][0]["id"] == only["id"]


async def test_a_wrong_question_names_its_field(client, pair):
    for query, status, param in (
        ("depth=0", 400, "depth"),
        ("limit=501", 400, "limit"),
        ("under=x", 400, "under"),
        ("under=1", 404, "under"),
    ):
        answer = await client.get(f"/prefixes?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
