import json

import pytest

from engine_adapter import read_error
from engine_adapter.http.error_bodies import EngineErrorBody

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
    ({"detail": "why"}, EngineErrorBody("why")),
    ({"detail": [{"loc": ["body"], "msg": "why"}]}, EngineErrorBody('[{"loc":["body"],"msg":"why"}]')),
    ("why", EngineErrorBody("why")),
    ({}, EngineErrorBody("the engine gave no reason")),
    ({"error": {}}, EngineErrorBody("the engine gave no reason")),
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
]


@pytest.mark.parametrize(("answer", "error"), SHAPES)
def test_every_shape_becomes_one(answer, error):
    assert read_error(json.dumps(answer).encode()) == error


def test_what_is_not_json_is_cut_short():
    assert read_error(b"boom \xff") == EngineErrorBody("boom \ufffd")
    assert read_error(b"") == EngineErrorBody("the engine gave no reason")
    assert len(read_error(b"<html>" * 1000).message) == 500
    assert read_error(b"[" * 100_000).message.startswith("[[")
