"""Requests that another kvpin answers: which headers go there, and which come back."""

from types import SimpleNamespace

from engine_adapter import Headers
from proxy.api.relay.pass_on import _kept, headers_of


def test_headers_of_one_connection_stay_there():
    sent = [
        (b"authorization", b"Bearer k"),
        (b"connection", b"keep-alive"),
        (b"content-length", b"3"),
        (b"content-type", b"application/json"),
        (b"host", b"x"),
        (b"x-request-id", b"r"),
    ]
    exchange = SimpleNamespace(headers=Headers(sent))
    assert [name for name, _ in headers_of(exchange)] == [b"authorization", b"content-type", b"x-request-id"]


def test_what_the_first_kvpin_writes_itself_does_not_come_back_twice():
    given = [(b"date", b"d"), (b"access-control-allow-origin", b"*"), (b"x-kvpin-engine", b"a")]
    assert _kept(given) == [(b"x-kvpin-engine", b"a")]
