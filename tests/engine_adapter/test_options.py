from datetime import datetime
from typing import Annotated

import msgspec
import pytest

from engine_adapter import plain_error
from engine_adapter.options import EngineOptions, OptionError, Size, read_options


class Options(EngineOptions, frozen=True):
    room: Size | None = None
    count: int = 1
    first: str | None = None
    second: str | None = None

    def __post_init__(self):
        if self.first is not None and self.second is not None:
            raise ValueError("first and second are given: give one of them")


def read(**values):
    return read_options("tiny", Options, values)


def test_text_stands_for_numbers_and_sizes():
    assert read(room="2KiB", count="3", first="x") == Options(room=Size(2048), count=3, first="x")
    assert [read(room=text).room for text in ("5", " .5 kB ", "1.5KiB")] == [5, 500, 1536]
    assert read(room=5).room == 5
    assert read() == Options()
    assert hash(read(room=5)) == hash(read(room=5))


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"rom": 1}, "rom", "tiny engines have no option 'rom'; did you mean 'room'?"),
        ({"zzz": 1}, "zzz", "tiny engines have no option 'zzz'; known: room, count, first, second"),
        ({"count": "x"}, "count", "count: must be a whole number"),
        ({"room": "lots"}, "room", "room: expected a number of bytes, or one with a unit such as 4GiB"),
        *(
            ({"room": text}, "room", "room: expected a number of bytes, or one with a unit such as 4GiB")
            for text in ("64.000.000", "1.5.2GiB", "1.GiB", "4GiB of room", "")
        ),
        ({"room": 0}, "room", "room: a size must be above 0"),
        ({"first": "a", "second": "b"}, None, "first and second are given: give one of them"),
    ],
)
def test_a_wrong_option_is_named(values, param, message):
    with pytest.raises(OptionError) as caught:
        read(**values)
    assert (str(caught.value), caught.value.param) == (message, param)


def test_a_kind_without_options_says_so():
    with pytest.raises(OptionError, match="openai_compatible engines have no option 'events'; known: none"):
        read_options("openai_compatible", EngineOptions, {"events": "tcp://h:1"})


@pytest.mark.parametrize(
    ("meta", "kind", "value", "said"),
    [
        ({}, int | None, "x", "must be a whole number - at `$.value`"),
        ({"gt": 0.0}, float, 0.0, "must be a number above 0 - at `$.value`"),
        ({"ge": 0.5}, float, 0.0, "must be a number of at least 0.5 - at `$.value`"),
        ({"max_length": 2}, str, "abc", "must be text with a length of at most 2 - at `$.value`"),
        ({}, list[str], 1, "must be a list - at `$.value`"),
        ({}, int | str, [], "must be a whole number or text - at `$.value`"),
    ],
)
def test_what_a_value_must_be(meta, kind, value, said):
    struct = msgspec.defstruct("Fields", [("value", Annotated[kind, msgspec.Meta(**meta)] if meta else kind)])
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"value": value}, struct)
    assert plain_error(str(caught.value)) == said


def test_a_text_that_is_cut_off():
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b'{"a": ')
    assert plain_error(str(caught.value)) == "it ends too early"


@pytest.mark.parametrize("text", ["tomorrow", "2027-01-31", "2027-01-31T00:00:00"])
def test_what_a_time_must_be(text):
    struct = msgspec.defstruct("Fields", [("end", Annotated[datetime, msgspec.Meta(tz=True)] | None)])
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"end": text}, struct)
    said = "must be a time with its zone, as 2027-01-31T00:00:00Z - at `$.end`"
    assert plain_error(str(caught.value)) == said


def test_other_messages_stay():
    assert plain_error("Object contains unknown field `x`") == "Object contains unknown field `x`"
