"""The shape of JSON, compared with what a decoder finds."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import off_loop
from engine_adapter.off_loop import JsonSize, is_deeper, shape_of

ANY = JsonSize(1 << 60, 1 << 60, 1 << 60)
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('a"\\,:[]{} é'), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('a"\\,:[{'), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def counted(value):
    """Commas, and fields with lists and objects, of a value."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    own = 1 + (len(value) if isinstance(value, dict) else 0)
    return max(len(value) - 1, 0) + sum(a for a, _ in inner), own + sum(b for _, b in inner)


def depth(value):
    if not isinstance(value, (list, dict)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(value=JSON, piece=st.integers(1, 40))
def test_it_counts_what_a_decoder_finds(value, piece):
    raw = msgspec.json.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(off_loop, "_PIECE", piece)
        found = shape_of(raw, ANY)
    assert found[:2] == counted(value)


@given(value=JSON, levels=st.integers(0, 6))
def test_depth_is_that_of_the_value(value, levels):
    assert is_deeper(msgspec.json.encode(value), levels) == (depth(value) > levels)


def test_base64_is_no_text():
    image = b"A" * (1 << 20)
    found = shape_of(b'{"a": [{"url": "data:image/png;base64,' + image + b'"}, "' + image + b'"]}', ANY)
    assert found.text < 5 * (16 << 10)


@pytest.mark.parametrize("piece", [b"two words ", b"\\n", "é".encode(), b'a", "b'])
def test_all_else_is_text(piece):
    raw = b'["' + piece * (200_000 // len(piece)) + b'"]'
    assert shape_of(raw, ANY).text >= len(raw)


@pytest.mark.parametrize(
    ("raw", "what"),
    [(b"[[],[]," * 99_999, "fields"), (b'{"a":0,' * 99_999, "fields"), (b'["","",' * 99_999, "values")],
)
def test_it_reads_no_further_than_a_limit(raw, what):
    found = shape_of(raw, JsonSize(5000, 5000, 1 << 60))
    assert found.above(JsonSize(5000, 5000, 1 << 60)) == what
    assert found.text < 100_000


def test_what_is_no_json_has_the_shape_up_to_the_fault():
    assert shape_of(b'{"a": 1, \\"b": [', ANY).fields >= 2
