import json

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from engine_adapter import EngineRejected
from proxy import errors
from proxy.api.own_answers import error_response, handle, handle_http


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


def request_of(path, *headers, method="GET"):
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    return Request(scope)


async def test_starlettes_handlers_give_the_same_shape():
    request = request_of("/x", (b"x-request-id", b"r2"))
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
    request = request_of(path, (b"host", b"proxy:8000"), method="POST")
    response = await handle_http(request, HTTPException(404))
    message = json.loads(response.body)["error"]["message"]
    assert message.endswith(" set base_url to http://proxy:8000/v1") is named
    assert message.endswith("; /admin/v1/openapi.json lists the routes of the admin API") is not named
