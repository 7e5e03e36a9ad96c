"""Which failures are retried. Over real sockets: tests/proxy/test_flow.py."""

import pytest

from engine_adapter import EngineRejected, EngineUnavailable, Headers, JsonBody
from engine_adapter.upload import Upload
from proxy.errors import EngineFailed
from proxy.request.calls import Call
from proxy.request.retries import final_error, may_retry, refusals_of

DOWN, DROPPED = EngineUnavailable("down"), EngineUnavailable("dropped", dropped=True)
FULL, NOT_HERE = EngineRejected("full", status=429), EngineRejected("no such file", status=404)


def call(path="/v1/chat/completions", body=None):
    return Call("r", "POST", path, Headers([]), body)


def test_a_404_is_about_the_request_unless_another_engine_may_have_the_route():
    assert 404 not in refusals_of(call(), 2)
    assert 404 in refusals_of(call("/v1/embeddings"), 2)
    assert 404 in refusals_of(call("/v1/files/f-1"), 2)
    assert 404 not in refusals_of(call("/v1/embeddings"), 1)
    assert all(429 in refusals_of(call(path), 2) for path in ("/v1/embeddings", "/v1/responses"))


@pytest.mark.parametrize(
    ("failures", "retries", "again"),
    [
        ([DOWN], 1, True),
        ([DOWN, FULL], 1, False),
        ([DOWN, FULL], 2, True),
        ([DROPPED], 5, True),
        ([DROPPED, DROPPED], 5, False),
        ([NOT_HERE, NOT_HERE, DOWN], 1, True),
        ([DOWN], 0, False),
    ],
)
def test_retries_count_failures_and_not_engines_that_lack_the_route(failures, retries, again):
    assert may_retry(call(body=JsonBody(b"{}")), failures, retries) is again
    assert may_retry(call(body=None), failures, retries) is again


def test_a_streamed_body_is_gone():
    async def chunks():
        yield b""

    assert not may_retry(call(body=Upload(chunks())), [DOWN], 5)


def test_the_last_failure_is_the_clients_error_and_stops_its_retries():
    alone, last = final_error([FULL]), final_error([DOWN, FULL])
    assert (alone.status, last.status) == (429, 429)
    assert "x-should-retry" not in alone.headers or last is alone
    assert last.headers["x-should-retry"] == "false"
    failed = final_error([FULL, DOWN])
    assert isinstance(failed, EngineFailed)
    assert str(failed) == "2 engine(s) failed this request; the last said: down"


def test_what_an_engine_says_of_retries_stands():
    busy = EngineRejected("busy", status=503, headers={"retry-after": "3"})
    assert final_error([DOWN, busy]).headers == {"retry-after": "3"}
