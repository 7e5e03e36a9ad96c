"""Whatever a client sends is answered in OpenAI's shape, and the next request is served as ever."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter import Capability
from tests.fakes import (
    ANSWER,
    ASK,
    CHAT,
    INFO,
    STREAM,
    FakeAdapter,
    FakeEngine,
    client_of,
    prompts_of,
    proxy_over,
)

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
PARTS = st.lists(
    JSON
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "prompt_embeds"]), "text": JSON, "data": JSON}
    ),
    max_size=3,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]) | JSON},
    optional={"content": st.text(max_size=20) | PARTS | JSON, "tool_calls": JSON, "name": JSON},
)
TOKENS = st.lists(st.integers(-5, 700), max_size=40)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m") | JSON,
        "messages": st.lists(MESSAGE | JSON, max_size=4) | JSON,
        "prompt": st.text(max_size=30) | TOKENS | st.lists(TOKENS, max_size=2) | JSON,
        "stream": st.booleans() | JSON,
        "cache_salt": st.text(max_size=5) | JSON,
        "extra_ids": st.lists(st.integers(-1, 2**65), max_size=40) | JSON,
        "prompt_table": JSON,
        "prompt_cache_key": JSON,
        "tools": JSON,
        "chat_template_kwargs": st.dictionaries(st.text(max_size=8), JSON, max_size=2) | JSON,
        "add_generation_prompt": JSON,
        "add_special_tokens": JSON,
    },
)


@st.composite
def bodies(draw):
    """Bytes that are nearly, hardly or not at all what a client should send."""
    raw = json.dumps(draw(FIELDS)).encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


PATHS = st.sampled_from([CHAT, "/v1/completions", "/v1/embeddings", "/v1/anything"])


@pytest.fixture
def world(tokenizer_dir):
    """An engine, a proxy and a client in a loop of their own, shared by all examples."""
    with asyncio.Runner() as runner:
        engine = FakeEngine(script=lambda exchange: exchange.send(ANSWER))
        runner.run(engine.__aenter__())
        running = proxy_over(reuse=True)
        proxy = runner.run(running.__aenter__())
        info = replace(
            INFO,
            vocab_size=600,
            max_model_len=2000,
            tokenizer=str(tokenizer_dir),
            capabilities=frozenset({Capability.EXTRA_IDS}),
            renders_alike=True,
        )
        proxy.add(FakeAdapter("a", engine.url, info=info))
        proxy.fleet.pools["m"].prompts = prompts_of(info)
        client = client_of(proxy)
        yield runner, proxy, client
        runner.run(client.aclose())
        runner.run(proxy.settled())
        runner.run(running.__aexit__(None, None, None))
        runner.run(engine.stop())


def test_any_body_is_answered_and_harms_nobody(world):
    runner, proxy, client = world

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(PATHS, bodies() | st.binary(max_size=50))
    def check(path, body):
        runner.run(ask(path, body))

    async def ask(path, body):
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        if response.status_code >= 400:
            assert response.status_code in (400, 404), (response.status_code, response.text, body)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert isinstance(error["message"], str)
            assert error["type"] == "invalid_request_error"
        assert proxy.fleet.engines["a"].state == "ready"
        assert proxy.fleet.engines["a"].ledger.in_flight == 0

    check()
    for body in (ASK, STREAM):
        assert runner.run(client.post(CHAT, json=body)).status_code == 200
