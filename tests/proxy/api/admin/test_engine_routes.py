import time
from datetime import datetime

import pytest

from engine_adapter import Capability
from proxy.fleet.engine import EngineState
from tests.fakes import FakeEngine
from tests.kv_world import ALL, KvFake, tokens, until


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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "vllm"}, "url"),
        ({"kind": "vllm", "url": "gpu1:8000"}, "url"),
        ({"kind": "vllm", "url": "http://gpu1", "id": "a b"}, "id"),
        ({"kind": "vllm", "url": "http://gpu1", "dp_rank": -1}, "dp_rank"),
        ({"kind": "llama_server", "url": "http://gpu1", "host_cache_bytes": 0}, "host_cache_bytes"),
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


NO_EVENTS = ALL - {Capability.KV_EVENTS}


async def test_one_that_does_not_is_202_and_can_be_followed(world, client, pair):
    world.served(pair[0], tokens(64))
    pair[0].gate.clear()
    answer = await client.post("/offload", json={"engine": "a", "wait_s": 0})
    assert answer.status_code == 202
    path = f"/operations/{answer.json()['id']}"
    running = (await client.get(path)).json()
    assert (running["state"], running["finished"]) == ("running", None)
    pair[0].gate.set()
    operation = world.operations.newest()[0]
    assert await operation.wait(5)
    assert (await client.get(path)).json()["engines"][0]["done"] == 4
    listed = (await client.get("/operations")).json()["operations"]
    assert [o["id"] for o in listed] == [answer.json()["id"]]


async def test_one_that_fails_on_an_engine_is_502_and_says_on_which(world, client):
    for fake in (KvFake("a", NO_EVENTS), KvFake("b", NO_EVENTS - {Capability.OFFLOAD})):
        world.add(fake)
        world.served(fake, tokens(32))
    answer = await client.post("/offload", json={"all": True})
    operation = answer.json()
    assert (answer.status_code, operation["state"]) == (502, "failed")
    assert {part["engine"]: part["state"] for part in operation["engines"]} == {"a": "done", "b": "failed"}
    assert (await client.get(f"/operations/{operation['id']}")).status_code == 200


async def test_one_that_fails_for_its_prefix_has_the_status_of_that_error(world, client, pair):
    answer = await client.post("/pin", json={"token_ids": tokens(40), "ttl_s": 60})
    assert (answer.status_code, answer.json()["state"]) == (404, "failed")
    assert "warm it first" in answer.json()["error"]


async def test_a_running_one_can_be_cancelled(world, client, pair):
    world.served(pair[0], tokens(64))
    pair[0].gate.clear()
    path = f"/operations/{(await client.post('/flush', json={'all': True, 'wait_s': 0})).json()['id']}"
    assert (await client.delete(path)).json()["state"] == "cancelled"
    assert (await client.get("/operations/op-x")).status_code == 404
    assert (await client.delete("/operations/op-x")).status_code == 404


async def test_warming(world, client):
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        for server in (a, b):
            world.add(KvFake(server.id, NO_EVENTS, url=server.url))
        answer = await client.post("/warm", json={"token_ids": tokens(32), "engines": "all"})
        assert [part["state"] for part in answer.json()["engines"]] == ["done", "done"]
        assert len(a.seen) == len(b.seen) == 1


async def test_a_restore_falls_back_to_warming_when_told(world, client):
    async with FakeEngine("a") as server:
        fake = KvFake("a", NO_EVENTS - {Capability.RESTORE}, url=server.url)
        world.add(fake)
        body = {"token_ids": tokens(32), "engine": "a", "fallback": "warm"}
        answer = await client.post("/restore", json=body)
        assert answer.json()["engines"][0]["verb"] == "warm"
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("verb", "body", "status", "param"),
    [
        ("flush", {}, 400, "target"),
        ("flush", {"prompt": "x", "all": True}, 400, "all"),
        ("flush", {"messages": [{"role": "teapot", "content": "x"}]}, 400, "messages"),
        ("flush", {"engine": "z"}, 404, "engine"),
        ("flush", {"model": "n", "all": True}, 404, "model"),
        ("offload", {"fallback": "warm", "all": True}, 400, "fallback"),
        ("restore", {"fallback": "pray", "all": True}, 400, "fallback"),
        ("warm", {"all": True}, 400, "all"),
        ("warm", {"prompt": "x", "engines": "some"}, 400, "engines"),
        ("pin", {"engine": "a"}, 400, "engine"),
        ("pin", {"prompt": "x", "ttl_s": -1}, 400, "ttl_s"),
        ("unpin", {"pin_id": "x", "engine": "a"}, 400, "engine"),
    ],
)
async def test_what_is_wrong_is_named(client, pair, verb, body, status, param):
    answer = await client.post(f"/{verb}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
