"""Requests of other APIs, served as chats over real sockets."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from engine_adapter import JsonBody
from engine_adapter.types import MESSAGES_ROUTES, RESPONSES_ROUTES
from proxy.core.life import Rules
from proxy.request.translate import MessageTranslation, ResponseStore, ResponseTranslation
from tests.fakes import ASK, CHAT, DONE, INFO, FakeAdapter, client_of, event, is_openai_error, proxy_over
from tests.proxy.request.passing import passed
from tests.proxy.request.translate.test_messages import chunk, events_of
from tests.scripts import dies, hangs, sends, streams

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAID = [{"role": "user", "content": "Hi"}]
BODIES = {
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": SAID},
    RESPONSES: {"model": "m", "input": "Hi"},
}
AS_CHATS = replace(INFO, served_as_chats=MESSAGES_ROUTES | RESPONSES_ROUTES)
X = event(chunk({"content": "x"}))


@pytest.fixture
def adapters(engine):
    return [FakeAdapter("a", engine.url, AS_CHATS)]


async def ask(client, route=MESSAGES, path="", headers=None, **fields):
    return await client.post(route + path, json={**BODIES[route], **fields}, headers=headers)


async def test_the_engine_gets_a_chat_and_the_client_its_own_answer(engine, client):
    """Of a conversation that was begun at the service, with a tool that only it has."""
    searched = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "tides"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "tide", "input_schema": {}}]
    history = [{"role": "assistant", "content": [searched]}, *SAID]
    answer = await ask(client, path="?beta=true", messages=history, tools=tools)
    message = answer.json()
    assert message.pop("id").startswith("msg_")
    assert message["content"] == [{"type": "text", "text": "hi"}]
    assert message["usage"]["cache_read_input_tokens"] == 32
    (sent,) = engine.seen
    assert sent.target == CHAT
    assert [tool["function"]["name"] for tool in sent.json["tools"]] == ["tide"]
    assert sent.json["messages"][0]["content"] == "\nweb_search\ntides\n"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["x-kvpin-changed"] == "tool:web_search,block:server_tool_use"
    record = client.proxy.last
    assert (record.route, record.reported_tokens) == (MESSAGES, 32)
    assert record.changed == ["tool:web_search", "block:server_tool_use"]


async def test_all_that_was_changed_is_told(client):
    """Half a character when the body was read, then what the translation changed."""
    raw = json.dumps(BODIES[MESSAGES] | {"speed": "fast"}).replace("Hi", "\\ud83d").encode()
    answer = await client.post(MESSAGES, content=raw)
    assert answer.headers["x-kvpin-changed"] == "half_characters,field:speed"
    assert client.proxy.last.changed == ["half_characters", "field:speed"]
    assert "x-kvpin-changed" not in (await client.post(CHAT, json=ASK)).headers


async def test_an_engine_that_serves_the_route_gets_it_as_it_is(engine, client):
    raw = b'{"max_tokens" : 9, "messages":[]}'
    client.proxy.fleet.engines["a"].info = INFO
    await client.post(MESSAGES, content=raw)
    (sent,) = engine.seen
    assert (sent.target, sent.body) == (MESSAGES, raw)


async def test_a_lost_engine_still_decides(client):
    """A request may wait for it."""
    pool = client.proxy.fleet.pools["m"]
    client.proxy.fleet.leave(pool.engines["a"])
    assert pool.served_as_chats == AS_CHATS.served_as_chats


async def test_a_stream(engine, client):
    """It ends with its end mark, though its engine may close it a while later."""
    seen = asyncio.Event()

    async def script(exchange):
        await exchange.start()
        await exchange.chunk(b": ping\n\n")  # a long prompt is computed in silence otherwise
        await seen.wait()
        await exchange.chunk(X + event(chunk(finish="stop")) + DONE)
        await exchange.left.wait()

    engine.script, got = script, b""
    async with client.stream("POST", MESSAGES, json={**BODIES[MESSAGES], "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        async for part in answer.aiter_bytes():
            got += part
            seen.set()
            if b"message_stop" in part:
                break
    assert engine.seen[0].json["stream_options"] == {"include_usage": True}
    assert got.startswith(b":\n\n")
    assert events_of(got.replace(b":\n\n", b""))[-1] == {"type": "message_stop"}


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "script",
    [dies(X), dies(X + b'data: {"choices": [{"de'), streams(X)],
    ids=["dies", "dies in mid event", "ends early"],
)
async def test_a_stream_that_breaks_off_has_an_error_and_no_end(engine, client, route, script):
    engine.script, got = script, b""
    async with client.stream("POST", route, json={**BODIES[route], "stream": True}) as answer:
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
            async for part in answer.aiter_bytes():
                got += part
    *_, before, last = events_of(got)
    said = before["delta"] if route == RESPONSES else before["delta"]["text"]
    assert (said, last["type"]) == ("x", "error")


def translated(route):
    body = JsonBody(json.dumps(BODIES[route]).encode())
    if route == MESSAGES:
        return MessageTranslation(body)
    return ResponseTranslation(body, None, store=ResponseStore())


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "chunks",
    [
        (DONE,),
        (chunk(finish="stop"), b"what?", DONE),
        (chunk(finish="abort"), DONE),  # of vLLM and SGLang, where they stop a request
        *((garbage, chunk({"content": "y"}, "stop"), DONE)
          for garbage in (b"what?", b'{"choices": 5}', b'{"choices": [{"de', b"[" * 9999, b"\xff")),
    ],
)  # fmt: skip
def test_a_stream_that_does_not_say_why_it_ended_ends_with_an_error(route, chunks):
    """Nothing else follows what is no chunk."""
    sent = [event(each) if isinstance(each, dict) else b"data: %b\n\n" % each for each in chunks[:-1]]
    *_, before, last = events_of(passed(translated(route), chunks=[X, *sent, DONE]).body)
    assert (before["delta"] if route == RESPONSES else before["delta"]["text"]) == "x"
    told = last if route == RESPONSES else last["error"]
    assert (last["type"], told["message"]) == ("error", "the engine broke off its answer")


@pytest.mark.parametrize("native", [False, True])
async def test_errors_of_the_engine_are_anthropics(engine, client, native):
    headers = (("retry-after", "7"), ("x-ratelimit-limit", "1"), ("x-should-retry", "false"))
    engine.script = sends({"error": {"message": "why", "type": "odd"}}, 429, headers)
    if native:
        client.proxy.fleet.engines["a"].info = INFO
    answer = await ask(client, headers={"x-request-id": "mine"})
    error = {"type": "rate_limit_error", "message": "why"}
    assert answer.json() == {"type": "error", "error": error, "request_id": "mine"}
    assert (answer.status_code, answer.headers["request-id"]) == (429, "mine")
    assert (answer.headers["retry-after"], answer.headers["x-ratelimit-limit"]) == ("7", "1")


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b"[]", 400, "invalid_request_error"),
        (json.dumps({**BODIES[MESSAGES], "model": "other"}).encode(), 404, "not_found_error"),
        (b'{"x": "' + b"x" * (1 << 20) + b'"}', 413, "request_too_large"),
        (json.dumps({**BODIES[MESSAGES], "max_tokens": None}).encode(), 400, "invalid_request_error"),
    ],
)
async def test_errors_of_kvpin_are_anthropics(client, content, status, kind):
    answer = await client.post(MESSAGES, content=content)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "usage"), [([{"type": "text", "text": "hi"}], {}), ("hi", {"prompt_tokens": None})]
)
async def test_an_answer_that_cannot_be_translated_is_a_502(engine, client, route, stream, content, usage):
    """It is no stream that another engine could go on with, also where one was asked for."""
    client.proxy.add(FakeAdapter("b", "http://127.0.0.1:1", AS_CHATS))
    chat = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}], "usage": usage}
    engine.script = sends(chat)
    answer = await ask(client, route, stream=stream, temperature=0)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        502,
        "the engine's answer is not that of a chat",
    )
    record = client.proxy.last
    assert (record.status, record.cause, record.attempts) == (502, "engine_garbled", ["a"])


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
async def test_an_answer_that_its_engine_cut_off_is_a_502(engine, client, route):
    engine.script = sends({"choices": [{"message": {"content": "hi"}, "finish_reason": "abort"}]})
    answer = await ask(client, route)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "the engine broke off its answer"


async def test_errors_of_the_engine_are_in_the_clients_words(engine, client):
    """The chat's first message is the system prompt."""
    error = {"message": "messages[1].content[0] has type 'image_url'", "param": "max_tokens"}
    engine.script = sends({"error": error}, 400)
    picture = {"type": "image", "source": {"type": "url", "url": "data:,x"}}
    answer = await ask(client, system="Be brief.", messages=[{"role": "user", "content": [picture]}])
    assert answer.json()["error"]["message"] == "messages[0].content[0] has type 'image'"
    assert is_openai_error(await ask(client, RESPONSES), 400, param="max_output_tokens")


