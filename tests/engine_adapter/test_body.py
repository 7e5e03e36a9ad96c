import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import NamedModel, Upload
from engine_adapter.body import JsonBody, UnreadableField

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "gives"),
    [
        ("null", False), ('""', False), ("[]", False), ("[ \n]", False), ("0", True), ("false", True),
        ('"nullable"', True), ('" "', True), ("[null]", True), ("[[]]", True), ("{}", True),
    ],
)  # fmt: skip
def test_what_gives_a_value(value, gives):
    body = JsonBody(b'{"a" :  ' + value.encode() + b" }")
    assert body.gives("a") is gives
    assert not body.gives("b")


def test_replace_puts_a_field_in_its_place_and_keeps_the_bytes_of_others():
    raw = b'{"big": 12345678901234567890, "f" : 1.50, "s":"\\u0041\\/", "l":[ 1 , 2 ], "c": 3}'
    body = JsonBody(raw)
    changed = body.replace(f="x", c=None, d=None, model="m")
    assert changed.raw == b'{"big":12345678901234567890,"f":"x","s":"\\u0041\\/","l":[ 1 , 2 ],"model":"m"}'
    assert body.raw is raw
    assert "model" not in body


@pytest.mark.parametrize(
    "raw", [b'{"salt":"mine","x":1,"salt":"yours"}', b'{"salt":"a","s\\u0061lt":"b","x":1}']
)
def test_no_duplicate_key_smuggles_a_field_past_replace(raw):
    assert JsonBody(raw).replace(salt="ours").raw == b'{"salt":"ours","x":1}'
    assert JsonBody(raw).replace(salt=None).raw == b'{"x":1}'


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"1", b"null", b"{", b'{"a":}', b'{"a":1}x', b"{'a':1}", b'{"a":NaN}', b'{"\xff":1}',
        b'{"a":"\\ud800"}', b"\xef\xbb\xbf{}", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(msgspec.DecodeError):
        JsonBody(raw)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.dictionaries(st.text(), JSON, max_size=3))
def test_replace_does_what_a_dict_does(fields, changes):
    body = JsonBody(msgspec.json.encode(fields)).replace(**changes)
    expected = {
        name: value for name, value in {**fields, **changes}.items() if changes.get(name, 0) is not None
    }
    assert msgspec.json.decode(body.raw) == expected
    assert all(body.get(name) == value for name, value in expected.items())


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_decode_error(raw):
    try:
        body = JsonBody(raw)
    except msgspec.DecodeError:
        return
    assert body.raw == raw


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (b"[1, %s]" % (b"9" * 5000), "a[1]"),
        (b"1e999", "a"),
        (b'"\xff"', "a"),
    ],
    ids=["a long number in a list", "infinity", "no UTF-8"],
)
def test_a_value_that_cannot_be_read_is_named_and_as_a_hint_none(value, param):
    body = JsonBody(b'{"x": 7, "a": %s}' % value)
    with pytest.raises(UnreadableField, match="^" + re.escape(param) + " cannot be read: ") as caught:
        body.get("a")
    assert caught.value.param == param
    assert [body.hint(name) for name in ("a", "x", "none")] == [None, 7, None]


def test_scalars_are_decoded_once_and_what_callers_may_change_is_their_own():
    body = JsonBody(b'{"model": "m", "n": null, "messages": [1]}')
    assert body.get("model") is body.get("model")
    assert (body.get("n"), body.get("none")) == (None, None)
    body.get("messages").append(2)
    assert body.get("messages") == [1]


def test_a_view_is_decoded_once():
    body = JsonBody(b'{"messages": [1], "n": null}')
    assert body.view("messages") is body.view("messages")
    assert body.view("n") is None
    assert body.view("none") is None
    body.get("messages").append(2)
    assert body.view("messages") == [1]
    changed = body.replace(model="m")
    assert changed.view("messages") is body.view("messages")
    assert body.replace(messages=[3]).view("messages") == [3]


def test_a_forgotten_body_cannot_be_read():
    body = JsonBody(b'{"model": "m"}')
    changed = body.replace(model="n")
    body.forget()
    with pytest.raises(AttributeError):
        body.get("model")
    assert (changed.get("model"), changed.raw) == ("n", b'{"model":"n"}')


@pytest.mark.parametrize(
    ("value", "items"),
    [
        (b'[ "a", "\\u0062"]', [b'"a"', b'"\\u0062"']),
        (b"[[1, 2],[3]]", [b"[1, 2]", b"[3]"]),
        (b'[{"a":1}]', [b'{"a":1}']),
        (b"[1, 2]", None),
        (b"[]", None),
        (b'"[]"', None),
        (b"null", None),
    ],
)
def test_items_of_a_list_keep_their_bytes(value, items):
    found = JsonBody(b'{"prompt": %b}' % value).items("prompt")
    assert (found and [bytes(item) for item in found]) == items


@pytest.mark.parametrize(
    ("raw", "is_plain"),
    [
        (b'{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":0}', True),
        (b'{"messages":[{"content":"a","role":"system"},{"role":"assistant","content":""}]}', True),
        (b'{"messages":[{"role":"user","content":"hi"}],"cache_salt":"x"}', False),
        (b'{"messages":[{"role":"user","content":"hi"}],"n":2}', False),
        (b'{"messages":[{"role":"user","content":"hi","name":"x"}]}', False),
        (b'{"messages":[{"role":"user","role":"user"}]}', False),
        (b'{"messages":[{"role":"tool","content":"hi"}]}', False),
        (b'{"messages":[{"role":"assistant","content":null}]}', False),
        (b'{"messages":[{"role":"system","content":"x-anthropic-billing-header: cch=1;"}]}', False),
        (b'{"messages":[{"role":["user"],"content":"hi"}]}', False),
        (b'{"messages":[]}', False),
        (b'{"prompt":"hi"}', False),
    ],
)
def test_a_plain_chat_is_texts_that_somebody_says_and_asks_for_nothing_else(raw, is_plain):
    body = JsonBody(raw)
    assert (body.find_plain(), body.is_plain) == (is_plain, is_plain)
    assert body.replace(model="m").is_plain is is_plain
    assert body.replace(tools=[{}]).is_plain is False
    assert body.view("messages") == msgspec.json.decode(raw).get("messages")


async def chunks_of(body: bytes, cuts: list[int]):
    for start, end in pairwise([0, *sorted(cuts), len(body)]):
        yield body[start:end]


async def read(upload: Upload) -> bytes:
    return b"".join([chunk async for chunk in upload.chunks])


@pytest.fixture(scope="module")
def body() -> bytes:
    return b"before [model] after"


@given(st.lists(st.integers(0, 20)), st.text(max_size=12))
async def test_only_the_name_changes_however_the_body_arrives(body, cuts, name):
    upload = Upload(chunks_of(body, cuts), len(body), NamedModel("model", 8, 13)).renamed(name)
    assert await read(upload) == b"before [" + name.encode() + b"] after" == await sent(upload)


async def sent(upload: Upload) -> bytes:
    """A body of the announced length that holds the name where it says."""
    named = upload.named
    return (
        b"before ["
        + named.model.encode()
        + b"] after"
        + b"?" * (upload.length - 15 - named.end + named.start)
    )


async def test_a_second_name_replaces_the_first(body):
    upload = Upload(chunks_of(body, [9, 10]), None, NamedModel("model", 8, 13)).renamed("a").renamed("other")
    assert (upload.length, await read(upload)) == (None, b"before [other] after")


async def test_what_names_no_model_stays_as_it_is(body):
    upload = Upload(chunks_of(body, []), len(body))
    assert upload.renamed("m") is upload
