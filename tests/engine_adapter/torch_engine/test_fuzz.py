"""Any input gets an answer in OpenAI's shape, and the engine goes on."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/kv/flush",
    "/kv/pin",
    "/kv/unpin",
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KNOWN = [
    "messages",
    "prompt",
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "n",
    "best_of",
    "logit_bias",
    "response_format",
    "cache_salt",
    "priority",
    "keep_priority",
    "keep_s",
    "keep_for",
    "return_token_ids",
    "stream_token_ids",
    "answer_token_ids",
    "add_special_tokens",
    "prompt_table",
    "extra_ids",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "echo",
    "suffix",
    "tokens",
    "token_ids",
    "ttl_s",
    "pin_id",
    "max_blocks",
]
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-3, 30) | st.floats()
fields = st.dictionaries(st.sampled_from(KNOWN), json_values | NUMBERS, max_size=6)
GOOD = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "tokens": [5],
    "token_ids": [5],
    "ttl_s": 1,
}


@pytest.fixture(scope="module")
def client(served_engine):
    with httpx.Client(base_url=served_engine.url, timeout=60, trust_env=False) as client:
        yield client


def check(client: httpx.Client, path: str, content: bytes) -> None:
    response = client.post(path, content=content)
    assert response.status_code in (200, 400, 404, 413), (response.status_code, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
    assert client.get("/health").status_code == 200


FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@FUZZ
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=200))
def test_any_bytes(client, path, content):
    check(client, path, content)


@FUZZ
@given(path=st.sampled_from(PATHS), content=json_values)
def test_any_json(client, path, content):
    check(client, path, json.dumps(content).encode())


@settings(FUZZ, max_examples=250)
@given(path=st.sampled_from(PATHS), changes=fields)
def test_known_fields_with_any_values(client, path, changes):
    check(client, path, json.dumps({"max_tokens": 2} | GOOD | changes).encode())


@settings(FUZZ, max_examples=80)
@given(path=st.sampled_from(PATHS), content=json_values)
def test_any_messages(client, path, content):
    body = {"messages": [{"role": "user", "content": content}, content], "max_tokens": 2}
    check(client, "/v1/chat/completions", json.dumps(body).encode())


@settings(FUZZ, max_examples=40)
@given(cut=st.integers(0, 200))
def test_cut_bodies(client, cut):
    check(client, "/v1/chat/completions", json.dumps(GOOD | {"max_tokens": 1}).encode()[:cut])


def test_the_engine_still_answers_as_before(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    answers = [client.post("/v1/chat/completions", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
