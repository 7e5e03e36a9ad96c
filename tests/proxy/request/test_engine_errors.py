"""Which answers leave a request to another engine. Over real sockets: tests/proxy/test_flow.py."""

import pytest

from engine_adapter import EngineRejected, EngineUnavailable, Headers
from proxy.core.life import Cause
from proxy.request.calls import Call
from proxy.request.engine_errors import cause_of_error, engines_code

DOWN, FULL = EngineUnavailable("down"), EngineRejected("full", status=429)


def call(path="/v1/chat/completions", body=None):
    return Call("r", "POST", path, Headers([]), body)


def cause(status, path="/v1/chat/completions", n=2, *, is_first=True, message="no", **more):
    error = EngineRejected(message, status=status, **more)
    return cause_of_error(error, call(path), n, is_first=is_first)


@pytest.mark.parametrize(
    "told",
    [
        {"param": "model"},
        {"code": "model_not_found"},
        {"message": "The model `m` does not exist."},
        {"message": "Model 'm' not found"},
        {"message": "unknown model m"},
    ],
)
def test_a_404_about_the_model_is_the_engines(told):
    assert cause(404, **told) is Cause.ENGINE_DENIED
    assert cause(404, n=1, **told) is Cause.ENGINE_REJECTED


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [
        (
            404,
            {"message": "The model `m` does not exist.", "type": "NotFoundError"},
            "model_not_found",
        ),  # vLLM
        (404, {"message": "File Not Found", "type": "not_found_error"}, "not_found"),  # llama-server
        (404, {"message": "gone", "code": "own"}, "own"),
        (400, {"message": "The model `m` does not exist."}, None),
    ],
)
def test_a_404_has_a_code_whether_the_engine_gives_one_or_not(status, told, code):
    message, told = told["message"], {name: told[name] for name in told if name != "message"}
    assert engines_code(EngineRejected(message, status=status, **told)) == code
