"""`cache_write_tokens` in the usage of chats."""

import json

import pytest

from engine_adapter import JsonBody
from proxy.request.diagnostics import names_the_cache, writes_counted
from tests.proxy.request.test_diagnostics import Client

HEAD = 200, [(b"content-type", b"application/json"), (b"content-length", b"9")]


def whole(answer, status=200):
    client = Client()
    counted = writes_counted(client, lambda: 16)
    counted.start(status, HEAD[1])
    counted.finish(answer)
    assert (b"content-length", b"9") not in client.head[1]
    return client.body


def streamed(*chunks):
    client = Client()
    counted = writes_counted(client, lambda: 16)
    counted.start(*HEAD)
    for chunk in chunks[:-1]:
        counted.write(chunk)
    counted.finish(chunks[-1])
    return client.body


@pytest.mark.parametrize(
    ("details", "written"),
    [
        ({"cached_tokens": 16}, {"cached_tokens": 16, "cache_write_tokens": 32}),
        ({"created_cache_tokens": 3}, {"created_cache_tokens": 3, "cache_write_tokens": 3}),
        ({"cache_write_tokens": 0}, {"cache_write_tokens": 0}),
        (None, {"cache_write_tokens": 48}),
    ],
)
def test_a_whole_answer(details, written):
    usage = {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": details}
    answer = json.loads(whole(json.dumps({"id": "c", "x": 1.5, "usage": usage}).encode()))
    assert answer == {"id": "c", "x": 1.5, "usage": {**usage, "prompt_tokens_details": written}}


@pytest.mark.parametrize("answer", [b'{"id":  "c"}', b"no json", b'{"usage": 1}', b'{"usage": null}'])
def test_an_answer_without_usage_keeps_its_bytes(answer):
    assert whole(answer) == answer


def test_an_error_keeps_its_bytes():
    assert whole(b'{"usage": {"prompt_tokens": 50}}', 400) == b'{"usage": {"prompt_tokens": 50}}'


def test_the_event_of_a_stream_that_has_the_usage():
    first, usage, end = (
        b'data: {"id":  "c", "usage": null}\n\n',
        b'data: {"usage":{"prompt_tokens":50}}\n\n',
        b"data: [DONE]\n\n",
    )
    got = streamed(first, usage[:20], usage[20:] + end, b"")
    assert got.startswith(first)
    assert got.endswith(b'"prompt_tokens_details":{"cache_write_tokens":48}}}\n\n' + end)
    assert streamed(first, end[:5]) == first + end[:5]


@pytest.mark.parametrize(
    ("body", "names"),
    [(b'{"prompt_cache_key": "k"}', True), (b'{"messages": []}', False)],
)
def test_who_is_told(body, names):
    assert names_the_cache(JsonBody(body)) == names
