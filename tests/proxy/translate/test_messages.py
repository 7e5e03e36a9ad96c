"""Anthropic's answers, from those of engines: over real sockets."""

import json
from dataclasses import replace

import httpx
import msgspec
import pytest

from engine_adapter import JsonBody
from engine_adapter.types import MESSAGES_ROUTES
from proxy.errors import BadRequest, EngineFailed
from proxy.translate.messages import CountTokens, Messages
from proxy.translate.messages_answer import MessageStream, message_of
from proxy.translate.translation import Predicted
from tests.fakes import ANSWER, DONE, INFO, FakeAdapter, client_of, event, proxy_over

ROUTE = "/v1/messages"
ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}


@pytest.fixture
async def client(engine):
    info = replace(INFO, served_as_chats=MESSAGES_ROUTES)
    async with proxy_over(FakeAdapter("a", engine.url, info)) as proxy, client_of(proxy) as client:
        client.proxy = proxy
        yield client
        await proxy.settled()


def whole(said, finish="stop", usage=None, **choice):
    answer = {"choices": [{"message": said, "finish_reason": finish, **choice}], "usage": usage}
    return message_of(json.dumps(answer).encode(), "msg_1", "m", prewarms=False)


def chunk(delta=None, finish=None, **fields):
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **fields}


def streamed(*chunks, **options):
    """The events of a stream of these chunks, without its first two."""
    stream = MessageStream("msg_1", "m", prewarms=options.pop("prewarms", False))
    sent = [stream.event(json.dumps(each).encode(), Predicted(), {}) for each in chunks]
    return events_of(b"".join([*sent, stream.end()]))[2:]


def events_of(raw):
    events = [each.split(b"\n") for each in raw.strip().split(b"\n\n")]
    found = [json.loads(data.removeprefix(b"data: ")) for _, data in events]
    assert [name.decode() for name, _ in events] == [f"event: {each['type']}" for each in found]
    return found


class TestWhole:
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

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
    def test_thoughts_text_and_calls(self, name):
        message = whole({name: "hm", "content": "I look.", "tool_calls": [CALL]}, "tool_calls")
        encoded = json.loads(msgspec.json.encode(message))
        assert encoded["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": "kvpin"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "tide", "input": {"port": "Brest"}},
        ]
        assert encoded["stop_reason"] == "tool_use"

    @pytest.mark.parametrize("arguments", ['{"port": "Br', "[1]", "", None])
    def test_arguments_that_were_cut_off(self, arguments):
        call = {"function": {"name": "tide", "arguments": arguments}}
        (block,) = json.loads(msgspec.json.encode(whole({"tool_calls": [call]}, "length")))["content"]
        assert block.pop("id").startswith("toolu_")
        assert block == {"type": "tool_use", "name": "tide", "input": {}}

    @pytest.mark.parametrize("content", [None, ""])
    def test_nothing(self, content):
        assert whole({"content": content})["content"] == []

    @pytest.mark.parametrize(
        ("finish", "choice", "reason", "sequence"),
        [
            ("stop", {}, "end_turn", None),
            (None, {}, "end_turn", None),
            ("length", {}, "max_tokens", None),
            ("tool_calls", {}, "tool_use", None),
            ("content_filter", {}, "refusal", None),
            ("stop", {"stop_reason": "\n\n"}, "stop_sequence", "\n\n"),
            ("stop", {"stop_reason": 7}, "end_turn", None),
            ("stop", {"matched_stop": "END"}, "stop_sequence", "END"),
            ("stop", {"matched_stop": 7}, "end_turn", None),
        ],
    )
    def test_why_it_stopped(self, finish, choice, reason, sequence):
        message = whole({"content": "x"}, finish, **choice)
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)

    def test_a_call_that_was_asked_for(self):
        assert whole({"tool_calls": [CALL]}, "stop")["stop_reason"] == "tool_use"

    @pytest.mark.parametrize(
        ("details", "counts"),
        [
            (None, (40, 0, 0)),
            ({"cached_tokens": 32}, (8, 0, 32)),
            ({"cached_tokens": None}, (40, 0, 0)),
            ({"cached_tokens": 16, "cache_write_tokens": 20}, (4, 20, 16)),
            ({"cached_tokens": 16, "created_cache_tokens": 20}, (4, 20, 16)),
        ],
    )
    def test_usage(self, details, counts):
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}
        told = whole({"content": "x"}, usage=usage)["usage"]
        assert counts == (
            told.input_tokens,
            told.cache_creation_input_tokens,
            told.cache_read_input_tokens,
        )
        assert told.output_tokens == 2

    @pytest.mark.parametrize("content", [b"{}", b"no", b'{"choices": [{}]}', b'{"choices": 1}', b"\xff"])
    def test_what_is_no_chat(self, content):
        with pytest.raises(EngineFailed):
            message_of(content, "msg_1", "m", prewarms=False)


