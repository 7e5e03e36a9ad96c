"""A wrong field is a 400 that names it."""

from __future__ import annotations

import msgspec
import pytest

from engine_adapter.torch_engine.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SliceRequest,
    choices_of,
    embeds_of,
    parse,
    parse_tokenize,
    prompt_of,
    retention_of,
    sampling_of,
    target_of,
)
from engine_adapter.torch_engine.requests import SamplingParams
from engine_adapter.types import Retention, extra_array, token_array


def chat(**fields):
    return parse(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}]} | fields), ChatRequest)


def completion(**fields):
    return parse(msgspec.json.encode({"prompt": "x"} | fields), CompletionRequest)


def sampling(request):
    return sampling_of(request, default_max_tokens=None)


def sampled(**fields):
    return sampling(chat(**fields))


def completed(**fields):
    return sampling(completion(**fields))


def chosen(**fields):
    return choices_of(chat(**fields))


def embedded(**fields):
    return embeds_of(completion(**{"prompt": None, "prompt_embeds": "x", **fields}))


def target(**fields):
    return target_of(parse(msgspec.json.encode(fields), SliceRequest))


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (sampled, {"max_tokens": -1}, "max_tokens"),
        (sampled, {"temperature": 2.1}, "temperature"),
        (sampled, {"top_p": 0}, "top_p"),
        (sampled, {"top_k": 2**63}, "top_k"),
        (sampled, {"seed": 2**63}, "seed"),
        (sampled, {"frequency_penalty": -2.5}, "frequency_penalty"),
        (sampled, {"repetition_penalty": 0}, "repetition_penalty"),
        (sampled, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (sampled, {"stop": ["a", ""]}, "stop[1]"),
        (sampled, {"stop": ["a"] * 5}, "stop"),
        (sampled, {"stop": "a" * 1001}, "stop"),
        (sampled, {"stop": ["a", 5]}, "stop[1]"),
        (sampled, {"logit_bias": {"x": 1}}, "logit_bias"),
        (sampled, {"logit_bias": {"5": "much"}}, "logit_bias"),
        (sampled, {"logit_bias": {"5": 101}}, "logit_bias"),
        (sampled, {"stream": "yes"}, "stream"),
        (sampled, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (sampled, {"keep_priority": 1001}, "keep_priority"),
        (sampled, {"keep_s": 0}, "keep_s"),
        (sampled, {"top_logprobs": 3}, "top_logprobs"),
        (sampled, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (sampled, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (sampled, {"prompt_table": "t"}, "prompt_table"),
        (completed, {"max_tokens": 0}, "max_tokens"),
        (completed, {"logprobs": 21}, "logprobs"),
        (completed, {"suffix": "x"}, "suffix"),
        (chosen, {"n": 0}, "n"),
        (chosen, {"n": 129}, "n"),
        (chosen, {"n": 2, "best_of": 3}, "best_of"),
        (chosen, {"n": 2, "answer_token_ids": [5]}, "answer_token_ids"),
        (chosen, {"n": 2, "stream_token_ids": True}, "stream_token_ids"),
        (embedded, {"prompt_embeds": ["x", "y"]}, "prompt_embeds"),
        (embedded, {"prompt": "x"}, "prompt"),
        (embedded, {"prompt_table": "t"}, "prompt_table"),
        (embedded, {"extra_ids": [0]}, "extra_ids"),
        (target, {"cache_salt": ""}, "cache_salt"),
        (target, {"token_ids": [1, 2], "extra_ids": [1]}, "extra_ids"),
        (target, {"token_ids": [1], "extra_ids": [-1]}, "extra_ids[0]"),
        (target, {"extra_ids": [1]}, "extra_ids"),
        (target, {"token_ids": [2**40]}, "token_ids[0]"),
        (target, {"max_blocks": 0}, "max_blocks"),
        (prompt_of, {"prompt": None}, "prompt"),
        (prompt_of, {"prompt": [[]]}, "prompt"),
        (prompt_of, {"prompt": ["a", "b"]}, "prompt"),
        (prompt_of, {"prompt": [[1], [2]]}, "prompt"),
        (prompt_of, {"prompt": [1, True]}, "prompt[1]"),
        (prompt_of, {"prompt": [0, 1, 2**31]}, "prompt[2]"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(read, fields, param):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.partition("[")[0].rpartition(".")[2] in str(caught.value)


def test_an_echo_may_be_all_that_is_wanted():
    asked = sampling(completion(echo=True, max_tokens=0, logprobs=2))
    assert (asked.max_tokens, asked.prompt_logprobs) == (0, 2)
    assert sampling(completion(logprobs=2)).prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "warm"}, "temperature: must be a number"),
        ({"logit_bias": {"5": "much"}}, "logit_bias: each value must be a number"),
        ({"temperature": 3}, "temperature: must be a number from 0 to 2"),
        ({"presence_penalty": -3}, "presence_penalty: must be a number from -2 to 2"),
        ({"top_p": 2}, "top_p: must be a number of at most 1"),
        ({"n": 0}, "n: must be a whole number of at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"logit_bias": {"5": 101}}, "logit_bias must be from -100 to 100"),
    ],
)
def test_a_wrong_type_and_a_number_out_of_its_range_are_told_in_plain_words(fields, said):
    with pytest.raises(ApiError) as caught:
        sampling(chat(**fields))
    assert str(caught.value) == said


@pytest.mark.parametrize(("kind", "name"), [(ChatRequest, "messages"), (EmbeddingRequest, "input")])
def test_a_missing_field_is_named(kind, name):
    with pytest.raises(ApiError) as caught:
        parse(b"{}", kind)
    assert caught.value.param == name
    assert str(caught.value) == f"{name} is missing"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "\xff"}', b'{"prompt":' + b"[" * 100_000, b'{"prompt": "\\ud800"}', b"[]", b"5"],
)
def test_bytes_that_are_no_json_object(body):
    for read in (lambda: parse(body, CompletionRequest), lambda: parse_tokenize(body)):
        with pytest.raises(ApiError) as caught:
            read()
        assert caught.value.status == 400


def test_defaults():
    assert sampling(chat()) == SamplingParams()
    assert sampling_of(chat(), default_max_tokens=7).max_tokens == 7
    assert sampling(completion()).max_tokens == 16
    assert sampling(chat(max_tokens=None, stop=None, temperature=None, n=1)) == SamplingParams()
    assert sampling(chat(response_format={"type": "text"}, logit_bias={})) == SamplingParams()


def test_all_fields_reach_the_engine():
    request = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-5, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, max_tokens=3, max_completion_tokens=9, min_tokens=2, ignore_eos=True,
        stop_token_ids=[4, 5], logprobs=True, top_logprobs=2, stop=["a", "b"],
    )  # fmt: skip
    assert sampling(request) == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-5, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, max_tokens=9, min_tokens=2, ignore_eos=True,
        stop_token_ids=(4, 5), logprobs=2,
    )  # fmt: skip
    assert request.stops == ("a", "b")
    assert sampling(chat(top_k=-1)).top_k == 0
    assert sampling(chat(logprobs=True)).logprobs == 0
    assert sampling(chat(logprobs=False)).logprobs is None
    assert completion(stop="a").stops == ("a",)


