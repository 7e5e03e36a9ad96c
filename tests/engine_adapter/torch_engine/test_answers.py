"""OpenAI's shapes, checked with the openai package's own models."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine_adapter.torch_engine.answers import (
    AnswerWriter,
    CompletionWriter,
    Piece,
    TokenBytes,
    usage_of,
)
from engine_adapter.torch_engine.requests import Token
from engine_adapter.torch_engine.tool_calls import CallPart

USAGE = usage_of(prompt=10, cached=4, completion=2)
TOKENS = [
    Token(70, -0.5, ((70, -0.5), (71, float("-inf")))),
    Token(71, float("-inf"), ((70, -0.5), (72, -2.0))),
]


@pytest.fixture(scope="module")
def token_bytes(tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def writer(token_bytes, *, kind=AnswerWriter, logprobs=False, usage=False) -> AnswerWriter:
    return kind(token_bytes=token_bytes, model="m", with_logprobs=logprobs, include_usage=usage)


def events(data: bytes) -> list[object]:
    assert data.endswith(b"\n\n")
    lines = data.decode().strip().split("\n\n")
    return [
        line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines if line
    ]


def test_a_whole_chat(token_bytes):
    data = json.loads(writer(token_bytes).whole([Piece("hi", TOKENS, finish_reason="stop")], USAGE))
    answer = ChatCompletion.model_validate(data, strict=True)
    assert answer.choices[0].message.content == "hi"
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        10,
        2,
        12,
    )
    assert "token_ids" not in data["choices"][0]


def test_chat_logprobs(tokenizer, token_bytes):
    data = writer(token_bytes, logprobs=True).whole([Piece("hi", TOKENS, finish_reason="stop")], USAGE)
    content = ChatCompletion.model_validate_json(data).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-0.5, -9999.0]
    assert content[0].token == tokenizer.decode([70])
    assert bytes(content[0].bytes).decode() == content[0].token
    assert [best.logprob for best in content[0].top_logprobs] == [-0.5, -9999.0]


def test_each_part_of_a_character_has_its_bytes(tokenizer, token_bytes):
    parts = tokenizer.encode("a\U0001f9ff", add_special_tokens=False)
    entries = writer(token_bytes).logprobs(0, [Token(part, -1.0, ()) for part in parts])["content"]
    assert len(entries) > 2
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "a\U0001f9ff".encode()
    assert entries[1]["token"].startswith("\\xf0")


def test_completion_logprobs_and_their_offsets(tokenizer, token_bytes):
    out = writer(token_bytes, kind=CompletionWriter)
    first, second = out.logprobs(0, TOKENS[:1]), out.logprobs(0, TOKENS[1:])
    assert first["text_offset"] == [0]
    assert second["text_offset"] == [len(tokenizer.decode([70]))]
    assert second["token_logprobs"] == [-9999.0]
    texts = [tokenizer.decode([token]) for token in (70, 72, 71)]
    assert second["top_logprobs"] == [dict(zip(texts, [-0.5, -2.0, -9999.0], strict=True))]


def test_offsets_count_characters_not_tokens(tokenizer, token_bytes):
    tokens = [Token(i, -1.0, ()) for i in tokenizer.encode("\U0001f9ff!", add_special_tokens=False)]
    offsets = writer(token_bytes, kind=CompletionWriter).logprobs(0, tokens)["text_offset"]
    assert offsets == [0] * (len(tokens) - 1) + [1]


CALLS = [
    CallPart(0, '{"a"', "call_1", "f"),
    CallPart(0, ":1}"),
    CallPart(1, "{}", "call_2", "g"),
]


def test_tool_calls_whole_and_streamed(token_bytes):
    out = writer(token_bytes)
    data = out.whole([Piece("", TOKENS, CALLS, finish_reason="tool_calls")], USAGE)
    message = ChatCompletion.model_validate_json(data, strict=True).choices[0].message
    assert message.content is None
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call_1", "f", '{"a":1}'),
        ("call_2", "g", "{}"),
    ]
    (part,) = events(out.piece(0, Piece("", TOKENS, CALLS)))
    ChatCompletionChunk.model_validate(part, strict=True)
    first, second, _ = part["choices"][0]["delta"]["tool_calls"]
    assert first == {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a"'},
    }
    assert second == {"index": 0, "function": {"arguments": ":1}"}}


def test_a_chat_stream(token_bytes):
    out = writer(token_bytes, usage=True)
    (role,) = events(out.opening())
    (part,) = events(out.piece(0, Piece('ge"sagt\u2028', TOKENS)))
    last, usage, done = events(out.piece(0, Piece("", finish_reason="stop")) + out.end(USAGE))
    for chunk in (role, part, last, usage):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["id"] == role["id"]
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert part["choices"][0]["delta"] == {"content": 'ge"sagt\u2028'}
    assert part["usage"] is None
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert done == "data: [DONE]"


def test_a_piece_that_shows_nothing_is_no_chunk(token_bytes):
    assert writer(token_bytes).piece(0, Piece("", TOKENS)) == b""
    assert writer(token_bytes, logprobs=True).piece(0, Piece()) == b""
