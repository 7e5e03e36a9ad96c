"""The Responses API over a chat engine: turns, and streams over a socket."""

import json
from importlib import import_module

import pytest

from engine_adapter import JsonBody
from engine_adapter.off_loop import MOST_MS, off_loop
from proxy.request.translate import ResponseStore, ResponseTranslation
from tests.proxy.request.translate.response_world import (
    KEYS,
    ROUTE,
    TOOL,
    answered,
    ask,
    events_of,
    serving_chats,
    translation,
)


@pytest.fixture
async def client(engine):
    async with serving_chats(engine) as client:
        yield client


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

    def test_the_source_has_the_items_that_a_request_names(self):
        store = ResponseStore()
        response = answered(translation(store=store), content="a")
        (item,) = response["output"]
        made = translation(store=store, input=[{"id": item["id"]}, {"role": "user", "content": "b"}])
        assert made.source is not None
        named, plain = json.loads(made.source.raw)["input"]
        assert (named["role"], named["content"][0]["text"]) == ("assistant", "a")
        assert plain == {"role": "user", "content": "b"}
        assert translation(store=store, previous_response_id=response["id"]).source is None

    def test_what_is_told_is_about_the_requests_own_items(self):
        store = ResponseStore()
        searched = {"type": "web_search_call", "id": "ws", "action": {"query": "tides"}}
        made = translation(store=store, input=[searched, {"role": "user", "content": "Well?"}])
        assert made.changed == ("item:web_search_call",)
        response = answered(made, content="High.")
        assert translation(store=store, previous_response_id=response["id"]).changed == ()

    def test_what_is_not_to_be_stored_is_not(self):
        store = ResponseStore()
        body = JsonBody(b'{"model": "m", "input": "hi", "store": false}')
        response = answered(ResponseTranslation(body, None, store=store), content="a")
        assert store.of(None).get(response["id"]) is None
        assert store.of(None).bytes == 0


async def test_a_stream_over_a_socket(client):
    answer = await ask(client, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.content)
    assert events[-1]["type"] == "response.completed"
    kept = await client.get(f"{ROUTE}/{events[-1]['response']['id']}", headers=KEYS["a"])
    assert kept.json() == events[-1]["response"]


async def test_what_names_a_kept_response_is_read_off_the_loop(client, monkeypatch):
    """The conversation may be much longer than the request."""
    ready, expected = import_module("proxy.steps.preparation"), []

    async def noting(work, *, ms):
        expected.append(ms)
        return await off_loop(work, ms=ms)

    monkeypatch.setattr(ready, "off_loop", noting)
    first = (await ask(client)).json()["id"]
    assert (await ask(client, previous_response_id=first)).status_code == 200
    assert expected[0] < MOST_MS < expected[1]
