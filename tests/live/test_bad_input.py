"""Whatever a client sends is answered in OpenAI's shape, quickly, and harms nobody else."""

from __future__ import annotations

import base64
import json
import os
import socket
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.live.conftest import Kvpin

pytestmark = pytest.mark.live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VERBS = ("flush", "offload", "restore", "pin", "unpin", "warm", "route")
GOOD = {"model": "kvpin-tiny", "max_tokens": 2, "temperature": 0}
GOOD_CHAT = {**GOOD, "messages": [{"role": "user", "content": "Is anybody there?"}]}
GOOD_COMPLETION = {**GOOD, "prompt": [300, 301, 302]}

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12)
odd_text = st.sampled_from(["", "\ud800", "a\udfffb", "\0", "\x7f", "🙂", "x" * 5000])
values = st.recursive(
    scalars | odd_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
numbers = st.integers(-3, 30) | st.sampled_from([-1, 2**31, 2**31 - 1, 2**63, 2**64, 10**40, 1e308, 0.5])
tokens = st.lists(st.integers(-2, 4200) | numbers | values, max_size=20)
FIELDS = {
    "model": values,
    "messages": values,
    "prompt": tokens | st.lists(tokens, max_size=3) | st.lists(st.text(max_size=5), max_size=3) | values,
    "stop": st.lists(st.text(max_size=3) | values, max_size=6) | values,
    "stop_token_ids": tokens | values,
    "max_tokens": numbers | values,
    "max_completion_tokens": numbers | values,
    "min_tokens": numbers | values,
    "temperature": numbers | values,
    "top_p": numbers | values,
    "top_k": numbers | values,
    "min_p": numbers | values,
    "seed": numbers | values,
    "presence_penalty": numbers | values,
    "repetition_penalty": numbers | values,
    "n": numbers | values,
    "logprobs": numbers | values,
    "top_logprobs": numbers | values,
    "logit_bias": values,
    "stream": values,
    "stream_options": values,
    "tools": values,
    "tool_choice": values,
    "response_format": values,
    "cache_salt": values,
    "priority": numbers | values,
    "keep_priority": numbers | values,
    "prompt_table": values,
    "extra_ids": tokens | values,
    "prompt_cache_key": values,
    "chat_template_kwargs": values,
    "add_generation_prompt": values,
    "continue_final_message": values,
    "add_special_tokens": values,
    "user": values,
}
changes = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: FIELDS[name].map(lambda value: {name: value}))
messages = st.lists(
    values
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | values},
        optional={
            "content": values
            | st.lists(
                st.fixed_dictionaries(
                    {"type": st.sampled_from(["text", "image_url", "prompt_embeds", "refusal"]) | values},
                    optional={"text": values, "data": values, "image_url": values},
                ),
                max_size=3,
            ),
            "name": values,
            "tool_calls": values,
            "tool_call_id": values,
        },
    ),
    max_size=4,
)
targets = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages | values,
        "prompt": values,
        "token_ids": tokens | values,
        "extra_ids": tokens | values,
        "prompt_table": values,
        "prompt_cache_key": values,
        "engine": st.just("embedded-0") | values,
        "tenant": values,
        "all": values,
        "cache_salt": values,
        "model": st.just("kvpin-tiny") | values,
        "ttl_s": st.floats(max_value=1) | values,
        "wait_s": values,
        "pin_id": values,
        "fallback": values,
        "engines": values,
    },
)
FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=200)


@pytest.fixture(scope="module")
def client(kvpin):
    """A client; when the module is done, the engines are the processes they were, and answer as ever."""
    before = instances(kvpin)
    with httpx.Client(base_url=kvpin.url, timeout=30, trust_env=False) as client:
        yield client
        for path, body in ((CHAT, GOOD_CHAT), (COMPLETIONS, GOOD_COMPLETION)):
            assert client.post(path, json=body).status_code == 200
    stats = kvpin.engines()
    assert instances(kvpin) == before
    assert {engine["state"] for engine in stats.values()} == {"ready"}
    assert {engine["kv"]["gpu"]["active"] for engine in stats.values()} == {0}


def instances(kvpin: Kvpin) -> dict[str, int]:
    """Engine id → which process it is."""
    return {name: engine["process"]["pid"] for name, engine in kvpin.engines().items()}


def post(client: httpx.Client, path: str, body: object) -> httpx.Response:
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


# Of errors about the whole body, or about the page that asks.
CODES = ("invalid_json", "model_not_found", "encoded_body", "body_too_complex", "forbidden")