@pytest.mark.parametrize("beside", [{"prompt": None}, {"prompt": ""}, {"prompt": []}])
def test_embeddings_are_the_whole_prompt(beside):
    for given in ("x", ["x"], 5):
        assert embeds_of(completion(prompt_embeds=given, **beside)) == (5 if given == 5 else "x")
    for none in (None, []):
        assert embeds_of(completion(prompt_embeds=none)) is None


def test_targets():
    assert target().token_ids is None
    assert target(cache_salt="s").cache_salt == "s"
    full = target(token_ids=[1, 900], extra_ids=[0, 2**64 - 1])
    assert (full.token_ids, full.extra_ids) == (token_array([1, 900]), extra_array([0, 2**64 - 1]))
    assert target(token_ids=[1, 2], extra_ids=[0, 0]).extra_ids is None


@pytest.mark.parametrize(
    ("fields", "retention"),
    [
        ({}, Retention()),
        ({"keep_priority": 3}, Retention(3)),
        ({"keep_s": 60}, Retention(1, 60.0)),
        ({"keep_priority": 2, "keep_s": 0.5, "keep_for": "acme"}, Retention(2, 0.5, "acme")),
    ],
)
def test_what_is_to_be_kept(fields, retention):
    assert retention_of(chat(**fields)) == retention
