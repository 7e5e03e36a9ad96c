"""Any input gets an answer in OpenAI's shape, and the engine goes on."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.torch_engine.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    SliceRequest,
    UnpinRequest,
)

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
KINDS = (ChatRequest, CompletionRequest, DetokenizeRequest, PinRequest, SliceRequest, UnpinRequest)
KNOWN = sorted({name for kind in KINDS for name in kind.__struct_encode_fields__})
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


fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(fuzzed, max_examples=200)
@given(path=st.sampled_from(PATHS), changes=fields)
def test_known_fields_with_any_values(client, path, changes):
    check(client, path, json.dumps({"max_tokens": 2} | GOOD | changes).encode())


@settings(fuzzed, max_examples=80)
@given(content=json_values)
def test_any_messages(client, content):
    body = {"messages": [{"role": "user", "content": content}, content], "max_tokens": 2}
    check(client, "/v1/chat/completions", json.dumps(body).encode())
