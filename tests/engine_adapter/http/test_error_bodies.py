import json

import msgspec
import pytest

from engine_adapter import read_error
from engine_adapter.http.answer_fields import EngineErrorBody

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
