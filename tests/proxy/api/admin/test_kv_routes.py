import pytest

from engine_adapter import Capability
from tests.fakes import FakeEngine, is_openai_error
from tests.kv_world import ALL, KvFake, tokens

NO_EVENTS = ALL - {Capability.KV_EVENTS}


async def test_an_operation_that_ends_in_time_is_200(world, client, pair):
    world.served(pair[0], tokens(32))
    answer = await client.post("/flush", json={"token_ids": tokens(40), "engine": "a"})
    assert answer.status_code == 200
    operation = answer.json()
    assert (operation["state"], operation["verb"], operation["error"]) == ("done", "flush", None)
    (part,) = operation["engines"]
    assert (part["engine"], part["verb"], part["state"], part["error"]) == ("a", "flush", "done", None)
    assert (part["done"], part["total"], part["bytes"], part["left"]) == (2, 2, 200, {"in_use": 0})


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


async def test_what_cannot_be_done_names_the_capability_and_what_can(world, client):
    world.add(KvFake("a", NO_EVENTS - {Capability.RESTORE}))
    answer = await client.post("/restore", json={"token_ids": tokens(32), "engine": "a"})
    assert is_openai_error(answer, 501, "not_supported")
    assert "'restore'" in answer.text
    assert "warm" in answer.text


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
