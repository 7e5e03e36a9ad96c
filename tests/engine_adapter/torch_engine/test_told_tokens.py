"""Token ids in the comments of a stream."""

import pytest

from engine_adapter import EngineUnavailable
from engine_adapter.torch_engine.told_tokens import ToldTokens

EVENTS = b'data: {"role": 1}\n\n: 5 16\ndata: {"text": ": 4\\n"}\n\n: 7\ndata: {}\n\ndata: [DONE]\n\n'
CLEAN = b'data: {"role": 1}\n\ndata: {"text": ": 4\\n"}\n\ndata: {}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 5, 23, 1000])
def test_they_are_read_and_removed(size):
    told = ToldTokens()
    assert b"".join(told.feed(EVENTS[at : at + size]) for at in range(0, len(EVENTS), size)) == CLEAN
    assert told.finish() == b""
    assert told.resume().token_ids.tolist() == [5, 16, 7]
    assert told.resume().fields == {"answer_token_ids": [5, 16, 7]}
    assert told.cached_tokens() is told.prompt_tokens() is None


def test_tokens_of_half_an_event_do_not_count():
    told = ToldTokens([3])
    end = EVENTS.index(b": 7") + 6
    assert told.feed(EVENTS[:end]) == b'data: {"role": 1}\n\ndata: {"text": ": 4\\n"}\n\n'
    assert told.resume().token_ids.tolist() == [3, 5, 16]
    assert told.finish() == b": 7\nda"


def test_an_engine_that_ends_says_so():
    told = ToldTokens()
    told.feed(EVENTS)
    with pytest.raises(EngineUnavailable, match="ended in mid-answer"):
        told.feed(b'data: {"error":{"message":"bye","code":"engine_unavailable"}}\n\n')
    assert len(told.resume().token_ids) == 3


def test_a_tool_may_be_named_like_the_end_of_an_engine():
    event = b'data: {"id":"x","choices":[{"delta":{"tool_calls":[{"name":"engine_unavailable"}]}}]}\n\n'
    assert ToldTokens().feed(event) == event


def test_no_tokens_yet():
    assert ToldTokens("odd").resume().fields == {"answer_token_ids": []}


@pytest.mark.parametrize("odd", [b": 5 \xb816\ndata: {}\n\n", b": 5\ndata: {}\n\n: x\ndata: {}\n\n"])
def test_what_are_no_ids_ends_the_stream_before_its_text_is_passed_on(odd):
    """Going on without them would leave tokens out."""
    told = ToldTokens()
    told.feed(EVENTS)
    with pytest.raises(EngineUnavailable, match="no ids"):
        told.feed(odd)
    assert told.resume().token_ids.tolist() == [5, 16, 7]