def check(response: httpx.Response, *statuses: int) -> None:
    """The answer is a good one, or an error of the client's making that says what is wrong."""
    if response.status_code < 300:
        return
    assert response.status_code in (400, 404, 409, 413, *statuses), (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, response.text
    assert error["type"] in ("invalid_request_error", "permission_error"), response.text
    assert error["message"], response.text
    assert error["param"] or error["code"] in CODES, response.text


@FUZZ
@given(st.sampled_from([CHAT, COMPLETIONS]), changes, changes | st.just({}))
def test_known_fields_with_any_values(client, path, one, two):
    good = GOOD_CHAT if path == CHAT else GOOD_COMPLETION
    check(post(client, path, good | one | two))


@settings(FUZZ, max_examples=150)
@given(messages | values)
def test_any_messages(client, content):
    check(post(client, CHAT, GOOD_CHAT | {"messages": content}))


@settings(FUZZ, max_examples=150)
@given(tokens, tokens | st.none(), values | st.none())
def test_any_tokens_and_extra_ids(client, prompt, extra_ids, table):
    body = GOOD_COMPLETION | {"prompt": prompt, "extra_ids": extra_ids, "prompt_table": table}
    check(post(client, COMPLETIONS, body))


@settings(FUZZ, max_examples=200)
@given(st.sampled_from(VERBS), targets)
def test_any_target_of_an_operation(client, verb, target):
    check(post(client, f"/admin/v1/{verb}", target))


@settings(FUZZ, max_examples=60)
@given(
    st.binary(max_size=100) | st.builds(lambda raw: base64.b64encode(raw).decode(), st.binary(max_size=60)),
    st.sampled_from(["", "a b", "é", "../x", "x" * 500]) | st.text(max_size=5),
    st.sampled_from(["0", "-1", str(2**64), "1e3", "NaN", "٣"]),
)
def test_any_prompt_table(client, data, name, extra_id):
    params = {"id": name.encode(errors="replace"), "extra_id": extra_id}
    raw = data if isinstance(data, bytes) else data.encode()
    headers = {"content-type": "application/octet-stream"}
    check(client.post("/admin/v1/prompt_tables", content=raw, params=params, headers=headers))
    body = {"data": raw.decode("latin-1"), "id": name, "extra_id": extra_id}
    check(post(client, "/admin/v1/prompt_tables", body))


@settings(FUZZ, max_examples=100)
@given(st.sampled_from([CHAT, COMPLETIONS, *(f"/admin/v1/{verb}" for verb in VERBS)]), st.binary(max_size=80))
def test_any_bytes(client, path, content):
    check(client.post(path, content=content, headers={"content-type": "application/json"}))


NASTY = [
    b'{"model": "kvpin-tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "kvpin-tiny", "prompt": "a", "temperature": Infinity}',
    b'{"model": "kvpin-tiny", "prompt": "a", "temperature": -1e999}',
    b'{"model": "kvpin-tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "kvpin-tiny", "prompt": [' + b"9" * 5000 + b"]}",
    b'{"model": "kvpin-tiny", "prompt": "\\ud800"}',
    b'{"model": "kvpin-tiny", "prompt": "a", "stop": "\\udfff"}',
    b'{"model": "kvpin-tiny", "prompt": "a", "cache_salt": "\\ud800"}',
    b'{"model": "kvpin-tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "kvpin-tiny", "messages": ' + b'[{"content":' * 50_000 + b"1" + b"}]" * 50_000 + b"}",
    b'{"model": "kvpin-tiny", "other": ' + b"[" * 100_000 + b"]" * 100_000 + b', "prompt": "a"}',
    b'{"model": "kvpin-tiny", "prompt": "a", "prompt": []}',
    b'{"model": "kvpin-tiny", "prompt": []}',
    b'{"model": "kvpin-tiny", "prompt": [[]]}',
    b'{"model": "kvpin-tiny", "prompt": [1, "a"]}',
    b'{"model": "kvpin-tiny", "prompt": [1, 1.5]}',
    b'{"model": "kvpin-tiny", "prompt": [1, true]}',
    b'{"model": "kvpin-tiny", "prompt": [-1]}',
    b'{"model": "kvpin-tiny", "prompt": [4096]}',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{}",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
]


@pytest.mark.parametrize("raw", NASTY, ids=range(len(NASTY)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/admin/v1/route", "/admin/v1/warm"])
def test_nasty_json(client, path, raw):
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    check(response)
    if path in (CHAT, COMPLETIONS):
        if path == COMPLETIONS and b"\\ud" in raw:  # half of a character is repaired
            assert response.status_code == 200, response.text
        else:
            assert response.status_code == 400 or (b'"other"' in raw and path == COMPLETIONS), response.text


@pytest.mark.parametrize("max_tokens", [10**6, 2**31, 2**63, 10**30])
def test_enormous_limits_end_where_the_context_does_or_are_refused(client, max_tokens):
    body = GOOD_CHAT | {"max_tokens": max_tokens, "stop": ["e", "a", "t", " "]}
    check(post(client, CHAT, body))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/admin/v1/flush", "/admin/v1/prompt_tables"])
@pytest.mark.parametrize("byte", [b"x", b"\0", b"[", b'{"a":'])
def test_ten_megabytes_of_garbage(client, path, byte):
    content = byte * (10_000_000 // len(byte))
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    check(response)
    assert response.status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/json", "content-encoding": "br"},
        {"x-request-id": "x" * 5000},
        {"x-request-id": "a\tb"},
        {"authorization": "Bearer"},
        {"authorization": "\x80"},
        {"accept": "image/png", "accept-encoding": "br, zstd;q=0, *;q=1"},
        {"connection": "upgrade", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"},
        {"expect": "100-continue"},
        {"range": "bytes=0-1", "if-none-match": "*"},
        {"te": "trailers", "trailer": "x"},
        {"host": "example.org"},
        {"x-kvpin-engine": "embedded-9", "x-kv-cached-tokens": "-5"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_odd_headers(client, headers):
    encoded = [(name, value.encode("latin-1")) for name, value in headers.items()]
    for path, body in ((CHAT, GOOD_CHAT), (COMPLETIONS, GOOD_COMPLETION)):
        response = client.post(path, content=json.dumps(body), headers=encoded)
        check(response, 403, 415)
        assert response.status_code in (200, 400, 415) or "host" in headers


def test_odd_methods_and_paths(client):
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
        for path in (CHAT, "/v1/", "/v1", "/v1/../health", "/v1/%2e%2e/kv/flush", "/v1/x%00y", "/v1//models"):
            response = client.request(method, path)
            assert response.status_code < 500, (method, path, response.text)
            if response.status_code >= 400 and method != "HEAD":
                assert response.json()["error"]["message"]


# --- clients that are slow ----------------------------------------------------------------------


def connect(kvpin: Kvpin) -> socket.socket:
    host, port = kvpin.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(body: bytes, length: int | None = None) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) if length is None else length}\r\n\r\n"
    ).encode()


def test_a_body_that_comes_slowly_holds_up_nobody(kvpin, client):
    body = json.dumps(GOOD_CHAT).encode()
    with connect(kvpin) as slow:
        slow.sendall(head(body))
        for at in range(0, len(body), 16):
            slow.sendall(body[at : at + 16])
            assert post(client, COMPLETIONS, GOOD_COMPLETION).status_code == 200
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")


def test_half_a_body_is_no_request(kvpin, client):
    served = sum(engine["served"] for engine in kvpin.engines().values())
    body = json.dumps(GOOD_CHAT).encode()
    with connect(kvpin) as half:
        half.sendall(head(body) + body[: len(body) // 2])
    with connect(kvpin) as short:
        short.sendall(head(body, len(body) + 100) + body)
        short.shutdown(socket.SHUT_WR)
        assert short.recv(4096)[:12] in (b"", b"HTTP/1.1 400")
    assert post(client, CHAT, GOOD_CHAT).status_code == 200
    assert sum(engine["served"] for engine in kvpin.engines().values()) == served + 1


def test_a_client_that_stops_reading_costs_no_memory_and_holds_up_nobody(kvpin, client):
    long = {**GOOD_CHAT, "max_tokens": 7000, "ignore_eos": True, "stream": True, "logprobs": True}
    body = json.dumps({**long, "top_logprobs": 20}).encode()
    before = memory(kvpin)
    stalled = [connect(kvpin) for _ in range(3)]
    try:
        for sleeper in stalled:
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.sendall(head(body) + body)
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            assert post(client, COMPLETIONS, GOOD_COMPLETION).status_code == 200
        assert memory(kvpin) - before < 30 << 20
    finally:
        for sleeper in stalled:
            sleeper.close()
    deadline = time.monotonic() + 30
    while any(engine["kv"]["gpu"]["active"] for engine in kvpin.engines().values()):
        assert time.monotonic() < deadline, kvpin.engines()
        time.sleep(0.1)


def memory(kvpin: Kvpin) -> int:
    """Resident bytes of the proxy."""
    with open(f"/proc/{kvpin.process.pid}/statm") as file:  # noqa: PTH123 - no file to hold on to
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
