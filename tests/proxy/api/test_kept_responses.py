"""Responses that kvpin keeps: read, listed, deleted, each tenant its own."""

from dataclasses import replace

import pytest

from engine_adapter.types import RESPONSES_ROUTES
from tests.fakes import INFO, FakeAdapter, client_of, is_openai_error, proxy_over
from tests.proxy.request.translate.response_world import KEYS, ROUTE, ask, chats, serving_chats


@pytest.fixture
async def client(engine):
    async with serving_chats(engine) as client:
        yield client


async def test_a_response_is_kept_listed_and_deleted(client, engine):
    made = (await ask(client)).json()
    next_one = (await ask(client, previous_response_id=made["id"], input="more")).json()
    assert [message["content"] for message in engine.seen[-1].json["messages"]] == ["hi", "hi", "more"]
    address = f"{ROUTE}/{next_one['id']}"
    assert (await client.get(address, headers=KEYS["a"])).json() == next_one
    listed = (await client.get(f"{address}/input_items?order=asc&limit=2", headers=KEYS["a"])).json()
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    after = f"{address}/input_items?order=asc&after={listed['last_id']}"
    rest = (await client.get(after, headers=KEYS["a"])).json()
    assert (rest["data"][0]["content"][0]["text"], rest["has_more"]) == ("more", False)
    newest = (await client.get(f"{address}/input_items", headers=KEYS["a"])).json()
    assert newest["first_id"] == rest["last_id"]
    gone = await client.delete(address, headers=KEYS["a"])
    assert gone.json() == {"id": next_one["id"], "object": "response", "deleted": True}
    assert is_openai_error(await client.get(address, headers=KEYS["a"]), 404)
    assert len(engine.seen) == 2


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "?stream=true", 400, "stream"),
        ("POST", "/cancel", 400, None),
        ("GET", "/input_items?limit=0", 400, "limit"),
        ("GET", "/input_items?limit=x", 400, "limit"),
        ("GET", f"/input_items?limit={'9' * 5_000}", 400, "limit"),
        ("GET", "/input_items?order=up", 400, "order"),
        ("GET", "/input_items?after=msg_none", 400, "after"),
        ("GET", "/other", 403, None),
        ("PUT", "", 403, None),
    ],
)
async def test_what_cannot_be_asked_of_a_response(client, method, path, status, param):
    made = (await ask(client)).json()
    answer = await client.request(method, f"{ROUTE}/{made['id']}{path}", headers=KEYS["a"])
    assert is_openai_error(answer, status, param=param)


async def test_another_tenant_cannot_tell_that_it_is_there(client, engine):
    made = (await ask(client)).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        theirs, none = [
            await client.request(method, f"{ROUTE}/{name}{path}", headers=KEYS["b"])
            for name in (made, "resp_none")
        ]
        assert is_openai_error(theirs, 404)
        assert theirs.text.replace(made, "ID") == none.text.replace("resp_none", "ID")
    refused = await ask(client, "b", previous_response_id=made)
    assert is_openai_error(refused, 404, param="previous_response_id")
    assert len(engine.seen) == 1


async def test_conversations_are_not_compacted(client):
    answer = await client.post(f"{ROUTE}/compact", json={"model": "m"}, headers=KEYS["a"])
    assert is_openai_error(answer, 404)
    assert "compacted" in answer.text


async def test_a_long_one_is_listed_and_deleted_off_the_loop(client):
    items = [{"role": "user", "content": str(n)} for n in range(3000)]
    made = (await ask(client, input=items)).json()["id"]
    page = await client.get(f"{ROUTE}/{made}/input_items?order=asc&limit=2", headers=KEYS["a"])
    assert [item["content"][0]["text"] for item in page.json()["data"]] == ["0", "1"]
    assert (await client.delete(f"{ROUTE}/{made}", headers=KEYS["a"])).json()["deleted"] is True


async def test_items_that_are_only_named_are_kept_for_comparison(engine):
    engine.script = chats
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=RESPONSES_ROUTES))
    async with proxy_over(adapter) as proxy, client_of(proxy) as client:
        item = (await client.post(ROUTE, json={"model": "m", "input": "hi"})).json()["output"][0]
        asked = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "more"}]
        assert (await client.post(ROUTE, json={"model": "m", "input": asked})).status_code == 200
        named, more = proxy.requests.sources.fields(proxy.last.request_id, None)["input"]
        assert (named["role"], named["content"][0]["text"], more) == ("assistant", "hi", asked[1])
