"""Headers as bytes that read as text."""

from __future__ import annotations

from engine_adapter.http.transport import Headers

HEADERS = Headers([(b"accept", b"a"), (b"x-name", b"caf\xe9"), (b"accept", b"b")])


def test_they_read_as_text_whatever_the_case():
    assert (HEADERS["Accept"], HEADERS.get("X-NAME"), HEADERS.get("cookie")) == ("a", "café", None)
    assert "x-name" in HEADERS
    assert dict(HEADERS) == {"accept": "a", "x-name": "café"}
    assert len(HEADERS) == 2


def test_text_becomes_the_same_bytes():
    assert Headers.of([("Accept", "a"), ("X-Name", "café"), ("accept", "b")]).raw == HEADERS.raw


def test_values_are_never_printed():
    assert repr(Headers([(b"authorization", b"Bearer secret")])) == "Headers(['authorization'])"
