"""Anthropic's answers, from those of engines: over real sockets."""

import json
from dataclasses import replace

import httpx
import pytest

from engine_adapter import JsonBody
from engine_adapter.types import MESSAGES_ROUTES
from proxy.errors import BadRequest
from proxy.request.translate.messages_api import MessageTranslation
from tests.fakes import DONE, INFO, FakeAdapter, client_of, event, proxy_over
from tests.proxy.request.translate.message_events import USAGE, chunk, events_of

ROUTE = "/v1/messages"
ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def client(engine):
    info = replace(INFO, served_as_chats=MESSAGES_ROUTES)
    async with proxy_over(FakeAdapter("a", engine.url, info)) as proxy, client_of(proxy) as client:
        client.proxy = proxy
        yield client
        await proxy.settled()


class TestWhole:
    async def test_what_is_left_out_is_told(self, engine, client):
        """A conversation that was begun at the service, with a tool that only it has."""
        searched = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "tides"}}
        tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "tide", "input_schema": {}}]
        history = [{"role": "assistant", "content": [searched]}, *ASK["messages"]]
        answer = await client.post(ROUTE, json={**ASK, "messages": history, "tools": tools})
        assert answer.headers["x-kvpin-changed"] == "tool:web_search,block:server_tool_use"
        assert client.proxy.last.changed == ["tool:web_search", "block:server_tool_use"]
        sent = json.loads(engine.seen[0].body)
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["tide"]
        assert sent["messages"][0]["content"] == "\nweb_search\ntides\n"

    async def test_over_the_wire(self, engine, client):
        answer = await client.post(ROUTE, json=ASK)
        message = answer.json()
        assert message.pop("id").startswith("msg_")
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "hi"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 8,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 32,
                "output_tokens": 2,
            },
        }
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert client.proxy.last.reported_tokens == 32
        (sent,) = engine.seen
        assert sent.target == "/v1/chat/completions"

    async def test_a_query_of_the_beta_client(self, engine, client):
        assert (await client.post(f"{ROUTE}?beta=true", json=ASK)).json()["type"] == "message"
        assert engine.seen[0].target == "/v1/chat/completions"


class TestStream:
    async def test_over_the_wire(self, engine, client):
        async def script(exchange):
            chunks = [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": "y"}]
            first = [event(chunk(each)) for each in chunks]
            await exchange.stream(*first, event(chunk(finish="stop")), event(USAGE), DONE)

        engine.script = script
        answer = await client.post(ROUTE, json={**ASK, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream"
        assert engine.seen[0].json["stream_options"] == {"include_usage": True}
        events = events_of(answer.content)
        assert events[0]["message"].pop("id").startswith("msg_")
        nothing = {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        assert events == [
            {
                "type": "message_start",
                "message": {
                    "type": "message",
                    "role": "assistant",
                    "model": "m",
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": nothing,
                },
            },
            {"type": "ping"},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "he"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "y"}},
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {
                    **nothing,
                    "input_tokens": 8,
                    "cache_read_input_tokens": 32,
                    "output_tokens": 2,
                },
            },
            {"type": "message_stop"},
        ]

    async def test_usage_begins_with_what_is_predicted(self, engine, tokenizer_dir):
        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"}, "stop")), DONE)

        engine.script = script
        info = replace(INFO, tokenizer=str(tokenizer_dir), served_as_chats=MESSAGES_ROUTES)
        async with proxy_over(FakeAdapter("a", engine.url, info), reuse=True) as proxy:
            async with client_of(proxy) as client:
                body = {**ASK, "stream": True, "messages": [{"role": "user", "content": "Hi " * 60}]}
                await client.post(ROUTE, json=body)
                await proxy.settled()
                answer = await client.post(ROUTE, json=body)
            usage = events_of(answer.content)[0]["message"]["usage"]
            predicted = int(answer.headers["x-kvpin-predicted-tokens"])
            assert usage["cache_read_input_tokens"] == predicted > 16
            assert usage["input_tokens"] + predicted == proxy.last.n_tokens
            assert events_of(answer.content)[-2]["usage"] == usage  # the engine told none
            await proxy.settled()

    async def test_an_error_of_the_engine(self, engine, client):
        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"})), event({"error": {"message": "boom"}}), DONE)

        engine.script = script
        answer = await client.post(ROUTE, json={**ASK, "stream": True})
        *_, last = events_of(answer.content)
        assert last["error"] == {"type": "api_error", "message": "boom"}

    @pytest.mark.parametrize(
        ("code", "kind"),
        [("time_limit", "timeout_error"), ("overloaded", "overloaded_error"), (7, "api_error")],
    )
    async def test_a_code_decides_the_type_of_an_error(self, engine, client, code, kind):
        error = event({"error": {"message": "boom", "code": code}})

        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"})), error, DONE)

        engine.script = script
        answer = await client.post(ROUTE, json={**ASK, "stream": True})
        *_, last = events_of(answer.content)
        assert last["error"] == {"type": kind, "message": "boom"}

    async def test_an_end_that_came_too_early(self, engine, client):
        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"})))

        engine.script = script
        parts = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read(client, parts)
        *_, last = events_of(b"".join(parts))
        assert last["error"] == {"type": "api_error", "message": "the engine ended its answer too early"}

    async def test_an_engine_that_dies(self, engine, client):
        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event(chunk({"content": "x"})))
            exchange.die()

        engine.script = script
        parts = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read(client, parts)
        *_, last = events_of(b"".join(parts))
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")

    async def test_an_engine_that_dies_in_mid_event(self, engine, client):
        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event(chunk({"content": "x"})) + b'data: {"choices": [{"de')
            exchange.die()

        engine.script = script
        parts = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read(client, parts)
        *_, before, last = events_of(b"".join(parts))
        assert (before["type"], last["type"]) == ("content_block_delta", "error")

    async def test_an_event_that_is_no_chunk(self, engine, client):
        async def script(exchange):
            last = event(chunk({"content": "y"}, "stop"))
            await exchange.stream(event(chunk({"content": "x"})), b"data: what?\n\n", last, DONE)

        engine.script = script
        answer = await client.post(ROUTE, json={**ASK, "stream": True})
        *_, before, last = events_of(answer.content)
        assert before["delta"]["text"] == "x"
        assert last["error"] == {"type": "api_error", "message": "the engine broke off its answer"}


