"""What the embedded adapter sends and what it reads of streams. The rest: tests/contract."""

from __future__ import annotations

import json

import pytest

from engine_adapter import EngineSpec, EngineUnavailable, JsonBody, KvTarget
from engine_adapter.torch_engine.adapter import EmbeddedAdapter, ToldTokens
from engine_adapter.types import Retention
from tests.holding import read_by

CHAT = "/v1/chat/completions"


@pytest.fixture
async def adapter():
    adapter = EmbeddedAdapter(EngineSpec(kind="embedded", url="http://h:1", id="e"))
    yield adapter
    await adapter.aclose()


@pytest.mark.parametrize(
    ("asked", "retention", "sent"),
    [
        ({}, None, {}),
        ({}, Retention(owner="acme"), {}),
        ({}, Retention(1, 60.0), {"keep_priority": 1, "keep_s": 60.0}),
        (
            {"keep_priority": "high"},
            Retention(1, 60.0, "acme"),
            {"keep_priority": 1, "keep_s": 60.0, "keep_for": "acme"},
        ),
        ({"keep_s": 5, "keep_for": "other"}, Retention(owner="acme"), {"keep_s": 5, "keep_for": "acme"}),
        ({"keep_for": "other"}, None, {}),
        ({"tools": []}, Retention(owner="acme"), {"tools": [], "keep_for": "acme"}),
    ],
)
async def test_the_engine_is_told_what_to_keep_and_for_whom(adapter, asked, retention, sent):
    body = JsonBody(json.dumps({"messages": [], **asked}).encode())
    prompt = KvTarget(retention=retention) if retention is not None else None
    async with adapter.hold(CHAT, body, prompt) as hold:
        assert json.loads(hold.body.raw) == {"messages": [], **sent}
        assert sent or asked or hold.body is body


async def test_a_stream_tells_its_tokens_and_can_be_resumed(adapter):
    body = JsonBody(b'{"messages":[],"stream":true,"answer_token_ids":[4]}')
    async with adapter.hold(CHAT, body, None) as hold:
        assert hold.body.get("stream_token_ids") is True
        assert hold.answer.feed(b": 5\ndata: {}\n\n") == b"data: {}\n\n"
        assert hold.resume().fields == {"answer_token_ids": [4, 5]}


@pytest.mark.parametrize(
    ("fields", "cached"),
    [({"echo": True, "logprobs": 0}, 0), ({"echo": True}, None), ({"logprobs": 1}, None)],
)
async def test_logprobs_of_a_prompt_reuse_nothing_and_an_echo_is_not_resumed(adapter, fields, cached):
    body = JsonBody(json.dumps({"prompt": "x", "stream": True, **fields}).encode())
    async with adapter.hold("/v1/completions", body, None) as hold:
        assert hold.cached_tokens == cached
        is_resumed = "echo" not in fields
        assert (hold.resume is not None, "stream_token_ids" in hold.body) == (is_resumed, is_resumed)


async def test_what_has_no_prompt_goes_on_as_it_is(adapter):
    body = JsonBody(b'{"keep_priority": 1}')
    async with adapter.hold("/v1/embeddings", body, None) as hold:
        assert hold.body is body


EVENTS = b'data: {"role": 1}\n\n: 5 16\ndata: {"text": ": 4\\n"}\n\n: 7\ndata: {}\n\ndata: [DONE]\n\n'
CLEAN = b'data: {"role": 1}\n\ndata: {"text": ": 4\\n"}\n\ndata: {}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_told_tokens_are_read_and_removed(size):
    told = ToldTokens()
    assert read_by(told, [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]) == CLEAN
    assert told.resume().token_ids.tolist() == [5, 16, 7]
    assert told.resume().fields == {"answer_token_ids": [5, 16, 7]}
    assert told.cached_tokens() is told.prompt_tokens() is None


def test_tokens_of_half_an_event_do_not_count():
    told = ToldTokens([3])
    end = EVENTS.index(b": 7") + 6
    got = read_by(told, [EVENTS[:end]])
    assert got == b'data: {"role": 1}\n\ndata: {"text": ": 4\\n"}\n\n: 7\nda'
    assert told.resume().token_ids.tolist() == [3, 5, 16]


def test_an_engine_that_ends_says_so():
    told = ToldTokens()
    told.feed(EVENTS)
    tool = b'data: {"choices":[{"delta":{"tool_calls":[{"name":"engine_unavailable"}]}}]}\n\n'
    assert told.feed(tool) == tool
    with pytest.raises(EngineUnavailable, match="ended in mid-answer"):
        told.feed(b'data: {"error":{"message":"bye","code":"engine_unavailable"}}\n\n')
    assert len(told.resume().token_ids) == 3


@pytest.mark.parametrize("odd", [b": 5 \xb816\ndata: {}\n\n", b": 5\ndata: {}\n\n: x\ndata: {}\n\n"])
def test_what_are_no_ids_ends_the_stream_before_its_text_is_passed_on(odd):
    """Going on without them would leave tokens out."""
    told = ToldTokens()
    told.feed(EVENTS)
    with pytest.raises(EngineUnavailable, match="no ids"):
        told.feed(odd)
    assert told.resume().token_ids.tolist() == [5, 16, 7]
