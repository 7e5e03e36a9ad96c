"""A request of another API, served as a chat over real sockets."""

import json
from dataclasses import replace

import pytest

from engine_adapter import JsonBody
from proxy.errors import EngineFailed
from proxy.translate import TRANSLATIONS
from proxy.translate.sse import Events
from tests.fakes import CHAT, DONE, INFO, FakeAdapter, client_of, event, proxy_over

ROUTE = "/v1/shouts"


class Shouting:
    """Turns a shout into a chat, and the chat's answer into a shout."""

    def __init__(self, body):
        messages = [{"role": "user", "content": body.get("shout")}]
        self.chat = JsonBody(json.dumps({"messages": messages, "stream": body.get("stream")}).encode())

    def answer(self, content):
        try:
            return json.loads(content)["choices"][0]["message"]["content"].upper().encode()
        except KeyError as error:
            raise EngineFailed("no chat") from error

    def error(self, content):
        return b"NO: " + json.loads(content)["error"]["message"].encode()

    def event(self, payload):
        return payload.upper() + b";"

    def end(self):
        return b"!"


@pytest.fixture
async def client(engine, monkeypatch):
    monkeypatch.setitem(TRANSLATIONS, ROUTE, Shouting)
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=frozenset({ROUTE})))
    async with proxy_over(adapter) as proxy, client_of(proxy) as client:
        client.proxy = proxy
        yield client
        await proxy.settled()


async def test_the_engine_gets_a_chat_and_the_client_its_own_words(engine, client):
    answer = await client.post(ROUTE, json={"shout": "hello", "stream": False})
    assert (answer.status_code, answer.text) == (200, "HI")
    (sent,) = engine.seen
    assert sent.target == CHAT
    assert json.loads(sent.body)["messages"] == [{"role": "user", "content": "hello"}]
    assert client.proxy.last.route == ROUTE


async def test_an_engine_that_serves_the_route_gets_it_as_it_is(engine, monkeypatch):
    monkeypatch.setitem(TRANSLATIONS, ROUTE, Shouting)
    async with proxy_over(engine) as proxy, client_of(proxy) as client:
        await client.post(ROUTE, content=b'{"shout" : "hello"}')
        await proxy.settled()
    (sent,) = engine.seen
    assert (sent.target, sent.body) == (ROUTE, b'{"shout" : "hello"}')


async def test_an_error_of_the_engine(engine, client):
    async def script(exchange):
        await exchange.send({"error": {"message": "too long"}}, status=400)

    engine.script = script
    answer = await client.post(ROUTE, json={"shout": "hello"})
    assert (answer.status_code, answer.text) == (400, "NO: too long")


async def test_an_answer_that_is_no_chat_is_an_error_of_its_own(engine, client):
    async def script(exchange):
        await exchange.send({"what": "ever"})

    engine.script = script
    answer = await client.post(ROUTE, json={"shout": "hello"})
    assert answer.status_code == 502


async def test_a_stream_is_translated_event_by_event(engine, client):
    async def script(exchange):
        await exchange.stream(b"data: one", b"\n\ndata: two\n\n: nothing\n\n", DONE)

    engine.script = script
    answer = await client.post(ROUTE, json={"shout": "hello", "stream": True})
    assert answer.text == "ONE;TWO;!"


def test_events_of_either_line_end_in_any_pieces():
    raw = event({"a": 1}) + b"event: x\r\ndata: b\r\ndata: c\r\n\r\n" + b"data: cut"
    for size in (1, 2, 3, 7, len(raw)):
        events = Events()
        found = [data for at in range(0, len(raw), size) for data in events.feed(raw[at : at + size])]
        assert found == [b'{"a": 1}', b"b\nc"]
