"""Which answers leave a request to another engine. Over real sockets: tests/proxy/test_flow.py."""

from engine_adapter import EngineRejected, EngineUnavailable, Headers
from proxy.errors import EngineFailed
from proxy.request.calls import Call
from proxy.request.retries import final_error, refusals_of

DOWN, FULL = EngineUnavailable("down"), EngineRejected("full", status=429)


def call(path="/v1/chat/completions", body=None):
    return Call("r", "POST", path, Headers([]), body)


def test_a_404_is_about_the_request_unless_another_engine_may_have_the_route():
    assert 404 not in refusals_of(call(), 2)
    assert 404 in refusals_of(call("/v1/embeddings"), 2)
    assert 404 in refusals_of(call("/v1/files/f-1"), 2)
    assert 404 not in refusals_of(call("/v1/embeddings"), 1)
    assert all(429 in refusals_of(call(path), 2) for path in ("/v1/embeddings", "/v1/responses"))


def test_the_last_failure_is_the_clients_error_and_stops_its_retries():
    alone, last = final_error([FULL]), final_error([DOWN, FULL])
    assert (alone.status, last.status) == (429, 429)
    assert "x-should-retry" not in alone.headers or last is alone
    assert last.headers["x-should-retry"] == "false"
    failed = final_error([FULL, DOWN])
    assert isinstance(failed, EngineFailed)
    assert str(failed) == "2 engines failed this request; the last said: down"
    assert str(final_error([DOWN])) == "1 engine failed this request; the last said: down"


def test_what_an_engine_says_of_retries_stands():
    busy = EngineRejected("busy", status=503, headers={"retry-after": "3"})
    assert final_error([DOWN, busy]).headers == {"retry-after": "3"}
