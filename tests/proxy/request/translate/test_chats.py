import msgspec
import pytest

from proxy.errors import EngineFailed
from proxy.request.translate.chats import ChatUsage, Error, read_chat


def test_a_call_without_a_function_has_no_name_yet():
    (choice,) = read_chat(b'{"choices": [{"delta": {"tool_calls": [{"index": 1}]}}]}').choices
    (call,) = choice.delta.tool_calls
    assert (call.index, call.name, call.arguments) == (1, "", "")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_two_names(name):
    (choice,) = read_chat(b'{"choices": [{"message": {"%b": "hm"}}]}' % name.encode()).choices
    assert choice.message.thoughts == "hm"


@pytest.mark.parametrize(
    ("fields", "sequence"),
    [('"stop_reason": "END"', "END"), ('"matched_stop": "END"', "END"), ('"matched_stop": [7]', None)],
)
def test_the_stop_sequence_may_be_a_token(fields, sequence):
    (choice,) = read_chat(f'{{"choices": [{{{fields}}}]}}'.encode()).choices
    assert choice.stop_sequence == sequence


@pytest.mark.parametrize("choices", ['"choices": null,', ""])
def test_usage_may_come_without_choices(choices):
    chunk = read_chat(f'{{{choices} "usage": {{"prompt_tokens": 7}}}}'.encode())
    assert (chunk.choices, chunk.usage.prompt_tokens) == ([], 7)


def test_an_error_is_a_text_or_an_object():
    assert read_chat(b'{"error": "broken"}').error == "broken"
    assert read_chat(b'{"error": {"message": "m", "code": 500}}').error == Error("m", 500)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"choices": 1}', b"\xff", b"[" * 100_000])
def test_what_is_no_answer_of_a_chat(content):
    with pytest.raises(EngineFailed, match="not that of a chat"):
        read_chat(content)


def usage(details=None, **fields):
    return msgspec.convert({"prompt_tokens": 40, "prompt_tokens_details": details, **fields}, ChatUsage)


@pytest.mark.parametrize(
    ("details", "cached", "written"),
    [
        (None, 0, 32),
        ({"cached_tokens": None}, 0, 32),
        ({"cached_tokens": 16}, 16, 16),
        ({"cached_tokens": 39}, 39, 0),
        ({"cached_tokens": 16, "cache_write_tokens": 0}, 16, 0),
        ({"created_cache_tokens": 5}, 0, 5),
        ({"cache_write_tokens": 7, "created_cache_tokens": 5}, 0, 7),
    ],
)
def test_what_was_read_from_the_cache_and_written_to_it(details, cached, written):
    assert (usage(details).cached, usage(details).written(16)) == (cached, written)


def test_an_engine_that_tells_no_block_size_keeps_every_token():
    assert usage().written(None) == 40


def test_reasoning():
    assert usage().reasoning == 0
    assert usage(completion_tokens_details={"reasoning_tokens": None}).reasoning == 0
    assert usage(completion_tokens_details={"reasoning_tokens": 3}).reasoning == 3