@pytest.mark.parametrize(("route", "name"), [(MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")])
def test_errors_in_mid_stream_are_in_the_clients_words(route, name):
    error = {"message": "max_completion_tokens is odd", "param": "max_completion_tokens"}
    *_, last = events_of(passed(translated(route), chunks=[X, event({"error": error})]).body)
    told = last if route == RESPONSES else last["error"]
    assert (told["message"], told.get("param", name)) == (f"{name} is odd", name)


async def test_an_error_of_kvpins_in_mid_stream_has_the_type_of_its_status(engine):
    engine.script, got = hangs(X), b""
    adapter, rules = FakeAdapter("a", engine.url, AS_CHATS), Rules(total_s=0.2)
    async with (
        proxy_over(adapter, rules=rules) as proxy,
        client_of(proxy) as client,
        client.stream("POST", MESSAGES, json={**BODIES[MESSAGES], "stream": True}) as answer,
    ):
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
            async for part in answer.aiter_bytes():
                got += part
    assert events_of(got)[-1]["error"]["type"] == "timeout_error"


@pytest.fixture
async def counting(engine, tokenizer_dir):
    """A client of a proxy that knows the prompts, and whose engine takes only short ones."""
    info = replace(AS_CHATS, tokenizer=str(tokenizer_dir), max_model_len=200)
    adapter = FakeAdapter("a", engine.url, info)
    async with proxy_over(adapter, reuse=True) as proxy, client_of(proxy) as client:
        client.proxy = proxy
        yield client
        await proxy.settled()


async def test_an_error_of_kvpins_names_the_clients_field(engine, counting):
    answer = await ask(counting, RESPONSES, input="hello " * 300)
    assert is_openai_error(answer, 400, "context_length_exceeded", "input")
    assert engine.seen == []


async def test_usage_begins_with_what_is_predicted(engine, counting):
    engine.script = streams(event(chunk({"content": "x"}, "stop")), DONE)
    fields = {"stream": True, "messages": [{"role": "user", "content": "Hi " * 60}]}
    await ask(counting, **fields)
    await counting.proxy.settled()
    answer = await ask(counting, **fields)
    usage = events_of(answer.content)[0]["message"]["usage"]
    predicted = int(answer.headers["x-kvpin-predicted-tokens"])
    assert usage["cache_read_input_tokens"] == predicted > 16
    assert usage["input_tokens"] + predicted == counting.proxy.last.n_tokens
    assert events_of(answer.content)[-2]["usage"] == usage  # the engine told none


async def test_a_prompt_is_counted_and_no_engine_serves_that(engine, counting):
    answer = await ask(counting, path="/count_tokens")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    counted = counting.proxy.last
    assert answer.headers["x-request-id"] == counted.request_id
    assert (engine.seen, counted.attempts, counted.status, counted.prompt) == ([], [], 200, None)
    await counting.post(CHAT, json=ASK | {"messages": SAID})
    assert answer.json() == {"input_tokens": counting.proxy.last.n_tokens}
    long = await ask(counting, RESPONSES, "/input_tokens", input="hello " * 300)
    assert long.json()["input_tokens"] > 300  # of any length


async def test_a_prompt_that_nobody_can_tokenise_is_not_counted(client):
    answer = await ask(client, RESPONSES, "/input_tokens")
    assert answer.status_code == 501
    message = answer.json()["error"]["message"]
    assert message.startswith("engine 'a' has no 'tokenize': kvpin cannot count")
