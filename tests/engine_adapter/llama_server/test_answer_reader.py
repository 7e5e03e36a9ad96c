"""What a lease learns of an answer that passes, and what a client gets who wanted no stream."""

from array import array

import msgspec
import pytest

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.llama_server import answer_reader
from engine_adapter.llama_server.answer_reader import SlotAnswer
from engine_adapter.llama_server.turns import Ask, SlotLease

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


def event(content):
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def chunk(delta, finish=None):
    return event(
        {"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    )


WHOLE = b"".join(
    [
        chunk({"role": "assistant", "content": None}),
        chunk({"content": "he"}),
        chunk({"content": "llo"}),
        chunk({}, "stop"),
        event({"id": "x", "model": "m", "choices": [], "usage": USAGE}),
        DONE,
    ]
)


@pytest.fixture
def lease():
    nothing = array("i")
    return SlotLease(
        slot=0,
        ask=Ask(nothing),
        cached_tokens=0,
        firm=True,
        may_reuse=True,
        restored=False,
        before=nothing,
        length_before=0,
        started=0.0,
    )


@pytest.fixture
def watching(lease):
    return SlotAnswer(CHAT, lease, assembles=False)


@pytest.fixture
def assembling(lease):
    return SlotAnswer(CHAT, lease, assembles=True)


def feed(reader, raw, size=7):
    for at in range(0, len(raw), size):
        reader.feed(raw[at : at + size])


def test_a_lease_learns_what_the_answer_said(lease, watching):
    feed(watching, WHOLE)
    assert (lease.has_begun, lease.answer) == (True, None)
    assert watching.finish() == b""
    assert (lease.answer.prompt_tokens, lease.answer.sampled_tokens) == (9, 2)
    assert (lease.answer.pieces, lease.answer.is_complete) == (["he", "llo"], True)
    assert watching.cached_tokens() == 5


def test_before_anything_came_nothing_has_begun(lease, watching):
    assert not lease.has_begun
    assert watching.cached_tokens() is None


def test_an_answer_cut_short_is_not_complete(lease, watching):
    feed(watching, WHOLE[: WHOLE.index(b"llo")])
    watching.finish()
    assert (lease.has_begun, lease.answer.is_complete, watching.cached_tokens()) == (True, False, None)


def test_who_wanted_no_stream_gets_one_answer(lease, assembling):
    feed(assembling, WHOLE)
    answer = msgspec.json.decode(assembling.finish())
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert (answer["object"], answer["usage"]) == ("chat.completion", USAGE)
    assert assembling.cached_tokens() == 5
    assert lease.answer.is_complete


@pytest.mark.parametrize(
    "raw", [b"", WHOLE[: WHOLE.index(b"llo")], WHOLE[: WHOLE.index(b"stop")], b"data: nonsense\n\n" + DONE]
)
def test_a_stream_that_is_not_whole_is_the_servers_failure(assembling, raw):
    feed(assembling, raw)
    with pytest.raises(EngineUnavailable):
        assembling.finish()


@pytest.mark.parametrize("status", [500, 503])
def test_an_error_of_the_server_in_the_stream_is_its_failure(assembling, status):
    feed(assembling, event({"error": {"message": "out of memory", "code": status}}))
    with pytest.raises(EngineUnavailable, match="out of memory"):
        assembling.finish()


def test_an_error_of_the_client_in_the_stream_keeps_its_status(lease, assembling):
    feed(assembling, event({"error": {"message": "bad grammar", "code": 400}}))
    with pytest.raises(EngineRejected, match="bad grammar") as rejected:
        assembling.finish()
    assert rejected.value.status == 400
    assert lease.answer.error == "bad grammar"


def test_a_longer_answer_than_is_read_is_passed_on_and_not_read(lease, monkeypatch):
    monkeypatch.setattr(answer_reader, "MAX_BYTES", len(WHOLE) - 1)
    watching = SlotAnswer(CHAT, lease, assembles=False)
    feed(watching, WHOLE)
    assert watching.finish() == b""
    assert (lease.has_begun, lease.answer, watching.cached_tokens()) == (True, None, None)
    assert watching._chunks == []


def test_and_assembled_all_the_same(lease, monkeypatch):
    monkeypatch.setattr(answer_reader, "MAX_BYTES", len(WHOLE) - 1)
    assembling = SlotAnswer(CHAT, lease, assembles=True)
    feed(assembling, WHOLE)
    assert msgspec.json.decode(assembling.finish())["choices"][0]["message"]["content"] == "hello"
    assert lease.answer is None


def test_what_is_not_read_is_not_kept(lease, monkeypatch):
    monkeypatch.setattr(answer_reader, "MAX_BYTES", 100)
    watching = SlotAnswer(CHAT, lease, assembles=False)
    for _ in range(50):
        watching.feed(b"x" * 50)
    assert sum(map(len, watching._chunks)) <= 100
