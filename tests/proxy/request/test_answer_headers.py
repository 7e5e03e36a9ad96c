import pytest

from engine_adapter import EngineSpec, Headers
from proxy.core.quotas import Left
from proxy.request.stages import passed_on, told_with_error, with_limits

SPEC = EngineSpec("vllm", "http://engine:8000", "e")


class Response:
    def __init__(self, status, *headers):
        self.status, self.headers = status, Headers(list(headers))


@pytest.mark.parametrize(
    "name",
    [
        *(b"connection", b"set-cookie", b"x-kvpin-engine", b"access-control-max-age"),
        *(b"clear-site-data", b"refresh", b"strict-transport-security", b"x-accel-redirect", b"alt-svc"),
        b"location",  # on an answer that is no redirection
    ],
)
def test_headers_that_end_here(name):
    kept = (b"x-engine", b"1")
    assert passed_on(Response(200, (name, b"x"), kept), SPEC) == [kept]


def test_what_an_engine_tells_with_an_error():
    given = Headers([(b"retry-after", b"3"), (b"x-ratelimit-reset", b"1"), (b"server", b"x")])
    assert told_with_error(Headers([(b"allow", b"POST")])) == {"allow": "POST"}
    assert told_with_error(given) == {"retry-after": "3", "x-ratelimit-reset": "1"}
    assert told_with_error(Headers([(b"retry-after", "ż".encode())])) == {}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0ms"), (0, "0ms"), (0.0171, "18ms"), (1, "1s"), (8.64, "8.64s"), (60, "1m0s"), (360.5, "6m0.5s")],
)
def test_limits_are_told_as_openai_tells_them_in_place_of_the_engines(seconds, told):
    engines = [(b"x-ratelimit-limit-requests", b"9"), (b"content-type", b"text/plain")]
    assert with_limits(engines, [Left("tokens", 600, 5, seconds)]) == [
        (b"content-type", b"text/plain"),
        (b"x-ratelimit-limit-tokens", b"600"),
        (b"x-ratelimit-remaining-tokens", b"5"),
        (b"x-ratelimit-reset-tokens", told.encode()),
    ]
