import msgspec
import pytest

from engine_adapter import Headers, JsonBody
from proxy.headers import SESSION_HEADERS
from proxy.request.calls import FIELDS, MAX_NAME, Session, session_of

NONE = Headers([])


def sent(headers):
    return Headers.of(headers.items())


def body(**fields):
    return JsonBody(msgspec.json.encode(fields))


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_headers_that_name_it(header):
    assert session_of(None, sent({"accept": "*/*", header: "s1"}), None) == Session(None, "s1")


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_name_it(field):
    assert session_of("alice", NONE, body(**{field: "s1"})) == Session("alice", "s1")


def test_the_name_that_tells_conversations_apart_best_counts():
    named = {field: field for field in FIELDS}
    assert session_of(None, sent({"x-session-id": "h"}), body(**named)).name == "h"
    assert session_of(None, NONE, body(**named)).name == "session_id"
    best, next_best, *_ = SESSION_HEADERS
    assert session_of(None, sent({next_best: "2", best: "1"}), None).name == "1"


def test_names_of_tenants_are_their_own():
    assert session_of("alice", NONE, body(session_id="s")) != session_of("bob", NONE, body(session_id="s"))


@pytest.mark.parametrize("name", ["", 7, None, ["s"], "x" * (MAX_NAME + 1)])
def test_what_is_no_name_is_passed_over(name):
    assert session_of(None, NONE, body(session_id=name)) is None
    assert session_of(None, NONE, body(session_id=name, prompt_cache_key="k")).name == "k"


def test_fields_are_not_read_where_a_header_tells():
    class Unread(JsonBody):
        def get(self, name):
            raise AssertionError(f"{name} was read")

    assert session_of(None, sent({SESSION_HEADERS[-1]: "h"}), Unread(b"{}")).name == "h"


def test_what_many_share_or_one_request_has_alone_is_none():
    headers = sent({"x-correlation-id": "c", "x-request-id": "r"})
    assert session_of(None, headers, body(user="everybody")) is None


def test_a_digest_tells_conversations_and_tenants_apart():
    sessions = [
        Session(None, "ab"),
        Session("a", "b"),
        Session("ab", ""),
        Session("", "ab"),
        Session("b", "b"),
    ]
    assert len({session.digest for session in sessions}) == 5
    assert Session("a", "b").digest == Session("a", "b").digest < 2**64
