"""What a JSON body may be."""

import msgspec
import pytest

from proxy.api.json_bodies import MAX_ENTRIES, parse
from proxy.errors import BadRequest


def body_of(name: str, entries: int) -> bytes:
    return msgspec.json.encode({"model": "m", name: [{"a": 1}] * entries})


@pytest.mark.parametrize("name", ["messages", "input", "tools"])
def test_a_list_that_makes_a_prompt_has_a_limit(name):
    assert len(parse(body_of(name, MAX_ENTRIES)).get(name)) == MAX_ENTRIES
    with pytest.raises(BadRequest, match=f"{name} has 16385 entries; the limit is 16384") as error:
        parse(body_of(name, MAX_ENTRIES + 1))
    assert (error.value.param, error.value.code) == (name, "array_above_max_length")


@pytest.mark.parametrize(
    ("name", "field"), [("messages", "content"), ("messages", "tool_calls"), ("input", "output")]
)
def test_so_has_a_list_in_one_of_its_entries(name, field):
    def entries(count):
        return msgspec.json.encode(
            {name: ["x", {"role": "user"}, {"role": "user", field: [{"a": 1}] * count}]}
        )

    assert len(parse(entries(MAX_ENTRIES)).get(name)[2][field]) == MAX_ENTRIES
    with pytest.raises(BadRequest, match="has 16385 entries; the limit is 16384") as error:
        parse(entries(MAX_ENTRIES + 1))
    assert (error.value.param, error.value.code) == (f"{name}[2].{field}", "array_above_max_length")


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
