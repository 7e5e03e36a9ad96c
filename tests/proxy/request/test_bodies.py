"""Bodies of requests: what a JSON body may be, halves of characters, compressed ones."""

import errno
import gzip
import json
import time
import tracemalloc
import zlib
from random import Random

import msgspec
import pytest
import zstandard
from structlog.testing import capture_logs

from engine_adapter.off_loop import JsonSize
from proxy.errors import BadRequest, BodyTooLarge, NoMemory
from proxy.request.bodies import MAX_ENTRIES, parse, room_for, unpacked, whole_characters


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


FIELDS, VALUES = (
    "more than 131072 fields, lists and objects",
    "more than 1200000 values; `limits.json_values`",
)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (tiny(131_073), FIELDS),
        (tiny(131_073)[:-1], FIELDS),  # no JSON at its end: nothing of it was decoded
        (b'{"metadata":' + tiny(131_073) + b"}", FIELDS),
        (b'{"x":[' + b"[]," * 131_073 + b"0]}", FIELDS),
        (b'{"x":[' + b"{}," * 131_073 + b"0]}", FIELDS),
        (b'{"prompt":[' + b'"",' * 1_200_001 + b'""]}', VALUES),
    ],
)
def test_a_body_has_so_many_fields_and_values_at_most(raw, said):
    with pytest.raises(BadRequest, match=said) as error:
        parse(raw)
    assert error.value.code == "body_too_complex"


ENUMS = {f"p{i}": {"type": "string", "enum": ["a"]} for i in range(150)}
TOOL = {"function": {"name": "f", "parameters": {"type": "object", "properties": ENUMS}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (6 << 20)}}


@pytest.mark.parametrize(
    ("name", "value", "entries"),
    [
        ("prompt", [123456], 1_048_576),
        ("tools", [TOOL], 128),
        ("messages", [{"role": "user", "content": [IMAGE] * 10}], 1),
    ],
    ids=["token ids", "large schemas", "images"],
)
def test_what_is_usual_is_read(name, value, entries):
    """Images have the limit of the whole body."""
    assert len(parse(msgspec.json.encode({name: value * entries})).get(name)) == entries


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


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r'{"a": "x\ud83d"}', {"a": "x\ufffd"}),
        (r'{"a": "\udc00x"}', {"a": "\ufffdx"}),
        (r'{"\ud83d": "\uD83D\uDE00"}', {"\ufffd": "😀"}),
        (r'{"a": "\ud83d\ud83d\ude00\ude00"}', {"a": "\ufffd😀\ufffd"}),
        (r'{"a": "\ud83d\n\ude00"}', {"a": "\ufffd\n\ufffd"}),
        (r'{"a": "\ud83d\\ude00"}', {"a": "\ufffd\\ude00"}),
        (r'{"a": "\\ud83d", "b": "\\\ud83d"}', {"a": r"\ud83d", "b": "\\\ufffd"}),  # the first is just text
        (r'{"a": "\ud7ff\ue000\u00e9"}', {"a": "\ud7ff\ue000é"}),
    ],
)
def test_half_characters_are_replaced(sent, read):
    assert parse(sent.encode()).decoded() == read


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"q": "x\ud83d"}', r'{"q": "x\ufffd"}'),
        (r'{"q": "\ud83d\ude00 \ude00"}', r'{"q": "\ud83d\ude00 \ufffd"}'),
        (r'{"q": "\\ud83d \\\ud83d"}', r'{"q": "\\ud83d \\\ufffd"}'),
    ],
)
def test_so_are_those_in_arguments_of_tool_calls(arguments, read):
    message = {"tool_calls": [{"function": {"arguments": arguments}}], "content": arguments}
    body = parse(msgspec.json.encode({"messages": [message]}))
    (message,) = body.get("messages")
    assert message["tool_calls"][0]["function"]["arguments"] == read
    assert message["content"] == arguments  # a text about such escapes stays as it is


