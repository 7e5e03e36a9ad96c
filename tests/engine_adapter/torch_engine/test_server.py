"""The engine's routes on a real socket, with the real engine behind them."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from dataclasses import replace
from unittest.mock import Mock

import httpx
import pytest
import torch
from safetensors.torch import save

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine import server
from engine_adapter.torch_engine.engine import Counters
from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.protocol import ApiError, ChatRequest, read_body
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.torch_engine.server import EngineHost, create_app
from engine_adapter.torch_engine.service import EngineMetrics, EngineService
from tests.engine_adapter.torch_engine.engine_world import until
from tests.engines import served

TOOL = {"type": "function", "function": {"name": "f"}}
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


def embeds(rows):
    return {"prompt": None, "prompt_embeds": base64.b64encode(save({"t": rows})).decode()}


async def test_models(client):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (await client.get("/v1/models/kvpin-tiny")).json() == card
    answers = [await client.get("/v1/models/gpt-none")]
    for path, body in (("/v1/chat/completions", HELLO), ("/tokenize", {"prompt": "x"})):
        answers.append(await client.post(path, json=body | {"model": "gpt-none"}))
    for answer in answers:
        assert "gpt-none" in assert_error(answer, 404, param="model", code="model_not_found")


async def test_tokenize_is_what_is_served(client):
    for path, body in (
        ("/v1/chat/completions", HELLO | {"tools": [TOOL]}),
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
    tokenized = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens = tokenized.json()["tokens"]
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    response = await client.post("/detokenize", json={"tokens": [0, 10**6]})
    assert_error(response, 400, param="tokens[1]")


async def test_many_tokens_are_not_decoded_on_the_event_loop(client, monkeypatch):
    threads, check = [], server.check_token_ids

    def noting(*given):
        threads.append(threading.current_thread().name.partition("_")[0])
        check(*given)

    monkeypatch.setattr(server, "check_token_ids", noting)
    for size in (100, 4000):
        assert (await client.post("/detokenize", json={"tokens": [9] * size})).status_code == 200
    assert threads[0] != "off-loop" == threads[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        (HELLO | {"tool_choice": "required"}, "tool_choice"),
        (HELLO | {"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"}, "tool_choice"),
        (HELLO | {"response_format": {"type": "xml"}}, "response_format"),
        (HELLO | {"logit_bias": {"4096": 1}}, "logit_bias[4096]"),
        (HELLO | {"tools": "x"}, "tools"),
        (HELLO | {"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [*HELLO["messages"], {"role": "assistant"}, {"role": "user"}]}, "messages[2].content"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt[1]"),
        ({"prompt": [10**6], "extra_ids": [77]}, "extra_ids[0]"),
        ({"prompt": [1], "prompt_table": "none"}, "prompt_table"),
        ({"prompt": "x", "guided_regex": "("}, "guided_regex"),
        ({"prompt": "x", "echo": True, "answer_token_ids": [5]}, "echo"),
        ({"prompt": "x", "guided_regex": "a", "answer_token_ids": [5]}, "guided_regex"),
        ({"prompt": "x", "max_tokens": 8, "answer_token_ids": [1] * 8}, "answer_token_ids"),
        ({"prompt": "x", "answer_token_ids": [3, -1]}, "answer_token_ids[1]"),
        ({"prompt": "x", "answer_token_ids": [10**9]}, "answer_token_ids[0]"),
        ({"prompt": None}, "prompt"),
        (embeds(torch.full((1, 256), torch.nan)), "prompt_embeds"),
        (embeds(torch.zeros(1, 255)), "prompt_embeds"),
        (embeds(torch.zeros(5000, 256, dtype=torch.float16)), "prompt_embeds"),
        (embeds(torch.zeros(1, 256)) | {"echo": True}, "echo"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_the_field(client, body, param):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    assert_error(await client.post(path, json=body), 400, param=param)


async def test_prompts_that_do_not_fit(client, served_engine):
    limit = served_engine.service.engine.max_model_len
    long_chat = {"messages": [{"role": "user", "content": "word " * limit}]}
    for path, body, param in (
        ("completions", {"prompt": [5] * limit, "max_tokens": 1}, "prompt"),
        ("completions", {"prompt": [5] * 10, "max_tokens": limit}, "max_tokens"),
        ("completions", {"prompt": "a" * (257 * limit)}, "prompt"),
        ("chat/completions", HELLO | {"max_completion_tokens": 10**30}, "max_completion_tokens"),
        ("chat/completions", long_chat, "messages"),
    ):
        response = await client.post(f"/v1/{path}", json=body)
        assert str(limit) in assert_error(response, 400, param=param, code="context_length_exceeded")


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
@pytest.mark.parametrize("kind", ["text", "names", "data"])
async def test_no_field_of_a_chat_is_rendered_beyond_the_context(client, field, kind):
    part = "x" * (3 << 20)
    part = {"text": {"k": part}, "names": {part: 1}, "data": {"data": [part], "type": "t"}}[kind]
    part["function"] = {"name": "f"}  # of a tool
    body = {"messages": [{"role": "user", "content": "hi"}]}
    body[field] = part if field == "chat_template_kwargs" else [part]
    response = await client.post("/v1/chat/completions", json=body)
    assert "exceed the context" in assert_error(response, 400, param=field, code="context_length_exceeded")


async def test_a_body_of_many_small_values_is_refused_undecoded(client):
    content = b'{"messages":[' + b"0," * 1_000_001 + b"0]}"
    response = await client.post("/v1/chat/completions", content=content)
    assert "has about 1000001 values" in assert_error(response, 400)


async def test_bodies_beyond_the_limit(client):
    garbage = b"x" * (5 << 20)

    async def unannounced():
        for start in range(0, len(garbage), 1 << 16):
            yield garbage[start : start + (1 << 16)]

    for content in (garbage, unannounced()):
        response = await client.post("/v1/completions", content=content)
        assert_error(response, 413, code="content_too_large")
        assert response.headers["connection"] == "close"  # what was not read is no next request
    assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200


async def test_nothing_but_a_503_while_it_loads():
    with served(create_app(EngineHost())) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for path in ("/health", "/v1/models", "/kv/info", "/metrics", "/kv_event_sources"):
                response = await client.get(path)
                assert_error(response, 503, code="loading")
                assert response.headers["retry-after"]
            assert_error(await client.post("/v1/chat/completions", json=HELLO), 503, code="loading")


@pytest.mark.parametrize(
    ("declared", "parts", "unread"),
    [(b"5", [b"ab", b"cd", b"e"], 0), (b"9" * 30, [b"ab", b"cd", b"efg", b"h", b"i"], 2)],
    ids=["somewhat too large, read to its end", "far too large"],
)
async def test_a_body_that_is_too_large(declared, parts, unread):
    left = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]

    async def receive():
        return left.pop(0)

    with pytest.raises(ApiError):
        await read_body({"type": "http", "headers": [(b"content-length", declared)]}, receive, 3)
    assert len(left) == unread


def test_counters_and_gauges():
    metrics = EngineMetrics()
    metrics.first_token_seconds.observe(0.02)
    counters = Counters(steps=9, cached_tokens=40, running=2)
    counters.finished["stop"] = 5
    stats = {
        "gpu": {"total": 8, "free": 5, "cached": 2, "active": 1},
        "host": {"total": 4, "free": 4, "cached": 0, "bytes": 64},
        "pinned_blocks": 3,
        "blocks": {"evicted": 1, "offloaded": 2, "restored": 0},
    }
    lines = metrics.render(counters, stats).decode().splitlines()
    assert {
        "kvpin_engine_steps_total 9.0",
        "kvpin_engine_cached_tokens_total 40.0",
        "kvpin_engine_requests_running 2.0",
        'kvpin_engine_requests_finished_total{reason="stop"} 5.0',
        'kvpin_engine_kv_blocks{state="free",tier="gpu"} 5.0',
        'kvpin_engine_kv_blocks{state="cached",tier="host"} 0.0',
        'kvpin_engine_kv_blocks_moved_total{what="offloaded"} 2.0',
        "kvpin_engine_kv_pinned_blocks 3.0",
        "kvpin_engine_first_token_seconds_count 1.0",
    } <= {*lines}


async def test_long_data_of_embeddings_is_not_read_on_the_event_loop(served_engine, monkeypatch):
    expected = []

    async def off_loop(tokenizer, chars, work):
        expected.append(chars / tokenizer.encoder.chars_per_ms)
        return work()

    monkeypatch.setattr(ChatTokenizer, "off_loop", off_loop)
    part = {"type": "prompt_embeds", "data": "A" * (8 << 20)}
    with pytest.raises(PromptTableError):  # it is no tensor
        await served_engine.service.prompt(ChatRequest(messages=[{"role": "user", "content": [part]}]))
    assert expected[0] > 1, "milliseconds"


@pytest.mark.parametrize(("vocab_size", "ends"), [(4096, {2, 5}), (2, {5})])
def test_the_tokenizers_end_token_ends_answers_too(monkeypatch, vocab_size, ends):
    model = replace(load_model(None), vocab_size=vocab_size, eos_token_ids=frozenset({5}))
    monkeypatch.setattr("engine_adapter.torch_engine.service.load_model", lambda *_, **_options: model)
    monkeypatch.setattr("engine_adapter.torch_engine.service.Grammars", Mock())
    service = EngineService(EmbeddedOptions(kv_blocks=8))
    try:
        assert service.model.eos_token_ids == service.engine._model.eos_token_ids == ends
    finally:
        service.close()


# --- the engine stops during an answer: never what looks like a whole answer -----------------------------


async def test_streams_and_answers_are_cut_and_health_tells():
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}
    lines: list[str] = []

    async def read_stream() -> None:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                lines.append(line)  # noqa: PERF401 - kept although the stream breaks

    service = await asyncio.to_thread(EngineService, EmbeddedOptions(threads=1, kv_blocks=64))
    with served(create_app(EngineHost(service))) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            reading = asyncio.create_task(read_stream())
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: lines and service.engine.counters.running == 2)
            await asyncio.to_thread(service.close)
            with pytest.raises(httpx.RemoteProtocolError):
                await reading
            assert (await whole).status_code == 503  # nothing was sent yet: another engine can answer
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
            for path in ("/health", "/v1/models", "/kv/info"):
                assert (await client.get(path)).status_code == 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            assert (await client.get("/metrics")).status_code == 200


# --- /kv/…: the cache's own tests and the contract suite check what the routes do to the cache -----------

T = 16


async def complete(client, tokens, **fields):
    request = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0} | fields
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return response.json()


async def test_load_does_not_wait_for_the_engine_thread(client, served_engine):
    release = threading.Event()
    held = served_engine.service.engine.call(lambda _cache: release.wait(30))
    load = (await client.get("/kv/load")).json()
    release.set()
    assert held.result(30)
    assert load == {"instance": served_engine.service.instance, "running": 0, "waiting": 0}


async def test_slices_stop_at_their_size_and_go_on(client):
    await complete(client, range(5, 5 + 6 * T), cache_salt="slices")
    asked = {"cache_salt": "slices", "max_blocks": 4}
    told = [
        (await client.post(f"/kv/{verb}", json=asked)).json() for verb in ("offload", "offload", "restore")
    ]
    assert [(each["moved"], each["remaining"]) for each in told] == [(4, 2), (2, 0), (4, 2)]
    assert told[0]["bytes"] == 2 * told[1]["bytes"]
    assert set(told[0]["left"]) == {"in_use", "pinned", "no_room"}
    flushed = (await client.post("/kv/flush", json={"cache_salt": "slices"})).json()
    assert (flushed["moved"], flushed["remaining"]) == (6, 0)


async def test_tables_come_and_go(client):
    data = save({"t": torch.ones(2, 256)})
    path = "/kv/prompt_tables/a/b c?extra_id=99"
    created = await client.put(path, content=data)
    table = {"id": "a/b c", "extra_id": 99, "rows": 2, "hidden": 256}
    assert (created.status_code, created.json()) == (201, table)
    assert (await client.put(path, content=data)).status_code == 200
    assert table in (await client.get("/kv/prompt_tables")).json()["prompt_tables"]
    assert_error(await client.put("/kv/prompt_tables/x?extra_id=0", content=data), 400, param="extra_id")
    for deleted in (True, False):
        assert (await client.delete("/kv/prompt_tables/a/b c")).json() == {"deleted": deleted}


async def test_embeddings_in_a_message(client):
    def asked(rows):
        part = {"type": "prompt_embeds", "data": embeds(rows)["prompt_embeds"]}
        content = [part, {"type": "text", "text": "go on"}]
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}

    body = asked(torch.ones(3, 256))
    tokenized = (await client.post("/tokenize", json=body)).json()
    assert [token for token in tokenized["tokens"] if token >= 4096] == [4096, 4097, 4098]
    assert sum(value > 0 for value in tokenized["extra_ids"]) == 3
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == tokenized["count"]
    broken = await client.post("/v1/chat/completions", json=asked(torch.full((1, 256), torch.inf)))
    assert_error(broken, 400, param="messages")
