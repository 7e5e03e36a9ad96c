import pytest

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
