"""What a JSON body may be."""

import msgspec
import pytest

from engine_adapter.off_loop import JsonSize
from proxy.errors import BadRequest, BodyTooLarge
from proxy.request.bodies import MAX_ENTRIES, parse


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("messages", "messages"), ("input", "input"), ("tools", "tools")),
        *(("messages", "messages[1].content"), ("messages", "messages[1].tool_calls")),
        ("input", "input[1].output"),
    ],
)
def test_a_list_that_makes_a_prompt_has_a_limit(name, place):
    """Also one in an entry of such a list."""

    def body(entries):
        made, field = [{"a": 1}] * entries, place.rpartition("].")[2]
        made = made if place == name else ["x", {"role": "user", field: made}]
        return parse(msgspec.json.encode({name: made}))

    assert body(MAX_ENTRIES).get(name)
    with pytest.raises(BadRequest, match="has 16385 entries; the limit is 16384") as error:
        body(MAX_ENTRIES + 1)
    assert (error.value.param, error.value.code) == (place, "array_above_max_length")


def test_what_cannot_be_decoded_within_an_entry_is_told_later():
    raw = b'{"messages": [{"\xff": 1}], "tools": [' + b"{}," * MAX_ENTRIES + b"{}]}"
    with pytest.raises(BadRequest, match="tools has"):
        parse(raw)


def test_braces_in_a_text_are_none():
    text = "{" * 2 * MAX_ENTRIES
    assert parse(msgspec.json.encode({"messages": [{"content": text}]})).get("messages")[0]["content"] == text


@pytest.mark.parametrize("raw", [b"[]", b'"x"', b"5"])
def test_what_is_no_object(raw):
    with pytest.raises(BadRequest, match="the body must be a JSON object"):
        parse(raw)


def tiny(count: int) -> bytes:
    return b"{" + b",".join(b'"%x":0' % i for i in range(count)) + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        tiny(131_073),
        b'{"metadata":' + tiny(131_073) + b"}",
        b'{"x":[' + b"[]," * 131_073 + b"0]}",
        b'{"x":[' + b"{}," * 131_073 + b"0]}",
    ],
)
def test_a_body_has_so_many_fields_at_most(raw):
    with pytest.raises(BadRequest, match="more than 131072 fields, lists and objects") as error:
        parse(raw)
    assert error.value.code == "body_too_complex"


def test_a_body_has_so_many_values_at_most():
    with pytest.raises(BadRequest, match=r"more than 1200000 values; `limits\.json_values` is"):
        parse(b'{"prompt":[' + b'"",' * 1_200_001 + b'""]}')


def test_what_is_no_json_at_its_end_is_refused_by_its_shape():
    """Nothing of it was decoded."""
    with pytest.raises(BadRequest, match="fields, lists and objects"):
        parse(tiny(131_073)[:-1])


def test_a_prompt_of_a_million_token_ids_is_read():
    raw = b'{"model":"m","prompt":[' + b"123456," * 1_048_575 + b"1]}"
    assert len(parse(raw).get("prompt")) == 1_048_576


def test_many_tools_with_large_schemas_are_read():
    properties = {f"p{i}": {"type": "string", "enum": ["a"]} for i in range(150)}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}] * 128
    assert len(parse(msgspec.json.encode({"tools": tools})).get("tools")) == 128


def test_images_have_the_limit_of_the_whole_body():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (6 << 20)}}
    raw = msgspec.json.encode({"messages": [{"role": "user", "content": [image] * 10}]})
    assert len(raw) > 60 << 20
    assert len(parse(raw).get("messages")[0]["content"]) == 10


def test_text_has_a_limit_of_its_own():
    raw = msgspec.json.encode({"prompt": "two words " * 100_000})
    with pytest.raises(BodyTooLarge, match="more than 500000 bytes that are not base64"):
        parse(raw, JsonSize(text=500_000))
    assert parse(raw, JsonSize(text=2_000_000)).get("prompt")


@pytest.mark.parametrize("name", ["chat_template_kwargs", "metadata", "mm_processor_kwargs"])
def test_fields_of_the_clients_own_have_limits(name):
    assert parse(msgspec.json.encode({name: {"a": "b" * 1_000_000}})).get(name)
    with pytest.raises(BadRequest, match=f"{name} has 1048585 bytes; the limit is 1048576") as error:
        parse(msgspec.json.encode({name: {"a": "b" * (1 << 20) + "c"}}))
    assert (error.value.param, error.value.code) == (name, "body_too_complex")
    assert parse(b'{"%s":%s}' % (name.encode(), b"[" * 32 + b"]" * 32)).get(name)
    with pytest.raises(BadRequest, match=f"{name} is nested more than 32 deep"):
        parse(b'{"%s":%s}' % (name.encode(), b"[" * 33 + b"]" * 33))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","MODEL":"secret"}', b'{"Temperature":1,"temperature":2}',
        b'{"model":"m","m\\u004fdel":"secret"}', '{"stop":1,"\u017ftop":2}'.encode(),
    ],
)  # fmt: skip
def test_names_that_differ_only_in_case_are_refused(raw):
    """Servers written in Go take both for one field, and the last counts."""
    with pytest.raises(BadRequest, match="differ only in case") as error:
        parse(raw)
    assert error.value.code == "invalid_json"


@pytest.mark.parametrize("name", ["MODEL", "Cache_Salt", "LoRA", "kv_Transfer_params", "RID"])
def test_a_field_that_kvpin_checks_has_one_spelling(name):
    with pytest.raises(BadRequest, match=f"the field '{name}' must be written '{name.lower()}'"):
        parse(b'{"%b":"x"}' % name.encode())


def test_other_fields_may_be_spelled_as_clients_like():
    assert set(parse(b'{"model":"m","topK":1,"Top_P":2}').names) == {"model", "topK", "Top_P"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_utf_16_is_told_so(encoding):
    with pytest.raises(BadRequest, match="UTF-16 or UTF-32: send it as UTF-8"):
        parse('{"model": "m"}'.encode(encoding))
