"""A client's request on its way to an engine."""

from __future__ import annotations

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineSpecError
from engine_adapter.http.headers import Headers
from engine_adapter.http.prepare import base_url, parts_of, prepare_request
from engine_adapter.types import EngineSpec
from engine_adapter.upload import Upload


def spec(url="http://127.0.0.1:8000", **fields):
    return EngineSpec(kind="openai_compatible", url=url, id="e", **fields)


def prepared(headers, **fields):
    """A request with that body of a client's."""
    body = JsonBody(b'{"a" : 1}')
    return prepare_request(spec(**fields), "POST", "/v1/chat/completions", headers, body)


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"],
)
def test_addresses_with_and_without_v1(url):
    assert base_url(spec(url)) == "http://h:1"
    request = prepare_request(spec(url), "GET", "/v1/models", {}, JsonBody(b"{}"))
    assert request.url == "http://h:1/v1/models"


def test_an_address_below_a_path():
    assert base_url(spec("https://h/engines/a/v1")) == "https://h/engines/a"


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h?x=1", "http://h/#x", "http://h:port"]
)
def test_bad_addresses_are_named(url):
    with pytest.raises(EngineSpecError, match="engine 'e'"):
        base_url(spec(url))


def test_the_body_goes_on_byte_for_byte():
    assert prepared({}).body == b'{"a" : 1}'


async def test_an_unread_body_is_passed_through():
    async def parts():
        yield b"x"

    body = parts()
    request = prepare_request(spec(), "POST", "/v1/audio", {"content-length": "9"}, Upload(body))
    assert request.body is body
    assert b"content-length" not in dict(request.headers)
    request = prepare_request(spec(), "POST", "/v1/audio", {"content-length": "9"}, Upload(body, 1))
    assert dict(request.headers)[b"content-length"] == b"1"
    await body.aclose()


def test_headers_that_end_at_a_proxy():
    request = prepared(
        {
            "Host": "proxy",
            "Content-Length": "5",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "Keep-Alive": "timeout=5",
            "Transfer-Encoding": "chunked",
            "TE": "trailers",
            "Upgrade": "h2c",
            "Proxy-Authorization": "Basic x",
            "Accept-Encoding": "gzip, br",
            "Authorization": "Bearer clients-own",
            "X-Kvpin-Session": "s",
            "x-request-id": "r1",
            "traceparent": "00-1",
            "Content-Type": "application/json",
        }
    )
    assert request.headers == [
        (b"authorization", b"Bearer clients-own"),
        (b"x-request-id", b"r1"),
        (b"traceparent", b"00-1"),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
    ]


def test_the_engines_own_key_takes_the_place_of_the_clients():
    client = {"Authorization": "Bearer clients-own", "X-Api-Key": "clients-own"}
    request = prepared(client, api_key="engines-own")
    assert request.headers == [
        (b"accept-encoding", b"identity"),
        (b"authorization", b"Bearer engines-own"),
    ]


def test_headers_that_come_twice_go_twice():
    request = prepared(
        Headers([(b"via", b"1.1 a"), (b"via", b"1.1 b"), (b"connection", b"x-hop"), (b"x-hop", b"1")])
    )
    assert request.headers[:2] == [(b"via", b"1.1 a"), (b"via", b"1.1 b")]
    assert b"x-hop" not in dict(request.headers)


def test_an_address_must_not_hold_a_password():
    with pytest.raises(EngineSpecError, match="use api_key or headers") as caught:
        base_url(spec(url="http://user:secret@h:1"))
    assert "secret" not in str(caught.value)


def test_the_engines_own_headers_take_the_place_of_the_clients():
    headers = {"X-Team": "kvpins", "authorization": "Basic kvpins"}
    clients = {"x-team": "clients", "Authorization": "Bearer clients"}
    request = prepare_request(spec(headers=headers), "GET", "/v1/models", clients, None)
    assert request.headers == [
        (b"accept-encoding", b"identity"),
        (b"x-team", b"kvpins"),
        (b"authorization", b"Basic kvpins"),
    ]
    assert "kvpins" not in repr(request) + repr(spec(headers=headers))


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Length": "hush"}, "kvpin sets 'Content-Length' itself: leave it out"),
        ({"a b": "hush"}, "'a b' is not a header name"),
        ({"a": "hush\r\nb: c"}, "'a' has a value that is not printable ASCII"),
        ({"a": ""}, "'a' has a value that is not printable ASCII"),
    ],
)
def test_wrong_headers_are_named_without_their_values(headers, message):
    with pytest.raises(EngineSpecError, match=message) as caught:
        parts_of(spec(headers=headers))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("key", ["hush\n", "hüsh", " hush", "hu\0sh"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key):
    with pytest.raises(EngineSpecError, match="api_key is not printable ASCII") as caught:
        parts_of(spec(api_key=key))
    assert key.strip() not in str(caught.value)


def test_an_adapters_own_header_takes_the_place_of_the_clients():
    clients = {"X-Data-Parallel-Rank": "5", "x-other": "1"}
    own = [(b"x-data-parallel-rank", b"0")]
    assert prepare_request(spec(), "GET", "/", clients, None, own).headers == [
        (b"x-other", b"1"), (b"accept-encoding", b"identity"), *own
    ]  # fmt: skip
    assert (b"x-data-parallel-rank", b"5") in prepare_request(spec(), "GET", "/", clients, None).headers
