"""Answers of the server's own routes: what is learned of them, and what the client gets."""

from array import array

import msgspec
import pytest

from engine_adapter import EngineUnavailable, JsonBody
from engine_adapter.llama_server.answer import read_answer, slot_content
from engine_adapter.llama_server.answer_reader import NativeAnswer, SlotsAnswer, read_by
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.turns import Ask, SlotLease

PROMPT = array("i", [1, 2, 3])
END = {"tokens_evaluated": 3, "tokens_predicted": 3, "stop": True, "timings": {"cache_n": 2, "prompt_n": 1}}


def lease(tokens=PROMPT, salt=None):
    return SlotLease(0, Ask(tokens, salt), 0, True, True, False, array("i"), 0, 0.0)


def body(**fields):
    return JsonBody(msgspec.json.encode(fields))


def stream(*events):
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)


def part(token, predicted):
    return {"content": "x", "tokens": [token], "stop": False, "tokens_predicted": predicted}


def test_a_whole_answer_tells_all_tokens_and_the_client_gets_what_it_asked_for():
    raw = msgspec.json.encode({"content": "abc", "tokens": [7, 8, 9], **END})
    for hides, tokens in ((True, b"[]"), (False, b"[7,8,9]")):
        held = lease()
        reader = NativeAnswer(held, hides_tokens=hides)
        assert reader.feed(raw) + reader.finish() == raw.replace(b"[7,8,9]", tokens)
        assert (held.has_begun, reader.cached_tokens(), reader.prompt_tokens()) == (True, 2, None)
        assert slot_content(PROMPT, held.answer, held.answer.token_ids) == (array("i", [1, 2, 3, 7, 8]), 0)


@pytest.mark.parametrize("raw", [b"{}", b'{"content":"a"}', b"[]", b"no json"])
def test_other_answers_pass(raw):
    held = lease()
    assert NativeAnswer(held, hides_tokens=True).feed(raw) == raw
    assert not held.answer.is_complete


def test_a_stream_tells_tokens_up_to_the_first_it_leaves_out():
    """A character of several tokens has one event, with the last of them."""
    whole = read_answer(stream(part(7, 1), part(8, 2), part(9, 3), {"tokens": [], **END}))
    assert (whole.is_complete, whole.token_ids) == (True, array("i", [7, 8, 9]))
    gap = read_answer(stream(part(7, 1), part(9, 3), {"tokens": [], **END}))
    assert (gap.is_complete, gap.token_ids) == (True, array("i", [7]))
    assert slot_content(PROMPT, gap, gap.token_ids) == (array("i", [1, 2, 3, 7]), 1)


def test_nothing_is_known_after_the_server_dropped_tokens():
    answer = read_answer(stream(part(7, 1), {"tokens": [], "truncated": True, **END}))
    assert slot_content(PROMPT, answer, answer.token_ids) == (array("i"), 5)


def test_token_ids_are_asked_for_where_that_changes_nothing_for_the_client():
    for path in ("/completion", "/completions", "/infill"):
        sent, reader = read_by(path, body(prompt="a"), lease())
        assert sent.get("return_tokens") is True
        assert reader.feed(b'{"tokens":[7]}') == b'{"tokens":[]}'
    for fields in ({"stream": True}, {"return_tokens": True}, {"response_fields": ["content"]}):
        asked = body(prompt="a", **fields)
        sent, reader = read_by("/completion", asked, lease())
        assert sent.raw == asked.raw
        assert reader.feed(b'{"tokens":[7]}') == b'{"tokens":[7]}'


def test_a_prompt_of_unknown_tokens_leaves_its_own_kv():
    held = lease(array("i"), "salt")
    assert not held.leaves_own
    held.answer = read_answer(stream({"tokens": [], **END}))
    assert held.leaves_own
    for other in (lease(PROMPT, "salt"), lease(array("i"), UNKNOWN_OWNER)):
        other.answer = held.answer
        assert not other.leaves_own


def test_slots_show_nothing_of_requests():
    slot = {"id": 0, "is_processing": False, "prompt": "secret", "generated": "x", "params": {"stop": ["y"]}}
    reader = SlotsAnswer()
    shown = reader.feed(msgspec.json.encode([slot])) + reader.finish()
    assert msgspec.json.decode(shown) == [{"id": 0, "is_processing": False}]
    assert (reader.cached_tokens(), reader.prompt_tokens()) == (None, None)
    with pytest.raises(EngineUnavailable, match="not a list of slots"):
        reader.feed(b'{"prompt": "secret"}')
