"""Routes that kvpin passes on, and responses that engines keep: who names one reaches the engine of it."""

from dataclasses import replace

import pytest

from engine_adapter.types import RESPONSES_ROUTES
from proxy.request.known_routes import (
    MAX_HOMES,
    Home,
    ResponseHomes,
    ResponseNoter,
    of_lacking,
)
from proxy.request.translate.responses_store import MAX_ID
from tests.fakes import INFO, FakeAdapter, FakeEngine, client_of, event, is_openai_error, proxy_over
from tests.proxy.request.passing import passed

ROUTE = "/v1/responses"


def serving(name):
    """What an engine says that names its responses after itself."""

    async def script(exchange):
        if exchange.method == "POST" and exchange.target == ROUTE:
            made = {"id": f"resp_{name}_{len(exchange.body)}", "output": [], "metadata": {"id": "resp_x"}}
            if exchange.json.get("stream"):
                created = event({"response": made})
                await exchange.stream(b"event: response.created\n", created, event({"id": "no"}))
            else:
                await exchange.send(made)
        else:
            await exchange.send({"by": name})

    return script


@pytest.fixture
async def engines():
    async with FakeEngine("one", serving("one")) as one, FakeEngine("two", serving("two")) as two:
        yield [one, two]


async def make(client, **fields):
    answer = await client.post(ROUTE, json={"model": "m", "input": "hi", **fields})
    assert answer.status_code == 200
    engine = answer.headers["x-kvpin-engine"]
    if fields.get("stream"):
        name = answer.text.partition('"id": "')[2].partition('"')[0]
        assert '"no"' in answer.text
        return name, engine
    return answer.json()["id"], engine


@pytest.mark.parametrize("stream", [False, True])
async def test_all_that_names_a_response_goes_to_its_home(engines, stream):
    async with proxy_over(*engines) as proxy, client_of(proxy) as client:
        for at in range(4):  # placement by load alone would spread them
            name, home = await make(client, stream=stream, pad="x" * at)
            for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
                answer = await client.request(method, f"{ROUTE}/{name}{path}")
                assert (answer.json(), answer.headers["x-kvpin-engine"]) == ({"by": home}, home)
            body = {"model": "m", "input": "more", "previous_response_id": name}
            assert (await client.post(ROUTE, json=body)).headers["x-kvpin-engine"] == home
        await proxy.settled()


async def test_a_home_that_was_restarted_or_is_gone(engines):
    async with proxy_over(*engines) as proxy, client_of(proxy) as client:
        name, home = await make(client)
        engine = proxy.fleet.engines[home]
        engine.info = replace(engine.info, instance="another process")
        answer = await client.get(f"{ROUTE}/{name}")
        assert is_openai_error(answer, 404)
        assert "restarted" in answer.text
        body = {"model": "m", "input": "more", "previous_response_id": name}
        again = await client.post(ROUTE, json=body)
        assert is_openai_error(again, 404, "previous_response_not_found", "previous_response_id")
        proxy.fleet.remove(proxy.fleet.engine(home))
        assert is_openai_error(await client.get(f"{ROUTE}/{name}"), 404)
        await proxy.settled()


async def test_a_response_that_kvpin_did_not_see_may_be_the_engines(engines):
    async with proxy_over(engines[0]) as proxy, client_of(proxy) as client:
        assert (await client.get(f"{ROUTE}/resp_old")).json() == {"by": "one"}
        await make(client, previous_response_id="resp_old")
        proxy.add(FakeAdapter("two", engines[1].url, replace(INFO, model="other")))
        assert is_openai_error(await client.get(f"{ROUTE}/resp_old"), 404)
        await proxy.settled()


async def test_engines_that_get_chats_keep_nothing(engines):
    adapter = FakeAdapter("one", engines[0].url, replace(INFO, served_as_chats=RESPONSES_ROUTES))
    async with proxy_over(adapter) as proxy, client_of(proxy) as client:
        assert is_openai_error(await client.get(f"{ROUTE}/resp_none"), 404)
        assert engines[0].seen == []


def test_the_response_used_longest_ago_is_forgotten():
    homes, home = ResponseHomes(), Home("e", "i")
    homes.divide("ab")
    for number in range(MAX_HOMES):
        homes.keep("a", f"r{number}", home)
    assert homes.find("a", "r0") == home
    homes.keep("a", "more", home)
    assert homes.find("a", "r1") is None
    for name in ("r0", "more"):
        assert homes.find("a", name) == home
        assert homes.find("b", name) is homes.find(None, name) is None
    homes.keep("a", "x" * (MAX_ID + 1), home)
    assert homes.find("a", "x" * (MAX_ID + 1)) is None


def test_an_id_that_an_engine_gives_again_is_the_last_ones():
    homes = ResponseHomes()
    homes.divide("ab")
    homes.keep("a", "1", Home("e", "i"))
    homes.keep("b", "1", Home("f", "i"))  # of another engine
    assert homes.find("a", "1") == Home("e", "i")
    homes.keep("b", "1", Home("e", "i"))
    assert homes.find("a", "1") is None
    assert homes.find("b", "1") == Home("e", "i")


def test_responses_of_tenants_that_are_gone_go():
    homes, home = ResponseHomes(), Home("e", "i")
    homes.divide("ab")
    for tenant in "ab":
        homes.keep(tenant, tenant, home)
    homes.divide("bc")
    homes.keep("a", "late", home)  # of a request that was in flight
    homes.divide("abc")
    assert [homes.find(name, name) for name in "abc"] == [None, home, None]
    assert homes.find("a", "late") is None
    homes.divide(())
    homes.keep(None, "n", home)
    assert homes.find(None, "n") == home


def test_the_first_event_that_says_something_names_the_response():
    noted = []
    chunks = [b": quiet\n\n", event({"response": {"id": "r"}}) + event({"id": "no"})]
    passed(ResponseNoter(noted.append), chunks=chunks)
    assert noted == ["r"]


@pytest.mark.parametrize(
    ("route", "meant"),
    [
        ("/v1/chats/completions", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
        ("/v1/model", "/v1/models"),
    ],
)
def test_a_wrong_path_means_the_route_that_it_is_like(route, meant):
    assert of_lacking(route, "") == f"; did you mean {meant}?"


@pytest.mark.parametrize("said", ["File Not Found", "Not Found", "not found."])
def test_an_engine_that_says_that_nothing_is_there_lacks_the_route(said):
    assert of_lacking("/v1/files", said) == ": no engine that was asked has the route /v1/files"
    assert of_lacking(f"/v1/{'x' * 500}", said).endswith("x" * 90)


def test_an_engine_that_says_what_is_not_there_has_the_route():
    assert of_lacking("/v1/files", "No such File object: f") == ""