def test_a_body_without_half_characters_keeps_its_bytes():
    raw = rb'{"a": "\ud83d\ude00", "b": "\\ud83d", "messages": [{"arguments": "\"\\u00e9\" \\ud83d\\ude00"}]}'
    assert parse(raw).raw is raw


def test_halves_are_found_as_python_finds_them():
    random = Random(7)  # noqa: S311 - a test
    pieces = ["\\", "\\\\", "\\ud83d", "\\ude00", "\\u00e9", "\\n", '\\"', "x", "é", "😀", "ud83d"]
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(1, 9)))
        raw = f'{{"a":"{text}"}}'
        try:
            value = json.loads(raw)["a"]
        except ValueError:
            continue
        got = parse(raw.encode()).get("a")
        assert got == "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in value), (
            raw,
            got,
        )


@pytest.mark.parametrize(
    "text", [rb"\ud83d\ude00", rb"\\ud83d", rb"\ud83d", b"\\\\" * 3, rb'"arguments":"', rb"\u00e9"]
)
def test_long_hostile_texts_are_read_in_time(text):
    raw = b'{"arguments":"' + text * ((1 << 20) // len(text)) + b'"}'
    began = time.process_time()
    whole_characters(raw)
    assert time.process_time() - began < 5  # linear: a quadratic search takes minutes


TEXT = b'{"messages": "' + b"hello, world. " * 300_000 + b'"}'
PACK = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


def raw_deflate(data):
    writer = zlib.compressobj(wbits=-15)
    return writer.compress(data) + writer.flush()


async def plain(raw, encoding, *, limit=1 << 30, hold=lambda _size: None):
    return await unpacked(raw, encoding, limit, hold)


@pytest.mark.parametrize(
    ("encoding", "pack"), [*PACK.items(), ("deflate", raw_deflate)], ids=[*PACK, "deflate without a head"]
)
async def test_a_body_is_unpacked(encoding, pack):
    for text in (b"{}", TEXT):
        assert await plain(pack(text), encoding) == text


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_body_of_several_members_is_unpacked(encoding):
    packed = PACK[encoding]
    assert await plain(packed(b'{"a":') + packed(TEXT) + packed(b"}"), encoding) == b'{"a":' + TEXT + b"}"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_is_refused_before_it_is_unpacked(encoding):
    bomb = PACK[encoding](bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(BodyTooLarge, match="more than 1048576 bytes when it is unpacked"):
        await plain(bomb, encoding, limit=1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", [1, 3, 20, 100])
async def test_an_incomplete_body_is_told_so(encoding, cut):
    packed = PACK[encoding](TEXT)
    with pytest.raises(BadRequest, match="ends too early"):
        await plain(packed[:-cut], encoding)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_broken_body_is_told_so(encoding):
    for raw in (b"hello, world", b"\0" * 50, PACK[encoding](TEXT)[:200] + b"\xff" * 400, b"{}"):
        with pytest.raises(BadRequest, match=f"{encoding}"):
            await plain(raw, encoding)


async def test_memory_is_taken_as_it_is_unpacked():
    told, packed = [], gzip.compress(TEXT)
    await plain(packed, "gzip", hold=told.append)
    assert told == sorted(told)
    assert told[0] < 3 << 20
    assert told[-1] == len(packed) + len(TEXT)

    def refuse(size):
        if size > 2 << 20:
            raise NoMemory("no")

    with pytest.raises(NoMemory):
        await plain(packed, "gzip", hold=refuse)


def test_a_full_directory_is_told_to_client_and_operator():
    refused = pytest.raises(NoMemory, match="no room for the form in its temporary")
    with capture_logs() as lines, refused, room_for("the form"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [line["error"] for line in lines] == ["No space left on device"]


def test_other_errors_stay_what_they_are():
    with pytest.raises(ValueError, match="other"), room_for("the form"):
        raise ValueError("other")
