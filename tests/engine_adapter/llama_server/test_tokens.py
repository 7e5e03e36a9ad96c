"""The ids of a prompt are those of the server. All forms of requests: tests/live/test_prompt_forms.py."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineRejected
from engine_adapter.llama_server.checkpoints import user_starts
from engine_adapter.llama_server.slot_io import read_user_mark, tokenize
from tests.engine_adapter.builders import body
from tests.engines import served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def user(content):
    return {"role": "user", "content": content}


CHAT_WITH_TOOLS = {
    "messages": [
        user("Weather?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_12345",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Kraków"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_12345", "content": "18 °C"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
}


async def test_a_server_whose_model_begins_with_its_own_token_finds_all_ids_in_its_slot(
    start_llama, control_of
):
    server = start_llama("--override-kv", "tokenizer.ggml.add_bos_token=bool:true", slots=4)
    control = control_of(server.url)
    for path, fields in (
        (CHAT, CHAT_WITH_TOOLS),
        (COMPLETIONS, {"prompt": " größer\n漢字 🙂‍↔️ <|im_start|></s>"}),
        (COMPLETIONS, {"prompt": [[300, 301, 302, 900]]}),
        (COMPLETIONS, {"prompt": [300, " mixed", 900]}),
    ):
        ids = await tokenize(control, path, body(**fields))
        asked = {**fields, "max_tokens": 1, "id_slot": 3}
        assert len(ids) == (await control.call("POST", path, json=asked))["usage"]["prompt_tokens"]
        again = {"prompt": ids.tolist(), "n_predict": 0, "id_slot": 3}
        timings = (await control.call("POST", "/completion", json=again))["timings"]
        assert timings["cache_n"] == len(ids) - 1, "the last one is always computed"


async def test_where_user_messages_begin(control):
    messages = [user("one"), {"role": "assistant", "content": "two"}, user("three")]
    ids, mark = await tokenize(control, CHAT, body(messages=messages)), await read_user_mark(control)
    first = await tokenize(control, CHAT, body(messages=messages[:1]))
    assert list(mark) == first[: len(mark)].tolist()
    assert len(user_starts(ids, mark)) == 2


@pytest.mark.parametrize(("before_message", "takes_none", "mark"), [
    ("<|im_start|>user\n", True, "<|im_start|>user"),
    (" [INST] ", True, "[INST]"),
    ("<end_of_turn>\n<start_of_turn>user\n", False, "<start_of_turn>user"),
    ("\n", True, ""),
])  # fmt: skip
async def test_an_end_marker_is_no_part_of_the_mark(control_of, before_message, takes_none, mark):
    asked = []

    async def render(request):
        texts = [message["content"] for message in (await request.json())["messages"]]
        status = 200 if texts or takes_none else 500
        return JSONResponse({"prompt": "".join(["<s>", *(before_message + text for text in texts)])}, status)

    async def read(request):
        asked.append((await request.json())["content"])
        return JSONResponse({"tokens": [1, 2]})

    routes = [Route("/apply-template", render, methods=["POST"]), Route("/tokenize", read, methods=["POST"])]
    with served(Starlette(routes=routes)) as url:
        assert await read_user_mark(control_of(url)) == ((1, 2) if mark else ())
    assert asked == [mark] * bool(mark)


async def test_without_a_chat_template_no_message_has_a_mark(control_of):
    refuse = Route("/apply-template", lambda _: JSONResponse({}, status_code=400), methods=["POST"])
    with served(Starlette(routes=[refuse])) as url:
        assert await read_user_mark(control_of(url)) == ()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [user([{"type": "image_url", "image_url": {"url": "data:,"}}])]}, "messages[0]"),
        (CHAT, {"messages": [user("a"), user([{"type": "input_audio"}])]}, "messages[1].content[0]"),
        (CHAT, {"messages": [user(["a"])]}, "messages[0].content[0]"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[[1]]]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [2**31]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {}, "prompt"),
        ("/v1/embeddings", {"input": "a"}, "path"),
    ],
)
async def test_what_ids_do_not_tell(control_of, path, fields, param):
    with pytest.raises(EngineRejected, match="follow") as caught:
        await tokenize(control_of("http://127.0.0.1:9"), path, body(**fields))
    assert caught.value.status == 400
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "'messages' is required"),
        ({"messages": [{"role": "sorcerer", "content": "a"}]}, "unknown role sorcerer"),
    ],
)
async def test_what_the_server_refuses_it_says(control, fields, message):
    with pytest.raises(EngineRejected, match=message) as caught:
        await tokenize(control, CHAT, body(**fields))
    with pytest.raises(EngineRejected) as real:
        await control.call("POST", CHAT, json=fields)
    assert (str(caught.value), caught.value.status) == (str(real.value), real.value.status)
