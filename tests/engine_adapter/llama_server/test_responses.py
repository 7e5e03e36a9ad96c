"""The chat made of a response request has the prompt that the server itself makes of the request."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.body import JsonBody, UnreadableField
from engine_adapter.errors import EngineRejected
from engine_adapter.llama_server.responses import as_chat
from tests.engine_adapter.llama_server.response_requests import (
    CALL,
    OUTPUT,
    REFUSED,
    REQUESTS,
    THOUGHT,
    TOOL,
    said,
    user,
)

SLOT = 2


def body_of(**fields):
    return JsonBody(msgspec.json.encode(fields))


def chat_of(**fields):
    return msgspec.json.decode(as_chat(body_of(**fields)).raw)


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_chat_is_the_server_s_own(control, name):
    """As many tokens, and all of them (but the last, always computed) those that the slot holds then."""
    response = await control.call(
        "POST", "/v1/responses", json={**REQUESTS[name], "max_output_tokens": 1, "id_slot": SLOT}
    )
    chat = {**chat_of(**REQUESTS[name]), "max_tokens": 1, "id_slot": SLOT}
    answer = await control.call("POST", "/v1/chat/completions", json=chat)
    tokens = response["usage"]["input_tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens - 1


@pytest.mark.parametrize("name", REFUSED)
async def test_what_the_server_refuses(control, name):
    fields, param = REFUSED[name]
    with pytest.raises(EngineRejected, match="not followed") as caught:
        as_chat(body_of(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)
    with pytest.raises(EngineRejected):
        await control.call("POST", "/v1/responses", json={**fields, "max_output_tokens": 1})


def test_instructions_the_server_would_drop():
    with pytest.raises(EngineRejected, match="must be a text"):
        as_chat(body_of(input="a", instructions=["Be brief."]))


def test_a_conversation():
    chat = chat_of(
        model="m",
        instructions="Be brief.",
        input=[user("Weather?", type="message", status="completed", name="Ann"), THOUGHT, said("So."), CALL,
               OUTPUT],
        tools=[TOOL, TOOL | {"name": "b", "strict": False}],
        reasoning={"effort": "low", "summary": "auto"},
    )  # fmt: skip
    function = {name: value for name, value in TOOL.items() if name != "type"}
    call = {name: CALL[name] for name in ("name", "arguments")}
    assert chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "Ann"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "So."}],
                "reasoning_content": "Weather, then.",
                "tool_calls": [{"id": "call_12345", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call_12345", "content": "18 °C"},
        ],
        "tools": [
            {"type": "function", "function": function | {"strict": True}},
            {"type": "function", "function": function | {"name": "b", "strict": False}},
        ],
        "reasoning_effort": "low",
    }


def test_other_fields_keep_their_bytes():
    raw = b'{"input":"a","temperature":0.10,"chat_template_kwargs":{"x":1e3, "y":"\\u0041"}}'
    chat = as_chat(JsonBody(raw)).raw
    assert b'"temperature":0.10' in chat
    assert b'{"x":1e3, "y":"\\u0041"}' in chat


def test_the_request_is_left_as_it_is():
    body = body_of(**REQUESTS["words after a call"])
    before = body.raw
    as_chat(body)
    assert (body.raw, body.get("input")) == (before, REQUESTS["words after a call"]["input"])


def test_a_field_that_is_no_value():
    with pytest.raises(UnreadableField) as caught:
        as_chat(JsonBody(rb'{"input":[{"role":"user","content":1e999}]}'))
    assert caught.value.param == "input[0][...]"


texts = st.sampled_from(["", "a", " b\n", "漢字 🙂", "<|im_end|>", "x" * 40])
input_parts = st.lists(st.builds(lambda text: {"type": "input_text", "text": text}, texts), max_size=3)
items = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "system", "developer", "assistant"]),
        texts | input_parts,
    ),
    st.lists(texts, max_size=3).map(lambda these: said(*these)),
    st.sampled_from([CALL, CALL | {"call_id": "call_2"}, THOUGHT]),
    st.builds(lambda output: OUTPUT | {"output": output}, texts | input_parts),
)
requests = st.fixed_dictionaries(
    {"input": texts | st.lists(items, max_size=6)},
    optional={
        "instructions": st.none() | texts,
        "tools": st.lists(st.sampled_from([TOOL, {"type": "web_search"}]), max_size=2),
        "reasoning": st.sampled_from([None, {}, {"effort": "none"}, {"effort": "low"}]),
    },
)


@pytest.fixture(scope="module")
def client(llama):
    with httpx.Client(base_url=llama.url, trust_env=False) as client:
        yield client


def counted(client, route, body):
    """Prompt tokens by the server, None for what it refuses."""
    answer = client.post(f"/v1/{route}/input_tokens", content=body)
    return answer.json()["input_tokens"] if answer.is_success else None


@settings(max_examples=60, deadline=None)
@given(fields=requests)
def test_any_conversation_is_counted_alike(client, fields):
    body = body_of(**fields)
    try:
        chat = as_chat(body)
    except EngineRejected:
        chat = None
    ours = counted(client, "chat/completions", chat.raw) if chat is not None else None
    assert ours == counted(client, "responses", body.raw)
