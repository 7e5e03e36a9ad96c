"""Cached tokens, in the usage of every route."""

import json

import pytest

from engine_adapter.usage import read_cached_tokens, read_streamed_cached_tokens, read_usage
from tests.fakes import DONE, event

DETAILS = {"cached_tokens": 7}
USAGES = [
    ({"prompt_tokens": 9, "prompt_tokens_details": DETAILS}, 7),
    ({"input_tokens": 9, "input_tokens_details": DETAILS, "output_tokens_details": {"x": 1}}, 7),
    ({"input_tokens": 9, "cache_read_input_tokens": 7, "output_tokens": 0}, 7),
    ({"cache_read_input_tokens": 0, "cache_creation": {"a": 1}}, 0),
    ({"prompt_tokens_details": None, "input_tokens_details": DETAILS}, 7),
    ({"prompt_tokens_details": {}}, None),
    ({"prompt_tokens_details": {"cached_tokens": "7"}}, None),
    ({"output_tokens": 3}, None),
    ({}, None),
    (None, None),
]


class TestUsage:
    @pytest.mark.parametrize(("usage", "cached"), USAGES)
    def test_of_an_answer(self, usage, cached):
        assert read_cached_tokens(json.dumps({"output": [{"usage": 1}], "usage": usage}).encode()) == cached

    @pytest.mark.parametrize(("usage", "cached"), USAGES)
    def test_by_itself(self, usage, cached):
        assert read_usage(json.dumps(usage).encode()) == cached

    @pytest.mark.parametrize("content", [b"", b"[]", b'{"usage":[]}', b'{"usage', b"[" * 5000, b'{"\xff":1}'])
    def test_of_what_is_none(self, content):
        assert read_cached_tokens(content) is None
        assert read_streamed_cached_tokens(content) is None

    @pytest.mark.parametrize(("usage", "cached"), USAGES)
    @pytest.mark.parametrize("place", [None, "response", "message"])
    def test_of_a_stream(self, usage, cached, place):
        last = event({"type": "last", place: {"usage": usage}} if place else {"usage": usage})
        assert read_streamed_cached_tokens(event({"usage": None}) + last + DONE) == cached

    def test_of_the_last_event_that_says_so(self):
        events = [
            event({"usage": usage})
            for usage in (
                {"cache_read_input_tokens": 1},
                {"cache_read_input_tokens": 2},
                {"output_tokens": 3},
            )
        ]
        assert read_streamed_cached_tokens(b"".join(events)) == 2

    def test_of_an_event_whose_start_is_cut_off(self):
        last = event(
            {"response": {"output": ["x" * 50], "usage": {"input_tokens_details": DETAILS}, "user": "u"}}
        )
        assert read_streamed_cached_tokens(last[40:]) == 7
        assert read_streamed_cached_tokens(last[:-30]) is None

    def test_is_not_looked_for_in_texts(self):
        quoted = json.dumps({"usage": {"cache_read_input_tokens": 5}})
        delta = event({"delta": quoted, "of": "usage", "usage": {"cache_read_input_tokens": 6}})
        assert read_streamed_cached_tokens(delta + event({"delta": quoted})) == 6
