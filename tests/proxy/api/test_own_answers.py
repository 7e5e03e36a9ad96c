"""What kvpin answers itself: the models, and the responses that it keeps, each tenant's its own."""

from dataclasses import replace

import pytest

from engine_adapter.types import RESPONSES_ROUTES
from tests.fakes import INFO, FakeAdapter, client_of, is_openai_error, proxy_over
from tests.proxy.request.translate.response_world import KEYS, ROUTE, ask, chats, serving_chats


async def test_the_list_is_the_union_of_pools(engine, proxy, client):
    proxy.add(FakeAdapter("b", model="org/other"))
    proxy.fleet.join(proxy.fleet.engines["b"], proxy.fleet.engines["b"].info)
    for path in ("/v1/models", "/v1/models/"):
        content = (await client.get(path)).json()
        assert content["object"] == "list"
        assert [card["id"] for card in content["data"]] == ["m", "org/other"]
    assert (await client.get("/v1/models/org/other")).json()["id"] == "org/other"
    assert (await client.get("/v1/models/org%2Fother")).json()["id"] == "org/other"
    assert is_openai_error(await client.get("/v1/models/none"), 404, "model_not_found")
    assert not engine.seen


@pytest.mark.parametrize("asked", ["%2Fmodels%2Fa.gguf", "/models/a.gguf", "%2Fmodels%2Fa.gguf/?x=1"])
async def test_a_model_that_is_named_by_an_absolute_path(engine, asked):
    async with proxy_over() as proxy, client_of(proxy) as client:
        proxy.add(FakeAdapter("a", model="/models/a.gguf"))
        assert (await client.get(f"/v1/models/{asked}")).json()["id"] == "/models/a.gguf"


async def test_an_alias_is_listed_with_the_name_it_stands_for(engine):
    aliases = {"gpt": "m", "tuned": "ada", "m": "ada", "lost": "gone"}
    async with proxy_over(aliases=aliases) as proxy, client_of(proxy) as client:
        proxy.add(engine, loras=frozenset({"ada"}))
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert {name: (card.get("parent"), card.get("root")) for name, card in cards.items()} == {
            "m": (None, None), "ada": ("m", None), "gpt": (None, "m"), "tuned": ("m", "ada"),
        }  # fmt: skip
        for name, card in cards.items():
            assert (await client.get(f"/v1/models/{name}?x=1")).json() == card
        proxy.fleet.default_model = "m"  # serves requests, but is no card of another name
        response = await client.get("/v1/models/none")
        assert response.json()["error"]["message"].startswith("the model 'none' does not exist; served: ")
        response = await client.get("/v1/models/lost")
        assert is_openai_error(response, 404, "model_not_found", "model")
        assert "an alias of 'gone'" in response.json()["error"]["message"]


async def test_a_card_has_what_all_engines_say_alike_of_the_model(engine):
    async with proxy_over(aliases={"gpt": "m"}) as proxy, client_of(proxy) as client:
        card = {"max_model_len": 9, "tags": ["a"], "aliases": None}
        proxy.add(engine, loras=frozenset({"ada"}), card=card | {"owned_by": "x"})
        said = (await client.get("/v1/models/m")).json()
        assert said == {"id": "m", "object": "model", "created": 0, "owned_by": "kvpin"} | card
        assert (await client.get("/v1/models/gpt")).json() == said | {"id": "gpt", "root": "m"}
        assert "tags" not in (await client.get("/v1/models/ada")).json()
        proxy.add(FakeAdapter("b"), card={"max_model_len": 9, "tags": ["b"]})
        said = (await client.get("/v1/models/m")).json()
        assert (said["max_model_len"], "tags" in said, "aliases" in said) == (9, False, False)


async def test_a_name_that_an_engine_would_take_is_its_model(engine):
    async with proxy_over(aliases={"lost": "gone"}) as proxy, client_of(proxy) as client:
        proxy.add(engine, any_model=True, card={"max_model_len": 9})
        card = (await client.get("/v1/models/gpt-9")).json()
        assert (card["id"], card["root"], card["max_model_len"]) == ("gpt-9", "m", 9)
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["m"]
        assert is_openai_error(await client.get("/v1/models/lost"), 404, "model_not_found")


