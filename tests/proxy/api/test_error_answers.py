import inspect
import json

import msgspec
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

import engine_adapter.errors
from engine_adapter import (
    ChatError,
    EngineDied,
    EngineDiverged,
    EngineError,
    EngineGarbled,
    EngineLate,
    EngineLost,
    EngineRejected,
    EngineSpecError,
    EngineTaken,
    EngineUnavailable,
    EngineUnhealthy,
    EngineUnreachable,
    FieldError,
    ModelFailed,
    ModelNotLoaded,
    NotSupported,
    PromptTableError,
)
from engine_adapter.causes import Code
from proxy import errors
from proxy.api.error_answers import error_response, handle, handle_http

_GONE = Code.MODEL_NOT_FOUND
CASES = [
    (errors.BadRequest("m", param="p"), 400, "invalid_request_error", "p", "invalid_value"),
    (errors.BadRequest("m", code=Code.INVALID_JSON), 400, "invalid_request_error", None, "invalid_json"),
    (errors.TooLong("m", 9, param="p"), 400, "invalid_request_error", "p", "context_length_exceeded"),
    (errors.Unauthorized("m"), 401, "authentication_error", None, "invalid_api_key"),
    (errors.Forbidden("m"), 403, "permission_error", None, "forbidden"),
    (errors.NotFound("m"), 404, "invalid_request_error", None, "not_found"),
    (errors.NotFound("m", param="p", code=_GONE), 404, "invalid_request_error", "p", _GONE),
    (errors.ModelRefused("m", param="model"), 404, "invalid_request_error", "model", _GONE),
    (errors.MethodNotAllowed("m", allow="GET"), 405, "invalid_request_error", None, "method_not_allowed"),
    (errors.Conflict("m"), 409, "invalid_request_error", None, "conflict"),
    (errors.BodyTooLarge("m"), 413, "invalid_request_error", None, "body_too_large"),
    (errors.SlowBody("m"), 408, "invalid_request_error", None, "slow_body"),
    (errors.RateLimited("m", retry_after_s=1), 429, "rate_limit_error", None, "rate_limit_exceeded"),
    (errors.Overloaded("m", retry_after_s=1), 503, "server_error", None, "overloaded"),
    (errors.NoMemory("m", retry_after_s=1), 503, "server_error", None, "overloaded"),
    (errors.EncodedBody("m"), 415, "invalid_request_error", None, "encoded_body"),
    (errors.NoEngine("m"), 503, "server_error", None, "no_engine"),
    (errors.EngineFailed("m"), 502, "server_error", None, "engine_failed"),
    (errors.ProxyError("m"), 500, "server_error", None, "internal_error"),
    (PromptTableError("m", param="p[3]"), 400, "invalid_request_error", "p[3]", "invalid_embeddings"),
    (FieldError("m", param="f"), 400, "invalid_request_error", "f", "invalid_value"),
    (ChatError("m", param="messages[0]"), 400, "invalid_request_error", "messages[0]", "invalid_messages"),
    (EngineSpecError("m"), 400, "invalid_request_error", None, "invalid_engine"),
    (NotSupported("pin", engine="e", instead="x"), 501, "not_supported_error", None, "not_supported"),
    (EngineTaken("m", holder="h"), 503, "server_error", None, "engine_taken"),
    (EngineUnhealthy("m"), 502, "server_error", None, "engine_unavailable"),
    *(
        (each("m"), 502, "server_error", None, "engine_unavailable")
        for each in (
            EngineUnavailable,
            EngineUnreachable,
            ModelNotLoaded,
            EngineDied,
            EngineGarbled,
            EngineLate,
            EngineLost,
            EngineDiverged,
        )
    ),
    (errors.TimeLimit("m"), 504, "server_error", None, "time_limit"),
    (EngineRejected("m", status=429, param="p"), 429, "server_error", "p", "engine_rejected"),
    (ModelFailed("m"), 424, "server_error", None, "model_failed"),
    (EngineError("m"), 502, "server_error", None, "engine_error"),
    (msgspec.ValidationError("m"), 400, "invalid_request_error", None, "invalid_value"),
    (msgspec.DecodeError("m"), 400, "invalid_request_error", None, "invalid_json"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), CASES)
def test_each_class_has_its_answer(error, status, kind, param, code):
    response = error_response(error, "r1")
    body = json.loads(response.body)["error"]
    assert (response.status_code, body["type"], body["param"], body["code"]) == (status, kind, param, code)
    assert str(error) in body["message"]
    assert response.headers["x-request-id"] == "r1"
    assert response.headers["content-type"] == "application/json"


def test_no_class_is_without_a_row_or_a_test():
    classes = {
        each
        for module in (errors, engine_adapter.errors)
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, Exception)
    }
    rows = {type(error) for error, *_ in CASES}
    assert classes - {engine_adapter.errors.KvpinError} == rows - {
        msgspec.ValidationError,
        msgspec.DecodeError,
    }


def test_a_bug_keeps_its_text_to_the_log():
    response = error_response(KeyError("a secret"))
    assert response.status_code == 500
    assert b"secret" not in response.body
    assert "x-request-id" not in response.headers


def test_headers_tell_clients_what_to_do():
    assert error_response(errors.Overloaded("m", retry_after_s=7)).headers["retry-after"] == "7"
    assert error_response(errors.NoEngine("m")).headers["retry-after"] == "1"
    for error in (errors.NoEngine("m"), errors.EngineFailed("m"), EngineRejected("m", status=500)):
        assert "x-should-retry" not in error_response(error).headers, "it is the flow that knows"
    assert error_response(errors.Unauthorized("m")).headers["www-authenticate"] == "Bearer"


def test_an_engines_error_passes_whole():
    advice = {"retry-after": "3", "x-should-retry": "true"}
    error = EngineRejected("m", status=429, type="rate_limit_error", code="busy", headers=advice)
    response = error_response(error)
    body = json.loads(response.body)["error"]
    assert (body["type"], body["code"]) == ("rate_limit_error", "busy")
    assert advice.items() <= dict(response.headers).items()


async def test_starlettes_handlers_give_the_same_shape():
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/x",
        "headers": [(b"x-request-id", b"r2")],
        "query_string": b"",
    }
    request = Request(scope)
    assert (await handle(request, errors.Forbidden("m"))).headers["x-request-id"] == "r2"
    for status, code in [(404, "not_found"), (405, "method_not_allowed")]:
        response = await handle_http(request, HTTPException(status, headers={"allow": "POST"}))
        error = json.loads(response.body)["error"]
        assert (response.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
        assert "GET /x" in error["message"]
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "named"), [("/chat/completions", True), ("/models", True), ("/admin/v1/nothing", False)]
)
async def test_a_base_url_without_v1_is_told_what_it_should_be(path, named):
    headers = [(b"host", b"proxy:8000")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    response = await handle_http(Request(scope), HTTPException(404))
    message = json.loads(response.body)["error"]["message"]
    assert message.endswith(" set base_url to http://proxy:8000/v1") is named
    assert message.endswith("; /admin/v1/openapi.json lists the routes of the admin API") is not named
