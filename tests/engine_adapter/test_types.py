from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.types import common_prefix


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_prefix_is_the_naive_one(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(array("i", a), array("i", b)) == expected
