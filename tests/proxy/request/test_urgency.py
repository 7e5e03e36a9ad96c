import pytest

from engine_adapter import Headers, JsonBody
from proxy.errors import BadRequest
from proxy.request.calls import Call
from proxy.request.gate import MOST_ANSWER, USUAL_ANSWER, deadline_of, priority_of, tokens_of


def call(body=b"{}", **headers):
    given = Headers.of([(name.replace("_", "-"), value) for name, value in headers.items()])
    content = JsonBody(body) if isinstance(body, bytes) else body
    return Call("r", "POST", "/v1/chat/completions", given, content)


@pytest.mark.parametrize(
    ("body", "header", "priority"),
    [
        (b"{}", None, 0),
        (b'{"priority":3}', None, 3),
        (b'{"priority":-99}', None, -8),
        (b'{"priority":true,"service_tier":"flex"}', None, 1),
        (b'{"service_tier":"priority"}', None, -1),
        (b'{"service_tier":"default"}', None, 0),
        (b'{"service_tier":1,"priority":"x"}', None, 0),
        (b'{"priority":3}', "-2", -2),
        (None, None, 0),
    ],
)
def test_the_priority(body, header, priority):
    headers = {"x_kvpin_priority": header} if header is not None else {}
    assert priority_of(call(body, **headers)) == priority


@pytest.mark.parametrize("given", ["high", "", "1.5", "9", "-9", "99"])
def test_a_wrong_priority_is_refused(given):
    with pytest.raises(BadRequest, match="x-kvpin-priority must be a whole number from -8 to 8"):
        priority_of(call(x_kvpin_priority=given))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"x_stainless_timeout": "NOT_GIVEN"}, None),
        ({"x_stainless_timeout": "0"}, None),
        ({"x_stainless_timeout": "600"}, 600),
        ({"x_stainless_read_timeout": "5.5"}, 5.5),
        ({"x_request_timeout": "7", "x_stainless_timeout": "600"}, 7),
    ],
)
def test_how_long_the_client_waits(headers, seconds):
    assert deadline_of(call(**headers)) == seconds


@pytest.mark.parametrize(
    ("body", "known", "tokens"),
    [
        (b'{"max_tokens":10}', 100, 110),
        (b'{"max_completion_tokens":10,"max_tokens":20}', 100, 110),
        (b'{"max_tokens":100000}', 100, 100 + MOST_ANSWER),
        (b'{"max_tokens":"many"}', 100, 100 + USUAL_ANSWER),
        (b'{"prompt":"' + b"x" * 388 + b'"}', None, 100 + USUAL_ANSWER),
        (None, None, USUAL_ANSWER),
    ],
)
def test_the_tokens(body, known, tokens):
    assert tokens_of(call(body), known) == tokens