async def read(client, parts):
    async with client.stream("POST", ROUTE, json={**ASK, "stream": True}) as answer:
        async for part in answer.aiter_bytes():
            parts.append(part)


class TestErrors:
    """Each is in Anthropic's envelope, whoever makes it."""

    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize(
        ("status", "kind"),
        [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error")],
    )
    async def test_of_the_engine(self, engine, client, native, status, kind):
        async def script(exchange):
            headers = (("retry-after", "7"), ("x-ratelimit-limit", "1"), ("x-should-retry", "false"))
            await exchange.send({"error": {"message": "why", "type": "odd"}}, status, headers)

        engine.script = script
        if native:
            engine_of = client.proxy.fleet.engines["a"]
            engine_of.info = replace(engine_of.info, served_as_chats=frozenset())
        answer = await client.post(ROUTE, json=ASK, headers={"x-request-id": "mine"})
        assert answer.json() == {
            "type": "error",
            "error": {"type": kind, "message": "why"},
            "request_id": "mine",
        }
        assert answer.status_code == status
        assert answer.headers["request-id"] == "mine"
        assert (answer.headers["retry-after"], answer.headers["x-ratelimit-limit"]) == ("7", "1")

    @pytest.mark.parametrize(
        ("content", "status", "kind"),
        [
            (b"{", 400, "invalid_request_error"),
            (b"[]", 400, "invalid_request_error"),
            (json.dumps({**ASK, "model": "other"}).encode(), 404, "not_found_error"),
            (b'{"x": "' + b"x" * (1 << 20) + b'"}', 413, "request_too_large"),
            (json.dumps({**ASK, "max_tokens": None}).encode(), 400, "invalid_request_error"),
        ],
    )
    async def test_of_kvpin(self, client, content, status, kind):
        answer = await client.post(ROUTE, content=content)
        error = answer.json()
        assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert error["request_id"] == answer.headers["request-id"]

    async def test_of_the_engine_in_the_words_of_a_message(self, engine, client):
        """The chat's first message is the system prompt."""
        said = "messages[1].content[0] has type 'image_url': this engine takes text"

        async def script(exchange):
            await exchange.send({"error": {"message": said}}, status=400)

        engine.script = script
        picture = {"type": "image", "source": {"type": "url", "url": "data:,x"}}
        message = {"role": "user", "content": [picture]}
        answer = await client.post(ROUTE, json={**ASK, "system": "Be brief.", "messages": [message]})
        told = answer.json()["error"]["message"]
        assert told == "messages[0].content[0] has type 'image': this engine takes text"

    async def test_the_method(self, engine, client):
        answer = await client.get(ROUTE)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")
        assert answer.json()["error"]["message"] == "/v1/messages takes POST, OPTIONS, not GET"
        assert not engine.seen

    async def test_no_engine(self, engine, client):
        await engine.stop()
        answer = await client.post(ROUTE, json=ASK)
        assert (answer.status_code, answer.json()["error"]["type"]) in [
            (502, "api_error"),
            (503, "overloaded_error"),
        ]


class TestCounting:
    def test_the_count(self):
        body = {name: value for name, value in ASK.items() if name != "max_tokens"}
        translation = MessageTranslation(JsonBody(json.dumps(body).encode()), counts=True)
        assert translation.counts
        assert json.loads(translation.count(7)) == {"input_tokens": 7}

    def test_messages_need_a_limit(self):
        body = {name: value for name, value in ASK.items() if name != "max_tokens"}
        with pytest.raises(BadRequest, match="max_tokens"):
            MessageTranslation(JsonBody(json.dumps(body).encode()))
