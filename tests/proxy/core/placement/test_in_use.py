from itertools import chain as joined

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.in_use import STRIDE, InUse

DOCUMENT = range(1000, 1000 + 2 * STRIDE)


@pytest.fixture
def in_use():
    return InUse(5 * STRIDE)


def test_what_requests_share_counts_once(in_use):
    in_use.add(DOCUMENT)
    in_use.add((*DOCUMENT, 1, 2, 3))
    assert in_use.blocks == 2 * STRIDE + 3
    in_use.remove(DOCUMENT)
    assert in_use.blocks == 2 * STRIDE + 3
    in_use.remove((*DOCUMENT, 1, 2, 3))
    assert in_use.blocks == 0


def test_while_all_fits_nobody_waits(in_use):
    in_use.add(range(3 * STRIDE))
    assert in_use.wait_s(DOCUMENT, 10.0) == 0.0
    in_use.add((5,))
    assert in_use.wait_s(DOCUMENT, 10.0) > 0
    assert in_use.wait_s(range(STRIDE), 10.0) == 0.0


def test_what_is_in_use_already_needs_no_room(in_use):
    in_use.add(range(4 * STRIDE))
    assert in_use.wait_s(range(4 * STRIDE), 10.0) == 0.0
    assert in_use.wait_s((*range(4 * STRIDE), *DOCUMENT), 10.0) == pytest.approx(10.0 / 4)


def test_as_requests_end_one_after_the_other_there_is_room(in_use):
    in_use.add(range(4 * STRIDE))
    assert in_use.wait_s(DOCUMENT, 8.0) == pytest.approx(8.0 * 1 / 4)
    in_use.add(range(5000, 5000 + 4 * STRIDE))
    assert in_use.wait_s(DOCUMENT, 8.0) == pytest.approx(8.0 * 5 / 8)


def test_no_longer_than_an_answer_takes(in_use):
    in_use.add((1,))
    assert in_use.wait_s(range(9 * STRIDE), 8.0) == 8.0


def test_a_prompt_that_never_fits_waits_for_nobody(in_use):
    assert in_use.wait_s(range(9 * STRIDE), 8.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4 * STRIDE)), max_size=20), st.randoms())
def test_it_is_what_an_exact_count_says_within_a_stride_a_request(requests, random):
    in_use, prompts = InUse(1000), [range(10_000 * name, 10_000 * name + blocks) for name, blocks in requests]
    for prompt in prompts:
        in_use.add(prompt)
    exact = len(set(joined.from_iterable(prompts)))
    assert exact <= in_use.blocks <= exact + STRIDE * len(prompts)
    random.shuffle(prompts)
    for prompt in prompts:
        in_use.remove(prompt)
    assert in_use.blocks == 0
