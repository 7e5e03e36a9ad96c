"""A request of another API, served as a chat over real sockets."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from engine_adapter import JsonBody
from proxy.errors import EngineFailed
from proxy.request.translate.wording import Names, Wording
from tests.fakes import ASK, CHAT, DONE, INFO, FakeAdapter, client_of, is_openai_error, proxy_over

ROUTE = "/v1/shouts"


class Shouting:
    """Turns a shout into a chat, and the chat's answer into a shout."""

    counts, source, changed = False, None, ("shout:loud",)
    wording = Wording(Names({"messages": "shout"}, {}, {}))

    def __init__(self, body, tenant):
        self.tenant = tenant
        messages = [{"role": "user", "content": body.get("shout")}]
        self.chat = JsonBody(json.dumps({"messages": messages, "stream": body.get("stream")}).encode())

    def answer(self, content):
        try:
            return json.loads(content)["choices"][0]["message"]["content"].upper().encode()
        except KeyError as error:
            raise EngineFailed("no chat") from error

    def count(self, tokens):
        return b"%d letters" % tokens

    def event(self, payload):
        return payload.upper() + b";"

    def end(self):
        return b"!"


SHOUTS = {ROUTE: Shouting}


async def aiter_until(answer, end):
    """The parts of an answer, to the one with this end."""
    async for part in answer.aiter_text():
        yield part
        if part.endswith(end):
            return


async def read_stream(client, parts):
    async with client.stream("POST", ROUTE, json={"shout": "hello", "stream": True}) as answer:
        async for part in answer.aiter_text():
            parts.append(part)


@pytest.fixture
async def client(engine):
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=frozenset({ROUTE})))
    async with proxy_over(adapter, translations=SHOUTS) as proxy, client_of(proxy) as client:
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
    assert answer.headers["x-kvpin-changed"] == "shout:loud"
    assert client.proxy.last.changed == ["shout:loud"]


async def test_all_that_was_changed_is_told(engine, client):
    """Half a character when the body was read, then what the translation changed."""
    raw = rb'{"shout": "\ud83d", "stream": false}'
    answer = await client.post(ROUTE, content=raw)
    assert answer.headers["x-kvpin-changed"] == "half_characters,shout:loud"
    assert client.proxy.last.changed == ["half_characters", "shout:loud"]
    plain = await client.post(CHAT, json=ASK)
    assert "x-kvpin-changed" not in plain.headers


async def test_an_engine_that_serves_the_route_gets_it_as_it_is(engine):
    async with proxy_over(engine, translations=SHOUTS) as proxy, client_of(proxy) as client:
        await client.post(ROUTE, content=b'{"shout" : "hello"}')
        await proxy.settled()
    (sent,) = engine.seen
    assert (sent.target, sent.body) == (ROUTE, b'{"shout" : "hello"}')


async def test_a_lost_engine_still_decides(client):
    """A request may wait for it."""
    fleet, pool = client.proxy.fleet, client.proxy.fleet.pools["m"]
    (engine,) = pool.engines.values()
    fleet.leave(engine)
    assert pool.served_as_chats == {ROUTE}


async def test_an_error_of_the_engine(engine, client):
    async def script(exchange):
        await exchange.send({"error": {"message": "too long"}}, status=400)

    engine.script = script
    answer = await client.post(ROUTE, json={"shout": "hello"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")


async def test_an_error_of_kvpins_names_the_clients_field(engine, tokenizer_dir):
    info = replace(INFO, tokenizer=str(tokenizer_dir), served_as_chats=frozenset({ROUTE}), max_model_len=4)
    adapter = FakeAdapter("a", engine.url, info)
    async with proxy_over(adapter, reuse=True, translations=SHOUTS) as proxy, client_of(proxy) as client:
        answer = await client.post(ROUTE, json={"shout": "hello " * 10})
    assert is_openai_error(answer, 400, "context_length_exceeded", "shout")
    assert engine.seen == []


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


async def test_comments_keep_the_clients_connection_open(engine, client):
    """A long prompt is computed in silence otherwise."""
    go = asyncio.Event()

    async def script(exchange):
        await exchange.start()
        await exchange.chunk(b": ping")
        await exchange.chunk(b"\n\n")
        await go.wait()
        await exchange.chunk(b"data: one\n\n" + DONE)
        await exchange.end()

    engine.script = script
    got = ""
    async with client.stream("POST", ROUTE, json={"shout": "hello", "stream": True}) as answer:
        async for part in answer.aiter_text():
            got += part
            go.set()
    assert got.replace(":\n\n", "") == "ONE;!"
    assert got.startswith(":\n\n")


async def test_a_stream_ends_with_its_end_mark(engine, client):
    async def script(exchange):
        await exchange.start()
        await exchange.chunk(b"data: one\n\n" + DONE)
        await exchange.left.wait()

    engine.script = script
    async with client.stream("POST", ROUTE, json={"shout": "hello", "stream": True}) as answer:
        assert [part async for part in aiter_until(answer, "!")] == ["ONE;!"]


async def test_a_stream_that_breaks_off_has_no_end(engine, client):
    async def script(exchange):
        await exchange.start()
        await exchange.chunk(b"data: one\n\n")
        exchange.die()

    engine.script = script
    parts = []
    with pytest.raises(httpx.RemoteProtocolError):
        await read_stream(client, parts)
    text = "".join(parts)
    assert text.startswith('ONE;{"ERROR"')
    assert not text.endswith("!")


class TestCounting:
    """A request that only asks how long its prompt is."""

    @pytest.fixture(autouse=True)
    def counting(self, monkeypatch):
        monkeypatch.setattr(Shouting, "counts", True)

    async def ask(self, proxy, shout):
        async with client_of(proxy) as client:
            return await client.post(ROUTE, json={"shout": shout})

    async def test_no_engine_serves_it(self, engine, tokenizer_dir):
        info = replace(INFO, tokenizer=str(tokenizer_dir), served_as_chats=frozenset({ROUTE}))
        async with proxy_over(FakeAdapter("a", engine.url, info), reuse=True, translations=SHOUTS) as proxy:
            answer = await self.ask(proxy, "hello")
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
            counted = proxy.last
            assert answer.headers["x-request-id"] == counted.request_id
            assert (engine.seen, counted.attempts, counted.status, counted.prompt) == ([], [], 200, None)
            async with client_of(proxy) as client:
                await client.post(CHAT, json=ASK | {"messages": [{"role": "user", "content": "hello"}]})
            assert answer.text == f"{proxy.last.n_tokens} letters"
            await proxy.settled()

    async def test_a_prompt_of_any_length(self, engine, tokenizer_dir):
        info = replace(
            INFO, tokenizer=str(tokenizer_dir), served_as_chats=frozenset({ROUTE}), max_model_len=4
        )
        async with proxy_over(FakeAdapter("a", engine.url, info), reuse=True, translations=SHOUTS) as proxy:
            answer = await self.ask(proxy, "hello " * 10)
            assert answer.status_code == 200
            assert int(answer.text.split()[0]) > 10

    async def test_a_prompt_that_nobody_can_tokenise(self, client):
        answer = await client.post(ROUTE, json={"shout": "hello"})
        assert answer.status_code == 501
        message = answer.json()["error"]["message"]
        assert message.startswith("engine 'a' has no 'tokenize': kvpin cannot count")
