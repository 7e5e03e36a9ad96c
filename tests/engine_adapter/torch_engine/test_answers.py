"""OpenAI's shapes, checked with the openai package's own models."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.answers import (
    AnswerWriter,
    ChatShape,
    CompletionShape,
    Piece,
    Usage,
    error_event,
)
from engine_adapter.torch_engine.requests import Token

USAGE = Usage(prompt=10, cached=4, completion=2)
TOKENS = [
    Token("r", 70, -0.5, ((70, -0.5), (71, float("-inf")))),
    Token("r", 71, float("-inf"), ((70, -0.5), (72, -2.0))),
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir) -> ChatTokenizer:
    return ChatTokenizer.load(str(tokenizer_dir))


def writer(shape, *, logprobs=False, prompt_token_ids=None, usage=False) -> AnswerWriter:
    return AnswerWriter(
        shape, model="m", with_logprobs=logprobs, prompt_token_ids=prompt_token_ids, include_usage=usage
    )


def events(data: bytes) -> list[object]:
    assert data.endswith(b"\n\n")
    lines = data.decode().strip().split("\n\n")
    return [
        line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines if line
    ]


def test_a_whole_chat(tokenizer):
    data = json.loads(writer(ChatShape(tokenizer)).whole(Piece("hi", TOKENS), "stop", USAGE))
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


def test_a_whole_completion(tokenizer):
    data = json.loads(writer(CompletionShape(tokenizer)).whole(Piece("hi", TOKENS), "length", USAGE))
    answer = Completion.model_validate(data, strict=True)
    assert answer.choices[0].text == "hi"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_token_ids_are_given_back_when_asked(tokenizer):
    data = json.loads(
        writer(ChatShape(tokenizer), prompt_token_ids=[1, 2]).whole(Piece("hi", TOKENS), "stop", USAGE)
    )
    assert data["prompt_token_ids"] == [1, 2]
    assert data["choices"][0]["token_ids"] == [70, 71]


def test_chat_logprobs(tokenizer):
    data = writer(ChatShape(tokenizer), logprobs=True).whole(Piece("hi", TOKENS), "stop", USAGE)
    content = ChatCompletion.model_validate_json(data).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-0.5, -9999.0]
    assert content[0].token == tokenizer.decode([70])
    assert bytes(content[0].bytes).decode() == content[0].token
    assert [best.logprob for best in content[0].top_logprobs] == [-0.5, -9999.0]


def test_a_part_of_a_character_has_no_bytes(tokenizer):
    part = tokenizer.encode("\U0001f9ff", add_special_tokens=False)[0]
    logprobs = ChatShape(tokenizer).logprobs([Token("r", part, -1.0, ())])
    assert logprobs["content"][0]["bytes"] is None


def test_completion_logprobs_and_their_offsets(tokenizer):
    shape = CompletionShape(tokenizer)
    first, second = shape.logprobs(TOKENS[:1]), shape.logprobs(TOKENS[1:])
    assert first["text_offset"] == [0]
    assert second["text_offset"] == [len(tokenizer.decode([70]))]
    assert second["token_logprobs"] == [-9999.0]
    assert second["top_logprobs"] == [{tokenizer.decode([70]): -0.5, tokenizer.decode([72]): -2.0}]


def test_a_chat_stream(tokenizer):
    out = writer(ChatShape(tokenizer), usage=True)
    (role,) = events(out.opening())
    (part,) = events(out.piece(Piece('ge"sagt\u2028', TOKENS)))
    last, usage, done = events(out.last(Piece("", []), "stop", USAGE))
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


def test_a_completion_stream(tokenizer):
    out = writer(CompletionShape(tokenizer))
    assert out.opening() == b""
    (part,) = events(out.piece(Piece("a", TOKENS)))
    last, done = events(out.last(Piece("b", []), "length", USAGE))
    Completion.model_validate(last, strict=True)
    assert "usage" not in part
    assert part["choices"][0] == {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    assert last["choices"][0]["text"] == "b"
    assert done == "data: [DONE]"


def test_each_plain_chunk_is_written_the_same_way(tokenizer):
    out = writer(ChatShape(tokenizer))
    first, second = out.piece(Piece("x", [])), out.piece(Piece("y", []))
    assert first.replace(b'"x"', b'"y"') == second


def test_a_piece_that_shows_nothing_is_no_chunk(tokenizer):
    assert writer(ChatShape(tokenizer)).piece(Piece("", TOKENS)) == b""
    assert writer(ChatShape(tokenizer), logprobs=True).piece(Piece()) == b""


@pytest.mark.parametrize("make", [ChatShape, CompletionShape])
def test_token_ids_in_a_stream(tokenizer, make):
    out = writer(make(tokenizer), prompt_token_ids=[1, 2])
    (opening,) = events(out.opening())
    assert opening["prompt_token_ids"] == [1, 2]
    (held_back,) = events(out.piece(Piece("", TOKENS)))
    assert held_back["choices"][0]["token_ids"] == [70, 71]
    assert "prompt_token_ids" not in held_back


def test_logprobs_in_a_stream(tokenizer):
    (part,) = events(writer(ChatShape(tokenizer), logprobs=True).piece(Piece("a", TOKENS[:1])))
    assert part["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5


def test_an_error_in_mid_stream():
    assert events(error_event({"error": {"message": "x"}})) == [{"error": {"message": "x"}}]
