"""Tokens in the usage of every route."""

import json

import pytest

from engine_adapter.http.answer_fields import NOTHING, read_answer_usage, read_streamed_usage
from engine_adapter.types import Usage
from tests.fakes import DONE, event

DETAILS = {"cached_tokens": 7}
USAGES = [
    ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": DETAILS}, Usage(7, 4)),
    ({"input_tokens": 9, "input_tokens_details": DETAILS, "output_tokens_details": {"x": 1}}, Usage(7)),
    ({"input_tokens": 9, "cache_read_input_tokens": 7, "output_tokens": 0}, Usage(7, 0)),
    ({"cache_read_input_tokens": 0, "cache_creation": {"a": 1}}, Usage(0)),
    ({"prompt_tokens_details": None, "input_tokens_details": DETAILS}, Usage(7)),
    ({"prompt_tokens_details": {}}, NOTHING),
    ({"prompt_tokens_details": {"cached_tokens": "7"}}, NOTHING),
    ({"output_tokens": 3}, Usage(None, 3)),
    ({"output_tokens": -3, "cache_read_input_tokens": 10**400}, NOTHING),
    ({"output_tokens": 10**30, "cache_read_input_tokens": 7}, Usage(7)),
    ({}, NOTHING),
    (None, NOTHING),
]


class TestUsage:
    @pytest.mark.parametrize(("usage", "said"), USAGES)
    def test_of_an_answer(self, usage, said):
        assert read_answer_usage(json.dumps({"output": [{"usage": 1}], "usage": usage}).encode()) == said

    @pytest.mark.parametrize(
        ("timings", "prefill"),
        [
            ({"prompt_n": 9, "prompt_ms": 250.0, "predicted_n": 4}, (9, 0.25)),
            ({"prompt_n": 0, "prompt_ms": 2.0}, None),
            ({"prompt_n": 10**400, "prompt_ms": 2.0}, None),
            ({"prompt_n": 9, "prompt_ms": 10**400}, None),
            ({"prompt_n": 9, "prompt_ms": 1e-320}, None),
            (None, None),
        ],
    )
    def test_timings_of_an_answer(self, timings, prefill):
        answer = {"usage": {"completion_tokens": 4}, "timings": timings}
        assert read_answer_usage(json.dumps(answer).encode()) == Usage(None, 4, prefill)

    @pytest.mark.parametrize(
        ("choice", "called"),
        [
            ({"finish_reason": "tool_calls"}, True),
            ({"finish_reason": "stop", "message": {"tool_calls": None}}, False),
            ({"finish_reason": "stop", "text": '"finish_reason": "tool_calls"'}, False),
        ],
    )
    def test_a_tool_call_is_seen_in_an_answer_and_in_a_stream(self, choice, called):
        answer = {"choices": [choice], "usage": {"completion_tokens": 4}}
        said = Usage(None, 4, called_tool=called)
        assert read_answer_usage(json.dumps(answer).encode()) == said
        assert read_streamed_usage(event({"choices": []}) + event(answer) + DONE) == said

    def test_a_tool_call_is_seen_while_another_choice_goes_on(self):
        called, usage = event({"choices": [{"finish_reason": "tool_calls"}]}), {"completion_tokens": 4}
        others = [event({"choices": [{"index": 1, "delta": {"content": "word"}}]}) for _ in range(60)]
        stream = called + b"".join(others) + event({"usage": usage}) + DONE
        assert read_streamed_usage(stream) == Usage(None, 4, called_tool=True)

    def test_timings_of_a_stream_are_the_last_ones(self):
        early = {"timings": {"prompt_n": 1, "prompt_ms": 1.0}}
        last = {
            "usage": {"completion_tokens": 4},
            "timings": {"prompt_n": 9, "prompt_ms": 250.0, "predicted_ms": 30},
        }
        said = Usage(None, 4, (9, 0.25), 0.03)
        assert read_streamed_usage(event(early) + event(last) + DONE) == said
        assert read_streamed_usage(event(early)[:-9]) == NOTHING
        quoted = event({"delta": json.dumps(early)})
        assert read_streamed_usage(event(last) + quoted) == said

    @pytest.mark.parametrize("content", [b"", b"[]", b'{"usage":[]}', b'{"usage', b"[" * 5000, b'{"\xff":1}'])
    def test_of_what_is_none(self, content):
        assert read_answer_usage(content) == NOTHING
        assert read_streamed_usage(content) == NOTHING

    @pytest.mark.parametrize(("usage", "said"), USAGES)
    @pytest.mark.parametrize("place", [None, "response", "message"])
    def test_of_a_stream(self, usage, said, place):
        last = event({"type": "last", place: {"usage": usage}} if place else {"usage": usage})
        assert read_streamed_usage(event({"usage": None}) + last + DONE) == said

    def test_of_the_last_event_that_says_so(self):
        events = [
            event({"usage": usage})
            for usage in (
                {"cache_read_input_tokens": 1},
                {"cache_read_input_tokens": 2},
                {"output_tokens": 3},
            )
        ]
        assert read_streamed_usage(b"".join(events)) == Usage(2, 3)

    def test_of_an_event_whose_start_is_cut_off(self):
        last = event(
            {"response": {"output": ["x" * 50], "usage": {"input_tokens_details": DETAILS}, "user": "u"}}
        )
        assert read_streamed_usage(last[40:]) == Usage(7)
        assert read_streamed_usage(last[:-30]) == NOTHING

    def test_is_not_looked_for_in_texts(self):
        quoted = json.dumps({"usage": {"cache_read_input_tokens": 5}})
        delta = event({"delta": quoted, "of": "usage", "usage": {"cache_read_input_tokens": 6}})
        assert read_streamed_usage(delta + event({"delta": quoted})) == Usage(6)