@pytest.mark.parametrize("method", ["POST", "DELETE", "PURGE"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_other_methods_are_refused_and_those_it_takes_named(engine, client, method, path):
    response = await client.request(method, path, json={})
    assert is_openai_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "GET, HEAD, OPTIONS"
    assert not engine.seen


async def test_a_path_that_only_begins_like_it_is_the_engines(engine, client):
    await client.post("/v1/models_of_mine", json={"model": "m"})
    assert engine.seen[0].target == "/v1/models_of_mine"


# --- kept responses


@pytest.fixture
async def keeper(engine):
    async with serving_chats(engine) as client:
        yield client


async def test_a_response_is_kept_listed_and_deleted(keeper, engine):
    made = (await ask(keeper)).json()
    next_one = (await ask(keeper, previous_response_id=made["id"], input="more")).json()
    assert [message["content"] for message in engine.seen[-1].json["messages"]] == ["hi", "hi", "more"]
    address = f"{ROUTE}/{next_one['id']}"
    assert (await keeper.get(address, headers=KEYS["a"])).json() == next_one
    listed = (await keeper.get(f"{address}/input_items?order=asc&limit=2", headers=KEYS["a"])).json()
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    after = f"{address}/input_items?order=asc&after={listed['last_id']}"
    rest = (await keeper.get(after, headers=KEYS["a"])).json()
    assert (rest["data"][0]["content"][0]["text"], rest["has_more"]) == ("more", False)
    newest = (await keeper.get(f"{address}/input_items", headers=KEYS["a"])).json()
    assert newest["first_id"] == rest["last_id"]
    gone = await keeper.delete(address, headers=KEYS["a"])
    assert gone.json() == {"id": next_one["id"], "object": "response", "deleted": True}
    assert is_openai_error(await keeper.get(address, headers=KEYS["a"]), 404)
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
async def test_what_cannot_be_asked_of_a_response(keeper, method, path, status, param):
    made = (await ask(keeper)).json()
    answer = await keeper.request(method, f"{ROUTE}/{made['id']}{path}", headers=KEYS["a"])
    assert is_openai_error(answer, status, param=param)


async def test_another_tenant_cannot_tell_that_it_is_there(keeper, engine):
    made = (await ask(keeper)).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        theirs, none = [
            await keeper.request(method, f"{ROUTE}/{name}{path}", headers=KEYS["b"])
            for name in (made, "resp_none")
        ]
        assert is_openai_error(theirs, 404)
        assert theirs.text.replace(made, "ID") == none.text.replace("resp_none", "ID")
    refused = await ask(keeper, "b", previous_response_id=made)
    assert is_openai_error(refused, 404, param="previous_response_id")
    assert len(engine.seen) == 1


async def test_conversations_are_not_compacted(keeper):
    answer = await keeper.post(f"{ROUTE}/compact", json={"model": "m"}, headers=KEYS["a"])
    assert is_openai_error(answer, 404)
    assert "compacted" in answer.text


async def test_a_long_one_is_listed_and_deleted_off_the_loop(keeper):
    items = [{"role": "user", "content": str(n)} for n in range(3000)]
    made = (await ask(keeper, input=items)).json()["id"]
    page = await keeper.get(f"{ROUTE}/{made}/input_items?order=asc&limit=2", headers=KEYS["a"])
    assert [item["content"][0]["text"] for item in page.json()["data"]] == ["0", "1"]
    assert (await keeper.delete(f"{ROUTE}/{made}", headers=KEYS["a"])).json()["deleted"] is True


async def test_items_that_are_only_named_are_kept_for_comparison(engine):
    engine.script = chats
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=RESPONSES_ROUTES))
    async with proxy_over(adapter) as proxy, client_of(proxy) as client:
        item = (await client.post(ROUTE, json={"model": "m", "input": "hi"})).json()["output"][0]
        asked = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "more"}]
        assert (await client.post(ROUTE, json={"model": "m", "input": asked})).status_code == 200
        named, more = proxy.requests.sources.fields(proxy.last.request_id, None)["input"]
        assert (named["role"], named["content"][0]["text"], more) == ("assistant", "hi", asked[1])
