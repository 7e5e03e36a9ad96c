import json
from array import array

import pytest
from starlette.responses import JSONResponse

from engine_adapter import EngineRejected, EngineSpec, EngineUnavailable, JsonBody
from engine_adapter.http.control import ControlClient
from engine_adapter.sglang.requests import CHAT, COMPLETIONS
from engine_adapter.sglang.tokens import tokenize, tokenizes_chats
from tests.engines import served
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.text import encode

USER = {"role": "user", "content": "Weather in Paris?"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def running():
    with running_sglang() as running:
        yield running


@pytest.fixture
async def control(running):
    control = ControlClient(EngineSpec("sglang", running.url, "e"))
    yield control
    await control.aclose()


def body(**fields):
    return JsonBody(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
        {"messages": [USER], "add_generation_prompt": False},  # chats have no such field
        {"messages": [USER], "prompt": "x", "add_special_tokens": True},
        {"messages": [USER], "input_ids": [5, 6, 7]},
    ],
)
async def test_are_those_that_the_chat_is_served_with(control, fields):
    tokens = await tokenize(control, CHAT, body(**fields))
    sent = fields | {"model": "tiny", "max_tokens": 1}
    answer = await control.call("POST", CHAT, json=sent)
    again = await control.call("POST", CHAT, json=sent | {"input_ids": tokens.tolist()})
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens) - 1
    assert again["choices"] == answer["choices"]


async def test_of_a_text(control):
    expected = array("i", encode("Hello there"))
    for prompt in ("Hello there", ["Hello there"]):
        # SGLang's completions always add special tokens.
        assert await tokenize(control, COMPLETIONS, body(prompt=prompt, add_special_tokens=False)) == expected


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400),
        (COMPLETIONS, {"prompt": [1, 2]}, 400),
        (COMPLETIONS, {}, 400),
        (CHAT, {"messages": []}, 400),
        ("/v1/responses", {"input": "hi"}, 404),
    ],
)
async def test_that_are_not_told(control, path, fields, status):
    with pytest.raises(EngineRejected) as caught:
        await tokenize(control, path, body(**fields))
    assert caught.value.status == status


async def test_a_server_without_a_tokenizer(control):
    assert await tokenizes_chats(control)
    with served(_nothing) as url:
        other = ControlClient(EngineSpec("sglang", url, "e"))
        assert not await tokenizes_chats(other)
        await other.aclose()


async def test_another_server():
    with served(_something) as url:
        other = ControlClient(EngineSpec("sglang", url, "e"))
        with pytest.raises(EngineUnavailable, match="not as expected"):
            await tokenize(other, CHAT, body(messages=[USER]))
        await other.aclose()


async def _nothing(scope, receive, send):
    error = {"object": "error", "message": "no tokenizer", "type": "x", "param": None, "code": 500}
    await JSONResponse(error, 500)(scope, receive, send)


async def _something(scope, receive, send):
    await JSONResponse({"tokens": "some"})(scope, receive, send)
