"""The answer to each kind of error."""

from __future__ import annotations

import json

import pytest

from engine_adapter.errors import ChatError, EngineUnavailable, PromptTableError
from engine_adapter.torch_engine.requests import PinLimitReached, RequestFailed, RequestRefused
from engine_adapter.torch_engine.web import ApiError, as_api_error, error_response


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ChatError, "invalid_messages"),
        (PromptTableError, "invalid_embeddings"),
        (RequestRefused, "invalid_value"),
        (ApiError, "invalid_value"),
    ],
)
def test_what_the_client_did_is_a_400_with_its_field_and_a_code(kind, code):
    error = as_api_error(kind("why", param="messages[2]"))
    assert (error.status, error.param, str(error)) == (400, "messages[2]", "why")
    assert json.loads(error_response(error).body)["error"]["code"] == code


def test_an_engine_that_is_gone_is_a_503():
    response = error_response(as_api_error(EngineUnavailable("gone")))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert json.loads(response.body) == {
        "error": {
            "message": "gone",
            "type": "service_unavailable_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }


def test_a_request_that_failed_is_a_500_not_to_be_retried():
    response = error_response(as_api_error(RequestFailed("the engine failed on this request: x")))
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    error = json.loads(response.body)["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_failed")


def test_a_pin_beyond_the_limit_is_a_409():
    error = as_api_error(PinLimitReached("too many"))
    assert (error.status, error.code) == (409, "pin_limit_reached")


def test_an_api_error_is_itself():
    error = ApiError("x", status=409, code="c")
    assert as_api_error(error) is error
    assert json.loads(error_response(error).body)["error"]["type"] == "conflict_error"


def test_a_fault_of_ours_is_no_answer():
    assert as_api_error(ZeroDivisionError()) is None


def test_a_body_that_was_not_read_closes_the_connection():
    assert error_response(ApiError("x", status=413)).headers["connection"] == "close"
    assert "connection" not in error_response(ApiError("x")).headers
