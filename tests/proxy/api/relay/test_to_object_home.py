"""Several proxies of one machine: each serves the responses, and reaches those of engines, of the others."""

import contextlib
import socket
from dataclasses import replace

import pytest

from engine_adapter.types import RESPONSES_ROUTES
from proxy.api import relay
from proxy.peers.bus import UnixBus
from proxy.request.tenants import Tenants
from tests.fakes import INFO, FakeAdapter, FakeEngine, client_of, is_openai_error, proxy_over
from tests.proxy.peers.reachable import reachable
from tests.proxy.peers.world import until
from tests.proxy.request.objects_world import Objects
from tests.proxy.request.translate.response_world import KEYS, ROUTE, TENANTS, ask, chats

COUNTS = f"{ROUTE}/input_tokens"
N = 3


@contextlib.asynccontextmanager
async def several(tmp_path, engine, served_as_chats=RESPONSES_ROUTES, tenants=TENANTS):
    """Proxies before one engine, and a client of each."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = []
        for _ in range(N):
            adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=served_as_chats))
            options = {"tenants": tenants, "exchange": lambda owner: UnixBus(tmp_path / "bus", owner)}
            proxies.append(await stack.enter_async_context(proxy_over(adapter, **options)))
            await stack.enter_async_context(reachable(proxies[-1]))
        await until(lambda: all(len(each.peers.sockets()) == N - 1 for each in proxies))
        clients = [await stack.enter_async_context(client_of(each)) for each in proxies]
        yield proxies, clients


@pytest.fixture
async def many(tmp_path, engine):
    engine.script = chats
    async with several(tmp_path, engine) as world:
        yield world


async def test_a_conversation_goes_on_at_any_kvpin(many, engine):
    proxies, (one, two, three) = many
    first = (await ask(one)).json()
    second = (await ask(two, previous_response_id=first["id"], input="more")).json()
    assert [message["content"] for message in engine.seen[-1].json["messages"]] == ["hi", "hi", "more"]
    assert second["previous_response_id"] == first["id"]
    third = await ask(three, previous_response_id=second["id"], input="on", stream=True)
    assert "event: response.completed" in third.text
    assert len(engine.seen[-1].json["messages"]) == 5
    assert [len(list(each.requests)) for each in proxies] == [3, 0, 0]


async def test_a_response_is_read_listed_and_deleted_at_any_kvpin(many):
    _, (one, two, three) = many
    made = (await ask(one)).json()
    address = f"{ROUTE}/{made['id']}"
    assert (await two.get(address, headers=KEYS["a"])).json() == made
    items = (await three.get(f"{address}/input_items?limit=1", headers=KEYS["a"])).json()
    assert items["data"][0]["content"][0]["text"] == "hi"
    asked = {"model": "m", "input": "x", "previous_response_id": made["id"]}
    assert (await two.post(COUNTS, json=asked, headers=KEYS["a"])).status_code != 404
    assert (await three.delete(address, headers=KEYS["a"])).json()["deleted"] is True
    for client in (one, two, three):
        assert is_openai_error(await client.get(address, headers=KEYS["a"]), 404)


async def test_another_tenant_cannot_tell_that_it_is_there(many, engine):
    _, (one, two, _) = many
    made = (await ask(one)).json()["id"]
    for method in ("GET", "DELETE", "HEAD"):
        answers = [
            await two.request(method, f"{ROUTE}/{name}", headers=KEYS["b"]) for name in (made, "resp_none")
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert answers[0].text.replace(made, "ID") == answers[1].text.replace("resp_none", "ID")
    refused = await ask(two, "b", previous_response_id=made)
    assert is_openai_error(refused, 404, param="previous_response_id")
    assert len(engine.seen) == 1
    assert (await one.get(f"{ROUTE}/{made}", headers=KEYS["a"])).status_code == 200


async def test_a_response_of_an_engine_is_found_by_who_got_it(tmp_path, engine):
    async def respond(exchange):
        await exchange.send({"id": "resp_engine", "object": "response", "output": []})

    engine.script = respond
    other = FakeEngine("b", respond)
    async with other, several(tmp_path, engine, frozenset()) as (proxies, (one, two, _)):
        made = (await ask(one)).json()["id"]
        for proxy in proxies:
            proxy.add(FakeAdapter("b", other.url, INFO))  # a request without a home may go there
        for _ in range(4):
            assert (await ask(two, previous_response_id=made)).status_code == 200
            assert (await two.get(f"{ROUTE}/{made}", headers=KEYS["a"])).status_code == 200
            assert is_openai_error(await two.get(f"{ROUTE}/{made}", headers=KEYS["b"]), 404)
        assert not other.seen


async def test_what_a_kvpin_kept_is_gone_with_it(many):
    proxies, (one, two, three) = many
    gone, kept = [(await ask(client)).json()["id"] for client in (one, three)]
    proxies[0].peers.bus.http_socket.unlink()
    assert is_openai_error(await two.get(f"{ROUTE}/{gone}", headers=KEYS["a"]), 404)
    assert is_openai_error(await ask(two, previous_response_id=gone), 404, param="previous_response_id")
    assert (await ask(two, previous_response_id=kept)).status_code == 200


async def test_a_kvpin_that_hangs_is_not_waited_for(many, monkeypatch):
    monkeypatch.setattr(relay, "ASK_S", 0.2)
    proxies, (_, two, three) = many
    kept = (await ask(three)).json()["id"]
    path = proxies[0].peers.bus.http_socket
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert (await ask(two, previous_response_id=kept)).status_code == 200
        assert is_openai_error(await two.get(f"{ROUTE}/resp_none", headers=KEYS["a"]), 404)


async def test_one_tenant_asks_for_responses_only(tmp_path, engine):
    engine.script = objects = Objects()
    async with several(tmp_path, engine, frozenset(), Tenants(())) as (_, (one, two, _)):
        name = objects.make("files")["id"]
        assert (await two.get(f"/v1/files/{name}")).json()["id"] == name
        response = (await one.post(ROUTE, json={"model": "m", "input": "x"})).json()["id"]
        assert (await two.get(f"{ROUTE}/{response}")).json()["id"] == response
