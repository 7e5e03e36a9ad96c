"""Which answers leave a request to another engine. Over real sockets: tests/proxy/test_flow.py."""

import pytest

from engine_adapter import EngineRejected, EngineUnavailable, Headers
from proxy.core.life import Cause
from proxy.errors import EngineFailed
from proxy.request.calls import Call
from proxy.request.engine_errors import cause_of_error, engines_code, final_error

DOWN, FULL = EngineUnavailable("down"), EngineRejected("full", status=429)


def call(path="/v1/chat/completions", body=None):
    return Call("r", "POST", path, Headers([]), body)


def cause(status, path="/v1/chat/completions", n=2, *, is_first=True, message="no", **more):
    error = EngineRejected(message, status=status, **more)
    return cause_of_error(error, call(path), n, is_first=is_first)


def test_a_404_is_about_the_request_unless_another_engine_may_have_the_route():
    assert cause(404) is Cause.ENGINE_REJECTED
    assert cause(404, "/v1/embeddings") is Cause.ENGINE_LACKS
    assert cause(404, "/v1/files/f-1") is Cause.ENGINE_LACKS
    assert cause(404, "/v1/embeddings", n=1) is Cause.ENGINE_REJECTED
    assert all(cause(429, path) is Cause.ENGINE_REFUSED for path in ("/v1/embeddings", "/v1/responses"))


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


@pytest.mark.parametrize("status", [401, 403, 405, 501])
def test_what_one_engine_denies_another_one_is_asked(status):
    assert cause(status) is Cause.ENGINE_DENIED
    assert cause(status, n=1) is Cause.ENGINE_REJECTED
    assert cause(status, n=1, is_first=False) is Cause.ENGINE_DENIED  # so that the client gets the first one


@pytest.mark.parametrize("status", [429, 500, 503, 507, 529, 599])
def test_any_failure_of_the_server_is_a_refusal(status):
    assert cause(status, n=1) is Cause.ENGINE_REFUSED
    assert cause(status, headers={"x-should-retry": "false"}) is Cause.ENGINE_REJECTED


def test_the_last_failure_is_the_clients_error_and_stops_its_retries():
    alone, last = final_error([FULL]), final_error([DOWN, FULL])
    assert (alone.status, last.status) == (429, 429)
    assert "x-should-retry" not in alone.headers or last is alone
    assert last.headers["x-should-retry"] == "false"
    failed = final_error([FULL, DOWN])
    assert isinstance(failed, EngineFailed)
    assert str(failed) == "2 engines failed this request; the last said: down"
    assert str(final_error([DOWN])) == "1 engine failed this request; the last said: down"


def test_where_all_refuse_the_first_ones_word_counts():
    denied = EngineRejected("not yours", status=403)
    assert final_error([denied, EngineRejected("nor here", status=401)]) is denied
    assert denied.headers == {"x-should-retry": "false"}


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
