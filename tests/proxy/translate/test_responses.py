"""Requests of the Responses API and their answers, word by word; and over a real socket."""

import json
from dataclasses import replace

import httpx
import pytest
from openai.types.responses import Response as SdkResponse

from engine_adapter import JsonBody
from engine_adapter.types import RESPONSES_ROUTES
from proxy.errors import BadRequest, EngineFailed, NotFound
from proxy.request.tenants import ApiKey, Tenants
from proxy.translate.responses import ResponseTranslation
from proxy.translate.responses_store import ResponseStore
from tests.fakes import DONE, INFO, FakeAdapter, client_of, event, is_openai_error, proxy_over

ROUTE = "/v1/responses"
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 32, "created_cache_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
TOOL = {"type": "function", "name": "tide", "description": "Height", "parameters": {"type": "object"}}
FUNCTION = {
    "type": "function",
    "function": {"name": "tide", "description": "Height", "parameters": {"type": "object"}},
}


def translation(tenant=None, store=None, **fields):
    body = {"model": "m", "input": "hi", **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    return ResponseTranslation(JsonBody(json.dumps(body).encode()), tenant, store=store or ResponseStore())


def chat_of(**fields):
    return json.loads(translation(**fields).chat.raw)


def answered(made, finish="stop", usage=USAGE, **message):
    """The response of a translation, from a chat whose message has these fields."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    content = json.dumps({"model": "served", "choices": [choice], "usage": usage}).encode()
    response = json.loads(made.answer(content))
    SdkResponse.model_validate(response)
    return response


def streamed(made, *deltas, finish="stop", end=True):
    """The events of a translation, from a chat that streams these."""
    raw = b"".join(made.event(json.dumps({"choices": [{"delta": delta}]}).encode()) for delta in deltas)
    last = {"choices": [{"delta": {}, "finish_reason": finish}], "usage": USAGE}
    raw += made.event(json.dumps(last).encode())
    raw += made.end() if end else b""
    return events_of(raw)


def events_of(raw):
    events = []
    for part in raw.split(b"\n\n")[:-1]:
        name, data = part.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


class TestRequests:
    def test_the_least(self):
        assert chat_of() == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

    def test_fields_that_are_an_engines_stay(self):
        kept = {
            "temperature": 0.5,
            "top_p": 0.9,
            "cache_salt": "s",
            "chat_template_kwargs": {"a": 1},
            "prompt_cache_key": "k",
            "user": "u",
            "parallel_tool_calls": False,
        }
        dropped = {"metadata": {"a": "b"}, "truncation": "auto", "n": 2, "client_metadata": {}}
        assert chat_of(**kept, **dropped) == {**chat_of(), **kept}

    @pytest.mark.parametrize(
        ("fields", "of_chat"),
        [
            ({"max_output_tokens": 7}, {"max_tokens": 7}),
            ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
            ({"reasoning": {"effort": None}}, {}),
            ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
            ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
            (
                {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": True}}},
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {}, "strict": True},
                    }
                },
            ),
            ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
            ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
            ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
            ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": [FUNCTION]}),
            ({"tools": [{"type": "web_search"}, TOOL, {"type": "mcp"}]}, {"tools": [FUNCTION]}),
            ({"tools": [{"type": "web_search"}]}, {}),
            ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [FUNCTION], "tool_choice": "required"}),
            (
                {"tools": [TOOL], "tool_choice": {"type": "function", "name": "tide"}},
                {
                    "tools": [FUNCTION],
                    "tool_choice": {"type": "function", "function": {"name": "tide"}},
                },
            ),
            (
                {
                    "tools": [TOOL, TOOL | {"name": "other"}],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "mode": "required",
                        "tools": [{"type": "function", "name": "tide"}],
                    },
                },
                {"tools": [FUNCTION], "tool_choice": "required"},
            ),
            (
                {"tools": [TOOL | {"strict": True}]},
                {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}]},
            ),
        ],
    )
    def test_each_field_has_its_place(self, fields, of_chat):
        assert chat_of(**fields) == {**chat_of(), **of_chat}

    def test_a_custom_tool_is_offered_as_a_function(self):
        (tool,) = chat_of(tools=[{"type": "custom", "name": "patch", "description": "Patches"}])["tools"]
        assert tool["function"]["name"] == "patch"
        assert tool["function"]["parameters"]["required"] == ["input"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": ...}, "input"),
            ({"input": 1}, "input"),
            ({"input": ["a"]}, "input[0]"),
            ({"instructions": 1}, "instructions"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"moderation": {"model": "x"}}, "moderation"),
            ({"tools": {}}, "tools"),
            ({"tools": [{"type": "function"}]}, "tools[0]"),
            ({"tools": [1]}, "tools[0]"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
            ({"text": "a"}, "text"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": []}, "metadata"),
            ({"include": "a"}, "include"),
        ],
    )
    def test_what_is_wrong_is_named(self, fields, param):
        with pytest.raises(BadRequest) as caught:
            translation(**fields)
        assert caught.value.param == param

    @pytest.mark.parametrize(
        ("of_chat", "param"),
        [
            ("messages", "input"),
            ("messages[1].content[0]", "input"),
            ("max_tokens", "max_output_tokens"),
            ("response_format.json_schema", "text.format"),
            ("temperature", "temperature"),
        ],
    )
    def test_errors_of_the_chat_name_the_clients_field(self, of_chat, param):
        assert translation().param(of_chat) == param


class TestAnswers:
    def test_a_text(self):
        response = answered(translation(metadata={"a": "b"}, temperature=0.5), content="hello")
        assert response["output"][0].pop("id").startswith("msg_")
        assert response["output"] == [
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
            }
        ]
        assert response["id"].startswith("resp_")
        assert response["usage"] == {
            "input_tokens": 40,
            "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 8},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 42,
        }
        shown = {
            name: response[name] for name in ("status", "model", "metadata", "temperature", "text", "tools")
        }
        assert shown == {
            "status": "completed",
            "model": "m",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "text": {"format": {"type": "text"}},
            "tools": [],
        }

    def test_reasoning_and_calls(self):
        calls = [
            {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": "{}"}},
            {"type": "function", "function": {"name": "patch", "arguments": '{"input": "x"}'}},
        ]
        made = translation(
            tools=[TOOL, {"type": "custom", "name": "patch"}], include=["reasoning.encrypted_content"]
        )
        thought, call, custom = answered(made, "tool_calls", reasoning="Hm.", content=None, tool_calls=calls)[
            "output"
        ]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert thought["encrypted_content"] == "kvpin.SG0u"
        assert (call["type"], call["call_id"], call["name"], call["arguments"]) == (
            "function_call",
            "c1",
            "tide",
            "{}",
        )
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "x")
        assert custom["call_id"].startswith("call_")

    @pytest.mark.parametrize(
        ("finish", "status", "reason"),
        [
            ("stop", "completed", None),
            ("tool_calls", "completed", None),
            ("length", "incomplete", "max_output_tokens"),
            ("content_filter", "incomplete", "content_filter"),
        ],
    )
    def test_how_it_ended(self, finish, status, reason):
        response = answered(translation(), finish, content="a")
        assert (response["status"], response["output"][0]["status"]) == (status, status)
        assert response["incomplete_details"] == (reason and {"reason": reason})

    def test_no_words_and_no_usage(self):
        response = answered(translation(), usage=None, content="")
        assert (response["output"], response["usage"]["total_tokens"]) == ([], 0)

    def test_what_kvpin_adds(self):
        made = translation()
        made.extra = {"prompt_cache_diagnostics": {"type": "cache_hit"}}
        assert answered(made, content="a")["prompt_cache_diagnostics"] == {"type": "cache_hit"}

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"choices": []}', b'{"choices": 7}', b'"\xff"'])
    def test_what_is_no_chat(self, content):
        with pytest.raises(EngineFailed, match="no chat"):
            translation().answer(content)


class TestStreams:
    def test_each_item_in_its_events(self):
        call = {"index": 0, "id": "c1", "function": {"name": "tide", "arguments": ""}}
        events = streamed(
            translation(tools=[TOOL]),
            {"role": "assistant", "content": ""},
            {"reasoning_content": "H"},
            {"reasoning_content": "m."},
            {"content": "hel"},
            {"content": "lo"},
            {"tool_calls": [call]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
            finish="tool_calls",
        )
        assert [each["type"].removeprefix("response.") for each in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        response = events[-1]["response"]
        done = [each for each in events if each["type"] == "response.output_item.done"]
        assert [each["item"] for each in done] == response["output"]
        assert [each["output_index"] for each in done] == [0, 1, 2]
        assert response["output"][2]["arguments"] == "{}"
        assert events[0]["response"]["output"] == []
        assert events[0]["response"]["usage"] is None
        assert response["usage"]["output_tokens"] == 2

    def test_calls_that_are_written_side_by_side(self):
        def call(index, name=None, arguments=None):
            return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}}]}

        events = streamed(
            translation(tools=[TOOL, {"type": "custom", "name": "patch"}]),
            call(0, "ti"),
            call(0, "tide"),
            call(1, "patch"),
            call(0, None, "{}"),
            call(1, None, '{"input":'),
            call(1, None, '"x"}'),
        )
        tide, patch = events[-1]["response"]["output"]
        assert (tide["name"], tide["arguments"], patch["input"]) == ("tide", "{}", "x")
        assert [
            each["delta"] for each in events if each["type"].endswith("custom_tool_call_input.delta")
        ] == ["x"]

    def test_a_refusal(self):
        events = streamed(translation(), {"refusal": "No."})
        assert events[-1]["response"]["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
        assert "response.refusal.done" in [each["type"] for each in events]

    def test_logprobs(self):
        made, one = (
            translation(top_logprobs=1),
            {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []},
        )
        chunk = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [one]}}]}
        events = events_of(made.event(json.dumps(chunk).encode()))
        assert events[-1]["logprobs"] == [one]

    def test_telemetry_passes(self):
        made = translation()
        chunk = {"choices": [{"delta": {"content": "a"}}], "timings": {"prompt_ms": 1.5}}
        progress = {"choices": [{"delta": {"content": None}}], "prompt_progress": {"total": 3}}
        events = events_of(made.event(json.dumps(progress).encode()) + made.event(json.dumps(chunk).encode()))
        assert events[2]["type"] == "response.in_progress"
        assert events[2]["prompt_progress"] == {"total": 3}
        assert (events[-1]["type"], events[-1]["timings"]) == (
            "response.output_text.delta",
            {"prompt_ms": 1.5},
        )

    @pytest.mark.parametrize(
        ("error", "code"),
        [({"message": "no room", "code": "full", "param": None}, "full"), ("no room", "server_error")],
    )
    def test_an_error_is_the_last_event(self, error, code):
        made = translation()
        raw = made.event(b'{"choices": [{"delta": {"content": "a"}}]}')
        raw += made.event(json.dumps({"error": error}).encode()) + made.end()
        last = events_of(raw)[-1]
        assert (last["type"], last["message"], last["code"]) == ("error", "no room", code)

    def test_a_stream_without_a_reason_has_no_end(self):
        made = translation()
        made.event(b'{"choices": [{"delta": {"content": "a"}}]}')
        assert made.end() == b""


class TestState:
    def test_the_next_turn_has_the_same_beginning(self):
        store = ResponseStore()
        calls = [{"id": "c1", "function": {"name": "tide", "arguments": "{}"}}]
        first = translation(store=store, instructions="Be brief.", tools=[TOOL])
        response = answered(first, reasoning_content="Hm.", content="a", tool_calls=calls)
        result = {"type": "function_call_output", "call_id": "c1", "output": "4 m"}
        by_name = translation(store=store, input=[result], previous_response_id=response["id"])
        items = [{"role": "user", "content": "hi"}, *response["output"], result]
        by_items = translation(store=store, input=items)
        references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
        by_reference = translation(store=store, input=[items[0], *references, result])
        assert by_name.chat.raw == by_items.chat.raw == by_reference.chat.raw
        assert json.loads(by_name.chat.raw)["messages"][0] == {"role": "user", "content": "hi"}

    def test_what_is_not_to_be_stored_is_not(self):
        store = ResponseStore()
        body = JsonBody(b'{"model": "m", "input": "hi", "store": false}')
        response = answered(ResponseTranslation(body, None, store=store), content="a")
        assert store.of(None).get(response["id"]) is None
        assert store.of(None).bytes == 0

    def test_another_tenants_response_never_was(self):
        store = ResponseStore(2)
        response = answered(translation("a", store), content="secret")
        with pytest.raises(NotFound) as stolen:
            translation("b", store, previous_response_id=response["id"])
        with pytest.raises(NotFound) as unknown:
            translation("b", store, previous_response_id="resp_none")
        assert str(stolen.value).replace(response["id"], "ID") == str(unknown.value).replace(
            "resp_none", "ID"
        )
        with pytest.raises(NotFound, match="not found"):
            translation("b", store, input=[{"type": "item_reference", "id": response["output"][0]["id"]}])
        translation("a", store, input="more", previous_response_id=response["id"])
        translation("a", store, input=..., previous_response_id=response["id"])


CHAT = {
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
KEYS = {name: {"authorization": f"Bearer key-{name}"} for name in ("a", "b")}
TENANTS = Tenants(ApiKey.of(f"key-{name}", name) for name in KEYS)


async def chats(exchange):
    if exchange.json.get("stream"):
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE}
        await exchange.stream(event({"choices": [{"delta": {"content": "hi"}}]}), event(last), DONE)
    else:
        await exchange.send(CHAT)


@pytest.fixture
async def client(engine):
    engine.script = chats
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=RESPONSES_ROUTES))
    async with proxy_over(adapter, tenants=TENANTS) as proxy, client_of(proxy) as client:
        yield client
        await proxy.settled()


async def ask(client, tenant="a", **fields):
    return await client.post(ROUTE, json={"model": "m", "input": "hi", **fields}, headers=KEYS[tenant])


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
        ("GET", "/input_items?order=up", 400, "order"),
        ("GET", "/input_items?after=msg_none", 400, "after"),
        ("GET", "/other", 404, None),
        ("PUT", "", 404, None),
    ],
)
async def test_what_cannot_be_asked_of_a_response(client, method, path, status, param):
    made = (await ask(client)).json()
    answer = await client.request(method, f"{ROUTE}/{made['id']}{path}", headers=KEYS["a"])
    assert is_openai_error(answer, status, param=param)


async def test_another_tenant_cannot_tell_that_it_is_there(client, engine):
    made = (await ask(client)).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answers = [
            await client.request(method, f"{ROUTE}/{name}{path}", headers=KEYS["b"])
            for name in (made, "resp_none")
        ]
        assert is_openai_error(answers[0], 404)
        assert answers[0].text.replace(made, "ID") == answers[1].text.replace("resp_none", "ID")
    assert is_openai_error(
        await ask(client, "b", previous_response_id=made), 404, param="previous_response_id"
    )
    assert len(engine.seen) == 1


async def test_conversations_are_not_compacted(client):
    answer = await client.post(f"{ROUTE}/compact", json={"model": "m"}, headers=KEYS["a"])
    assert is_openai_error(answer, 404)
    assert "compacted" in answer.text


async def test_a_stream_over_a_socket(client):
    answer = await ask(client, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.content)
    assert events[-1]["type"] == "response.completed"
    kept = await client.get(f"{ROUTE}/{events[-1]['response']['id']}", headers=KEYS["a"])
    assert kept.json() == events[-1]["response"]


async def test_an_engine_that_dies_leaves_an_error_and_no_end(client, engine):
    async def script(exchange):
        await exchange.start()
        await exchange.chunk(event({"choices": [{"delta": {"content": "hi"}}]}))
        exchange.die()

    engine.script = script
    parts = []
    with pytest.raises(httpx.RemoteProtocolError):
        await read_stream(client, parts)
    assert events_of(b"".join(parts))[-1]["type"] == "error"


async def read_stream(client, parts):
    asked = {"model": "m", "input": "hi", "stream": True}
    async with client.stream("POST", ROUTE, json=asked, headers=KEYS["a"]) as answer:
        async for part in answer.aiter_bytes():
            parts.append(part)


async def test_an_error_of_the_engine_names_the_clients_field(client, engine):
    async def script(exchange):
        await exchange.send({"error": {"message": "too many", "param": "max_tokens"}}, status=400)

    engine.script = script
    assert is_openai_error(await ask(client, max_output_tokens=7), 400, param="max_output_tokens")
