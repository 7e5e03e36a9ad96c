"""Hostile requests: none may hold the event loop, on which all others wait."""

import json
from dataclasses import replace

import pytest

from proxy.core.normalise import BILLING, Rule
from proxy.request.normalising import ChosenRules, Normalising
from tests.fakes import ANSWER, CHAT, INFO, FakeAdapter, FakeEngine, client_of, event, proxy_over
from tests.held_loop import MOST_MS, least_hold

USAGE = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
PIECE = {
    "id": "c",
    "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
    "usage": USAGE,
}
LAST = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}


USER = {"role": "user", "content": "Hi"}


def chat(**fields):
    return {"model": "m", "messages": [USER]} | fields


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
async def client(engine, tokenizer_dir):
    """A client of a proxy that follows what its engine holds."""
    adapter = FakeAdapter("a", engine.url, replace(INFO, tokenizer=str(tokenizer_dir), max_model_len=4096))
    rules = Normalising([ChosenRules(frozenset({Rule.VOLATILE_LAST, Rule.DATE_TO_DAY}))])
    async with (
        proxy_over(adapter, reuse=True, normalising=rules, max_body_bytes=16 << 20) as proxy,
        client_of(proxy) as client,
    ):
        client.timeout = 120
        client.proxy = proxy
        yield client
        await proxy.settled()


async def test_a_diagnosis_in_each_chunk_of_a_stream(engine, client):
    async def script(exchange):
        await exchange.stream(*[event(PIECE)] * 100, event(LAST), b"data: [DONE]\n\n")

    engine.script = script

    def asked(last):
        message = {"role": "user", "content": "word " * 100, "x": [*[[[0]] * 10_000] * 10, [last]]}
        return json.dumps(chat(stream=True, messages=[message])).encode()

    headers = {"x-kvpin-compare-with": "c"}
    await client.post(CHAT, content=asked(0))
    body = asked(1)

    async def ask():
        answer = await client.post(CHAT, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.text.count("prompt_cache_diagnostics") == 101

    assert await least_hold("diagnosis", ask) < MOST_MS


LONG = "tokens 1111 " * 600_000
SHAPES = {
    "volatile lines": (CHAT, chat(messages=[{"role": "system", "content": LONG}, USER])),
    "a billing line": (
        "/v1/messages",
        {"max_tokens": 1, "system": BILLING + ":" + "a=;" * 2_000_000, **chat()},
    ),
    "cache marks in many parts": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"text": "x", "cache_control": None}] * 16_000}]),
    ),
    "very many prompts": ("/v1/completions", {"model": "m", "prompt": ["x"] * 1_000_000}),
    "many prompts": ("/v1/completions", {"model": "m", "prompt": ["x"] * 60_000 + [""] + [1]}),
    "very many lists": ("/v1/completions", {"model": "m", "prompt": [[1]] * 130_000}),
    "tools within tools": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"enum": [[]] * 80_000}}}]),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_request_of_many_values(engine, client, shape):
    async def script(exchange):
        await exchange.send(ANSWER)

    engine.script = script
    route, body = SHAPES[shape]
    content = json.dumps(body).encode()

    async def ask():
        assert (await client.post(route, content=content)).status_code in (200, 400, 502)

    assert await least_hold(shape, ask) < MOST_MS
