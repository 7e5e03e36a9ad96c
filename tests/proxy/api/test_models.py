"""`/v1/models`, over a socket."""

import pytest

from tests.fakes import FakeAdapter, client_of, is_openai_error, proxy_over


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
