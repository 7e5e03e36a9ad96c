"""Whatever a client sends is answered in OpenAI's shape, by an engine behind kvpin that reads every field."""

from __future__ import annotations

import base64
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.torch_engine.protocol import ChatRequest, CompletionRequest
from tests.fuzz import JSON, MESSAGE

pytestmark = pytest.mark.live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VERBS = ("flush", "offload", "restore", "pin", "unpin", "warm", "route")
_GOOD = {"model": "kvpin-tiny", "max_tokens": 2, "temperature": 0}
GOOD = {
    CHAT: {**_GOOD, "messages": [{"role": "user", "content": "Is anybody there?"}]},
    COMPLETIONS: {**_GOOD, "prompt": [300, 301, 302]},
}
KNOWN = sorted({*ChatRequest.__struct_encode_fields__, *CompletionRequest.__struct_encode_fields__})

LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of")
"""Large ones are good, and take long."""

numbers = st.integers(-3, 30) | st.sampled_from([2**31, 2**63, 2**64, 10**40, 1e308, 0.5])
tokens = st.lists(st.integers(-2, 4200) | numbers | JSON, max_size=20)
messages = st.lists(MESSAGE | JSON, max_size=4)


def is_short(changed: dict[str, object]) -> bool:
    """False if the answer would be long."""
    asked = [changed.get(name) for name in LENGTHS]
    return all(not isinstance(value, int | float) or value <= 30 for value in asked)


changes = st.dictionaries(
    st.sampled_from(KNOWN), numbers | tokens | messages | JSON, min_size=1, max_size=2
).filter(is_short)
OTHERS = ("prompt", "prompt_table", "prompt_cache_key", "tenant", "all", "cache_salt", "wait_s", "pin_id")
OTHERS += ("fallback", "engines")
targets = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages,
        "token_ids": tokens,
        "extra_ids": tokens,
        "engine": st.just("embedded-0") | JSON,
        "model": st.just("kvpin-tiny") | JSON,
        "ttl_s": st.floats(max_value=1) | JSON,
        **dict.fromkeys(OTHERS, JSON),
    },
)
FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=200)


@pytest.fixture(scope="module")
def client(kvpin):
    """A client; when the module is done, the engines are the processes they were, and answer as ever."""

    def processes():
        return {name: engine["process"]["pid"] for name, engine in kvpin.engines().items()}

    before = processes()
    with httpx.Client(base_url=kvpin.url, timeout=30, trust_env=False) as client:
        yield client
        for path, body in GOOD.items():
            assert client.post(path, json=body).status_code == 200
    assert processes() == before
    assert {engine["state"] for engine in kvpin.engines().values()} == {"ready"}
    assert {engine["kv"]["gpu"]["active"] for engine in kvpin.engines().values()} == {0}


def check(client: httpx.Client, path: str, body: object) -> None:
    """The answer is a good one, or an error of the client's making that says what is wrong."""
    headers = {"content-type": "application/json"}
    response = client.post(path, content=json.dumps(body), headers=headers)
    if response.status_code < 300:
        return
    assert response.status_code in (400, 404, 409, 413), (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, response.text
    assert error["type"] == "invalid_request_error", response.text
    assert error["message"], response.text
    assert error["param"] or error["code"] in ("invalid_json", "model_not_found"), response.text


@FUZZ
@given(st.sampled_from(sorted(GOOD)), changes)
def test_known_fields_with_any_values(client, path, changed):
    check(client, path, GOOD[path] | changed)


@FUZZ
@given(st.sampled_from(VERBS), targets)
def test_any_target_of_an_operation(client, verb, target):
    check(client, f"/admin/v1/{verb}", target)


@settings(FUZZ, max_examples=60)
@given(st.binary(max_size=100), st.sampled_from(["", "a b", "é", "../x", "x" * 500]) | st.text(max_size=5))
def test_any_prompt_table(client, data, name):
    check(
        client,
        "/admin/v1/prompt_tables",
        {"data": base64.b64encode(data).decode(), "id": name, "extra_id": "1"},
    )
