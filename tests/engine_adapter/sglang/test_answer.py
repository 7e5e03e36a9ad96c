import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.sglang.requests import DetailsAnswer
from tests.holding import read_by

# As SGLang 0.5.23 writes them.
CARD = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 40, "total_tokens": 42, "completion_tokens": 2, "prompt_tokens_details": None}
TIERS = {"cached_tokens_details": {"device": 16, "host": 8}}
DONE = b"data: [DONE]\n\n"


def event(**fields) -> bytes:
    return b"data: " + json.dumps(CARD | fields, separators=(",", ":")).encode() + b"\n\n"


def choice(text=None, finish=None):
    delta = {"reasoning_content": None} | ({"content": text} if text is not None else {})
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}


TEXT = event(choices=[choice('a "sglext" and a "usage"')])
END = event(choices=[choice(finish="stop")])
TOLD = event(choices=[], usage=None, sglext=TIERS)
COUNTED = event(choices=[], usage=USAGE)


def streamed(*events, hides=True, size=None):
    """What the client gets of the stream, cut into chunks of `size`, and the cached tokens."""
    reader, stream = DetailsAnswer(streams=True, hides_details=hides), b"".join(events)
    step = size or len(stream)
    kept = read_by(reader, [stream[at : at + step] for at in range(0, len(stream), step)])
    return kept, reader.cached_tokens()


def whole(answer, *, hides=True):
    reader = DetailsAnswer(streams=False, hides_details=hides)
    kept = reader.feed(json.dumps(answer).encode()) + reader.finish()
    return json.loads(kept), reader.cached_tokens()


def counted(cached):
    return event(choices=[], usage=USAGE | {"prompt_tokens_details": {"cached_tokens": cached}})


@given(st.integers(1, 60))
def test_a_stream_without_what_its_client_did_not_ask_for(size):
    assert streamed(TEXT, END, TOLD, DONE, size=size) == (TEXT + END + DONE, 24)
    assert streamed(TEXT, END, TOLD, COUNTED, DONE, size=size) == (TEXT + END + counted(24) + DONE, 24)


def test_a_client_that_asked_gets_all_of_it():
    assert streamed(TEXT, END, TOLD, DONE, hides=False) == (TEXT + END + TOLD + DONE, 24)


def test_nothing_is_told_of_a_prompt_that_reused_nothing():
    assert streamed(TEXT, END, DONE) == (TEXT + END + DONE, 0)
    assert streamed(TEXT, END, COUNTED, DONE) == (TEXT + END + counted(0) + DONE, 0)


def test_a_stream_that_broke_off_tells_nothing():
    error = b'data: {"error":{"object":"error","message":"no","type":"x","code":500}}\n\n'
    assert streamed(TEXT, error, DONE) == (TEXT + error + DONE, None)
    assert streamed(TEXT) == (TEXT, None)


def test_usage_on_the_way_is_left_alone():
    counting = event(choices=[choice("a")], usage=USAGE)
    assert streamed(counting, END, TOLD, DONE) == (counting + END + DONE, 24)


def test_other_extensions_stay():
    told = event(choices=[], usage=None, sglext=TIERS | {"routed_experts": "e"})
    left = event(choices=[], usage=None, sglext={"routed_experts": "e"})
    assert streamed(TEXT, END, told, DONE)[0] == TEXT + END + left + DONE


@pytest.mark.parametrize(("asked", "left"), [([], {}), ([{"a": 1}], {"spec_tokens_details": [{"a": 1}]})])
def test_what_several_choices_bring_beside_it_goes_too_where_it_is_empty(asked, left):
    said = {"choices": [{"message": {"content": "hi"}}]}
    told = said | {"sglext": TIERS | {"spec_tokens_details": asked}}
    assert whole(told)[0] == said | ({"sglext": left} if left else {})


def test_what_cannot_be_read_goes_as_it_is():
    odd = b'data: {"sglext": 1}\n\n', b'data: {"usage": {"a": \n\n', b': "sglext"\n\n'
    assert streamed(*odd) == (b"".join(odd), None)


ANSWER = {"id": "c-1", "choices": [{"index": 0, "finish_reason": "stop"}], "usage": USAGE, "metadata": None}


@pytest.mark.parametrize(
    ("tiers", "cached"),
    [({"device": 16, "host": 8}, 24), ({"device": 1, "host": 2, "storage": 4, "storage_backend": "x"}, 7)],
)
def test_a_whole_answer(tiers, cached):
    told = ANSWER | {"sglext": {"cached_tokens_details": tiers}}
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": cached}}
    assert whole(told) == (ANSWER | {"usage": usage}, cached)
    assert whole(told, hides=False) == (told | {"usage": usage}, cached)


def test_a_whole_answer_of_a_prompt_that_reused_nothing():
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert whole(ANSWER) == (ANSWER | {"usage": usage}, 0)


def test_usage_that_tells_is_believed():
    told = ANSWER | {"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 5, "image_tokens": 3}}}
    assert whole(told)[0] == told
    counts = USAGE | {"prompt_tokens_details": {"image_tokens": 3}}
    filled, _ = whole(ANSWER | {"usage": counts})
    assert filled["usage"]["prompt_tokens_details"] == {"image_tokens": 3, "cached_tokens": 0}


def test_an_answer_without_usage():
    assert whole({"id": "c-1"}) == ({"id": "c-1"}, None)
