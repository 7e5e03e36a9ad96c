"""The engine's routes on a real socket, with the real engine behind them."""

from __future__ import annotations

import httpx
import pytest

from engine_adapter.torch_engine.server import EngineHost, create_app
from tests.engines import served

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


def assert_error(response: httpx.Response, status: int, *, param=None, code=None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] == (code or error["code"])
    assert error["code"]
    assert error["message"]
    return error["message"]


async def test_models(client):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["id"] == "kvpin-tiny"
    assert card["max_model_len"] > 0
    assert (await client.get("/v1/models/kvpin-tiny")).json() == card
    assert_error(await client.get("/v1/models/other"), 404, param="model", code="model_not_found")


async def test_tokenize_is_what_is_served(client):
    for path, body in (
        ("/v1/chat/completions", HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/completions", {"prompt": "some text", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "some text", "add_special_tokens": False, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1}),
    ):
        tokenized = (await client.post("/tokenize", json=body)).json()
        served_answer = (await client.post(path, json=body | {"return_token_ids": True})).json()
        assert tokenized["tokens"] == served_answer["prompt_token_ids"]
        assert tokenized["count"] == len(tokenized["tokens"]) == served_answer["usage"]["prompt_tokens"]
        assert tokenized["extra_ids"] is None


async def test_detokenize(client):
    text = "zażółć 漢字 🙂"
    tokens = (await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()[
        "tokens"
    ]
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    response = await client.post("/detokenize", json={"tokens": [0, 10**6]})
    assert_error(response, 400, param="tokens[1]")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "user"}], "max_tokens": -1}, "max_tokens"),
        (HELLO | {"cache_salt": ""}, "cache_salt"),
        (HELLO | {"temperature": 3}, "temperature"),
        (HELLO | {"stop": ["", "a"]}, "stop[0]"),
        (HELLO | {"n": 129}, "n"),
        (HELLO | {"tool_choice": "required"}, "tool_choice"),
        (HELLO | {"response_format": {"type": "xml"}}, "response_format"),
        (HELLO | {"logit_bias": {"4096": 1}}, "logit_bias[4096]"),
        (HELLO | {"tools": "x"}, "tools"),
        (HELLO | {"keep_priority": 10**9}, "keep_priority"),
        (HELLO | {"stop_token_ids": [5, 10**6], "min_tokens": 2}, "stop_token_ids[1]"),
        (HELLO | {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (HELLO | {"stop_token_ids": list(range(4096)), "min_tokens": 1}, "stop_token_ids"),
    ],
)
async def test_bad_chats_name_the_field(client, body, param):
    assert_error(await client.post("/v1/chat/completions", json=body), 400, param=param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": [1, -5]}, "prompt[1]"),
        ({"prompt": [1, 10**6]}, "prompt[1]"),
        ({"prompt": [1, 10**6], "extra_ids": [0, 0]}, "extra_ids[1]"),
        ({"prompt": [1, 2], "extra_ids": [0]}, "extra_ids"),
        ({"prompt": [1, 2], "extra_ids": [0, 5]}, "extra_ids[1]"),
        ({"prompt": [10**6], "extra_ids": [10**30]}, "extra_ids[0]"),
        ({"prompt": [10**6], "extra_ids": [77]}, "extra_ids[0]"),
        ({"prompt": [1], "prompt_table": "none"}, "prompt_table"),
        ({"prompt": "x", "guided_regex": "("}, "guided_regex"),
        ({"prompt": "x", "echo": True, "answer_token_ids": [5]}, "echo"),
        ({"prompt": "x", "guided_regex": "a", "min_tokens": 1}, "min_tokens"),
        ({"prompt": "x", "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"prompt": "x", "guided_regex": "a", "answer_token_ids": [5]}, "guided_regex"),
    ],
)
async def test_bad_completions_name_the_field(client, body, param):
    assert_error(await client.post("/v1/completions", json=body), 400, param=param)


async def test_prompts_that_do_not_fit(client, served_engine):
    limit = served_engine.service.engine.max_model_len
    too_long = "context_length_exceeded"
    response = await client.post("/v1/completions", json={"prompt": [5] * limit, "max_tokens": 1})
    assert str(limit) in assert_error(response, 400, param="prompt", code=too_long)
    response = await client.post("/v1/completions", json={"prompt": [5] * 10, "max_tokens": limit})
    assert_error(response, 400, param="max_tokens", code=too_long)
    response = await client.post("/v1/chat/completions", json=HELLO | {"max_completion_tokens": 10**30})
    assert_error(response, 400, param="max_completion_tokens", code=too_long)
    response = await client.post("/v1/completions", json={"prompt": "a" * (257 * limit)})
    assert_error(response, 400, param="prompt", code=too_long)
    messages = [{"role": "user", "content": "word " * limit}]
    response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert_error(response, 400, param="messages", code=too_long)


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
@pytest.mark.parametrize("kind", ["text", "names"])
async def test_no_field_of_a_chat_is_rendered_beyond_the_context(client, field, kind):
    part = "x" * (3 << 20)
    part = {"k": part} if kind == "text" else {part: 1}
    part["function"] = {"name": "f"}  # of a tool
    body = {"messages": [{"role": "user", "content": "hi"}]}
    body[field] = part if field == "chat_template_kwargs" else [part]
    response = await client.post("/v1/chat/completions", json=body)
    assert "exceed the context" in assert_error(response, 400, param=field, code="context_length_exceeded")


@pytest.mark.parametrize("field", ["messages", "chat_template_kwargs"])
async def test_a_body_of_many_small_values_is_refused_undecoded(client, field):
    values = b"[" + b"0," * 1_000_001 + b"0]"
    response = await client.post("/v1/chat/completions", content=b'{"%s":%s}' % (field.encode(), values))
    assert "has about 1000001 values" in assert_error(response, 400)


async def test_an_unknown_model(client):
    for path, body in (("/v1/chat/completions", HELLO), ("/tokenize", {"prompt": "x"})):
        response = await client.post(path, json=body | {"model": "gpt-none"})
        assert "gpt-none" in assert_error(response, 404, param="model", code="model_not_found")


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "\xff"}', b"[" * 200_000, b"\x00" * 1000])
async def test_bodies_that_are_no_json(client, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/kv/pin"):
        assert (await client.post(path, content=body)).status_code == 400


async def test_bodies_beyond_the_limit(client):
    garbage = b"x" * (5 << 20)

    async def unannounced():
        for start in range(0, len(garbage), 1 << 16):
            yield garbage[start : start + (1 << 16)]

    assert_error(await client.post("/v1/completions", content=garbage), 413, code="content_too_large")
    response = await client.post("/v1/completions", content=unannounced())
    assert_error(response, 413, code="content_too_large")
    assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200


async def test_nothing_but_a_503_while_it_loads():
    with served(create_app(EngineHost())) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for path in ("/health", "/v1/models", "/kv/info", "/metrics", "/kv_event_sources"):
                response = await client.get(path)
                assert_error(response, 503, code="loading")
                assert response.headers["retry-after"]
            assert_error(await client.post("/v1/chat/completions", json=HELLO), 503, code="loading")
