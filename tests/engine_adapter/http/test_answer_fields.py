"""Tokens in the usage of every route."""

import json

import msgspec
import pytest

from engine_adapter import read_error
from engine_adapter.http.answer_fields import NOTHING, EngineErrorBody, read_answer_usage, read_streamed_usage
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


SHAPES = [
    (
        {"error": {"message": "why", "type": "t", "param": "p", "code": "c"}},
        EngineErrorBody("why", "t", "p", "c"),
    ),
    (
        {"error": {"message": "why", "type": "BadRequest", "code": 400}},
        EngineErrorBody("why", "BadRequest", named_status=400),
    ),
    ({"object": "error", "message": "why", "param": "p"}, EngineErrorBody("why", param="p")),
    ({"error": "why"}, EngineErrorBody("why")),
    ({"detail": [{"loc": ["body"], "msg": "why"}]}, EngineErrorBody('[{"loc":["body"],"msg":"why"}]')),
    ("why", EngineErrorBody("why")),
    ({}, EngineErrorBody("the engine gave no reason")),
    (None, EngineErrorBody("the engine gave no reason")),
    (
        {"error": {"message": "why", "type": "exceed_context_size_error", "code": 400, "n_ctx": 9}},
        EngineErrorBody(
            "why",
            "exceed_context_size_error",
            code="context_length_exceeded",
            more={"n_ctx": 9},
            named_status=400,
        ),
    ),
    (
        {"error": {"message": "image input is not supported - hint: …", "type": "server_error", "code": 500}},
        EngineErrorBody("image input is not supported - hint: …", "invalid_request_error", is_clients=True),
    ),
    (
        {"error": {"message": "Failed to parse messages: Missing 'role'", "code": 500}},
        EngineErrorBody("Failed to parse messages: Missing 'role'", "invalid_request_error", is_clients=True),
    ),
]


@pytest.mark.parametrize(("answer", "error"), SHAPES)
def test_every_shape_becomes_one(answer, error):
    assert read_error(json.dumps(answer).encode()) == error


@pytest.mark.parametrize(
    ("message", "is_clients"),
    [
        ("Failed to parse tools: [json.exception.type_error.304] cannot use at() with string", True),
        ("[json.exception.type_error.302] type must be string, but is number", True),
        (
            "[json.exception.type_error.316] invalid UTF-8 byte at index 0: 0xFF",
            False,
        ),  # it wrote that itself
    ],
)
def test_a_field_of_another_type_is_the_clients_fault(message, is_clients):
    """llama-server answers these with 500, and OpenAI's SDKs would ask twice more."""
    found = read_error(json.dumps({"error": {"code": 500, "message": message}}).encode())
    assert found.is_clients is is_clients
    assert found.rejection(500).status == (400 if is_clients else 500)


def test_a_long_message_keeps_its_beginning_and_its_end():
    told = read_error(json.dumps({"error": {"message": "first " + "x" * 100_000 + " last"}}).encode()).message
    assert told.startswith("first x")
    assert told.endswith("x last")
    assert len(told) < 40_000


def test_what_is_not_json_is_cut_short():
    assert read_error(b"boom \xff") == EngineErrorBody("boom \ufffd")
    assert read_error(b"") == EngineErrorBody("the engine gave no reason")
    assert len(read_error(b"<html>" * 1000).message) == 500
    assert read_error(b"[" * 100_000).message.startswith("[[")


@pytest.mark.parametrize(
    "message",
    [
        (  # the late system message that Qwen3.5's template refuses
            "\n------------\nWhile executing CallExpression at line 85, column 32 in source:\n"
            "...first %}\u21b5            {{- raise_exception('No such role...\n           ^\n"
            "Error: Jinja Exception: No such role: x"
        ),
        (
            "Unable to generate parser for this template. Automatic parser generation failed: \n-----\n"
            "While executing CallExpression at line 2, column 19 in source:\n...].content == 'bad' %}\u21b5"
            "{{ raise_exception('No such role: x...\n         ^\nError: Jinja Exception: No such role: x"
        ),
        "No such role: x at row 2, column 3:\n{%- if bad %}\n  {{ raise_exception(m) }}\n  ^\n{% endif %}\n",
    ],
)
def test_an_error_of_a_chat_template_is_one_line(message):
    """As real llama-servers write it, today and in 2025."""
    found = read_error(msgspec.json.encode({"error": {"code": 500, "message": message}}))
    assert found.message == "the model's chat template refuses the request: No such role: x"
    assert (found.rejection(500).status, found.type) == (400, "invalid_request_error")


def test_lines_of_another_error_stay():
    assert read_error(b'{"error": {"message": "one\\ntwo"}}').message == "one\ntwo"