class TestStream:
    USAGE = {"choices": [], "usage": ANSWER["usage"]}  # noqa: RUF012 - read only

    async def test_over_the_wire(self, engine, client):
        async def script(exchange):
            chunks = [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": "y"}]
            first = [event(chunk(each)) for each in chunks]
            await exchange.stream(*first, event(chunk(finish="stop")), event(self.USAGE), DONE)

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

    def test_each_kind_of_content_is_a_block(self):
        function = {"name": "tide", "arguments": ""}
        events = streamed(
            chunk({"reasoning_content": "h"}),
            chunk({"reasoning": "m"}),
            chunk({"content": "I "}),
            chunk({"content": "look."}),
            chunk({"tool_calls": [{"index": 0, "id": "c1", "function": function}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"port"'}}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
            chunk({"tool_calls": [{"index": 1, "function": {"name": "wind", "arguments": "{}"}}]}),
            chunk(finish="tool_calls"),
        )
        assert [brief(each) for each in events] == [
            ("start", 0, "thinking"),
            ("delta", 0, "h"),
            ("delta", 0, "m"),
            ("delta", 0, "kvpin"),
            ("stop", 0, None),
            ("start", 1, "text"),
            ("delta", 1, "I "),
            ("delta", 1, "look."),
            ("stop", 1, None),
            ("start", 2, "tool_use"),
            ("delta", 2, '{"port"'),
            ("delta", 2, ":1}"),
            ("stop", 2, None),
            ("start", 3, "tool_use"),
            ("delta", 3, "{}"),
            ("stop", 3, None),
            ("delta", None, "tool_use"),
            ("stop", None, None),
        ]
        calls = [each["content_block"] for each in events if each["type"] == "content_block_start"][2:]
        assert calls[0] == {"type": "tool_use", "id": "c1", "name": "tide", "input": {}}
        assert calls[1]["id"].startswith("toolu_")

    def test_a_prompt_that_is_prewarmed_has_no_answer(self):
        events = streamed(chunk({"content": "x"}, "length"), self.USAGE, prewarms=True)
        assert [each["type"] for each in events] == ["message_delta", "message_stop"]
        assert (events[0]["usage"]["output_tokens"], events[0]["delta"]["stop_reason"]) == (0, "max_tokens")

    def test_a_stop_sequence(self):
        last = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
        delta = streamed(chunk({"content": "x"}), last)[-2]["delta"]
        assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}

    async def test_an_error_of_the_engine(self, engine, client):
        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"})), event({"error": {"message": "boom"}}), DONE)

        engine.script = script
        answer = await client.post(ROUTE, json={**ASK, "stream": True})
        *_, last = events_of(answer.content)
        assert last["error"] == {"type": "api_error", "message": "boom"}

    async def test_an_end_that_came_too_early(self, engine, client):
        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"})))

        engine.script = script
        answer = await client.post(ROUTE, json={**ASK, "stream": True})
        *_, last = events_of(answer.content)
        assert last["error"] == {"type": "api_error", "message": "the engine ended its answer early"}

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

    async def test_an_event_that_is_no_chunk_breaks_the_stream(self, engine, client):
        async def script(exchange):
            await exchange.stream(event(chunk({"content": "x"})), b"data: what?\n\n", DONE)

        engine.script = script
        parts = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read(client, parts)
        assert b"message_stop" not in b"".join(parts)


async def read(client, parts):
    async with client.stream("POST", ROUTE, json={**ASK, "stream": True}) as answer:
        async for part in answer.aiter_bytes():
            parts.append(part)


def brief(event):
    """What an event does, to which block, with what."""
    kind = event["type"].rpartition("_")[2]
    given = event.get("delta") or event.get("content_block") or {"": None}
    *_, last = given.values() if kind != "start" else [given["type"]]
    return kind, event.get("index"), given.get("stop_reason", last) if "index" not in event else last


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
            next(iter(client.proxy.fleet.engines.values())).info = INFO
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
        translation = CountTokens(JsonBody(json.dumps(body).encode()))
        assert translation.counts
        assert json.loads(translation.count(7)) == {"input_tokens": 7}

    def test_messages_need_a_limit(self):
        body = {name: value for name, value in ASK.items() if name != "max_tokens"}
        with pytest.raises(BadRequest, match="max_tokens"):
            Messages(JsonBody(json.dumps(body).encode()))


def test_fields_of_kvpins_own():
    """As diagnostics: in the whole answer, and in the first event of a stream."""
    translation = Messages(JsonBody(json.dumps(ASK).encode()))
    translation.extra = {"diagnostics": None}
    assert json.loads(translation.answer(json.dumps(ANSWER).encode()))["diagnostics"] is None
    first, _ = events_of(translation.event(json.dumps(chunk()).encode()))
    assert first["message"]["diagnostics"] is None
    assert first["message"]["id"] == translation.id
