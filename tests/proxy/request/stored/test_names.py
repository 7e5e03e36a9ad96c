"""What a request names. Over real sockets: test_tenants.py."""

import pytest

from engine_adapter import Headers, JsonBody, Upload
from proxy.errors import Forbidden
from proxy.request.calls import Call
from proxy.request.stored import Kind, Name, check_form_field, may_name, name_in_path, names_items, names_of
from tests.fakes import CHAT

RESPONSES = "/v1/responses"


def call(path, raw=None, method="POST"):
    return Call("r", method, path, Headers([]), None if raw is None else JsonBody(raw))


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        ("/v1/responses/r1", Kind.RESPONSE, "r1"),
        ("/v1//responses/r%31/input_items?x=1", Kind.RESPONSE, "r1"),
        ("/v1/files/f1", Kind.FILE, "f1"),
        ("/v1/vector_stores/v1/files/f1/content/", Kind.VECTOR_STORE, "v1"),
        ("/v1/files/a;b", Kind.FILE, "a;b"),
    ],
)
def test_the_name_in_a_path(path, kind, name):
    assert name_in_path(path, isolated=True) == Name(kind, name)
    found = name_in_path(path, isolated=False)
    assert found == (Name(kind, name) if kind is Kind.RESPONSE else None)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses", "/v1/responses/", "/v1/responses/compact", "/v1/responses/input_tokens", CHAT),
        *("/v1/files?a=/x", "/v1/batches/b1", "/files/f1", "/v1", "/"),
    ],
)
def test_a_path_without_a_name(path):
    assert name_in_path(path, isolated=True) is name_in_path(path, isolated=False) is None


async def test_the_names_of_a_whole_request():
    body = b'{"file_id": "f1", "previous_response_id": "r1", "x": [{"conversation": {"id": "c1"}}]}'
    asked = call("/v1/vector_stores/v1/files?file_id=f2&x=1", body)
    assert may_name(asked, isolated=True)
    names = await names_of(asked, isolated=True)
    assert names[:2] == [Name(Kind.VECTOR_STORE, "v1"), Name(Kind.FILE, "f2", "file_id")]
    assert {*names[2:]} == {
        Name(Kind.FILE, "f1", "file_id"),
        Name(Kind.RESPONSE, "r1", "previous_response_id"),
        Name(Kind.CONVERSATION, "c1", "conversation"),
    }
    upload = Call("r", "POST", "/v1/uploads/u1/parts", Headers([]), Upload(None))
    assert await names_of(upload, isolated=True) == [Name(Kind.UPLOAD, "u1")]


@pytest.mark.parametrize(
    ("path", "raw", "names"),
    [
        (RESPONSES, b'{"previous_response_id": "r1", "file_id": "f1"}', ["r1"]),
        (RESPONSES, b'{"previous_response_id": ""}', []),
        (RESPONSES, b'{"previous_response_id": 7}', []),
        (f"{RESPONSES}/r2", None, ["r2"]),
    ],
)
async def test_with_one_tenant_only_responses_count(path, raw, names):
    asked = call(path, raw)
    assert may_name(asked, isolated=False)
    assert [name.id for name in await names_of(asked, isolated=False)] == names
    for other in (
        call(CHAT, b'{"previous_response_id": "r1", "file_id": "f1"}'),
        call("/v1/files/f1?file_id=x"),
    ):
        assert not may_name(other, isolated=False)


@pytest.mark.parametrize(
    ("raw", "may"),
    [
        (b'{"messages": [{"content": "a file_id"}], "prompt": "x", "voice" : "y"}', False),
        (b'{"messages": [{"content": "\\"file_id\\": \\u0060\\u4f60\\u003c"}]}', False),
        (b'{"prompt" \n: {"id": "x"}}', True),
        (b'{"container": "x"}', True),
        (b'{"\\u0066ile_id": "x"}', True),
        (b'{"file\\u005Fid": "x"}', True),
    ],
)
def test_a_body_that_names_nothing_is_told_at_a_glance(raw, may):
    assert may_name(call(CHAT, raw), isolated=True) is may


@pytest.mark.parametrize(
    ("raw", "items"),
    [
        (b'{"input": [{"id": "m1"}]}', True),
        (b'{"input": [{"type": "item_reference", "id": "m1", "role": "user"}]}', True),
        (b'{"items": [1, {"type": null, "id": "m1", "x": 1}]}', True),
        (b'{"input": [{"type": "message", "id": "m1"}, {"role": "user", "id": "m2"}, {"x": 1}]}', False),
        (b'{"input": "x", "items": {"id": "m1"}}', False),
    ],
)
def test_items_that_are_named_by_their_ids_alone(raw, items):
    assert names_items(JsonBody(raw)) is items


def test_fields_of_forms():
    for name in ("purpose", "id", "files[0][name]", "prompt", "metadata[id]", "my_file_id"):
        check_form_field(name)
    for name in ("file_id", "x[file_ids][]", "video.id", "audio[id]", "utf-8''file_id"):
        with pytest.raises(Forbidden, match="send JSON"):
            check_form_field(name)
