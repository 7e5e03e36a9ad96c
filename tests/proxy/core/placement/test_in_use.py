from itertools import chain as joined

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement import demand as module
from proxy.core.placement.demand import MAX_LOOKED_AT, STRIDE, InUse, Residents

DOCUMENT = range(1000, 1000 + 2 * STRIDE)


@pytest.fixture
def in_use():
    return InUse(5 * STRIDE)


def test_while_all_fits_nobody_waits(in_use):
    in_use.add(range(3 * STRIDE))
    assert in_use.wait_s(DOCUMENT, 10.0) == 0.0
    in_use.add((5,))
    assert in_use.wait_s(DOCUMENT, 10.0) > 0
    assert in_use.wait_s(range(STRIDE), 10.0) == 0.0


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


def always(_idle_s):
    return 1.0


@pytest.fixture
def held():
    """The last blocks that the engine still holds."""
    return {15, 25, 35}


@pytest.fixture
def residents(held):
    residents = Residents(held.__contains__)
    for at, first in enumerate((11, 21, 31)):
        residents.use(10.0 * at, range(first, first + 5), 5)
    return residents


def test_the_least_recently_used_go_first(residents):
    returns = {10.0: 0.1, 20.0: 0.01, 0.0: 1.0}.__getitem__
    assert residents.lost(20.0, 1, returns) == pytest.approx(0.01)
    assert residents.lost(20.0, 5, returns) == pytest.approx(0.05)
    assert residents.lost(20.0, 8, returns) == pytest.approx(0.05 + 0.3)
    assert residents.lost(20.0, 999, returns) == pytest.approx(0.05 + 0.5 + 5.0)


def test_the_oldest_are_those_that_evictions_take_first(residents, held):
    first, second, third = (0, 5, 15), (5, 5, 25), (10, 5, 35)
    found = [residents.oldest(blocks) for blocks in (0, 1, 5, 6, 999)]
    assert found == [[], [first], [first], [first, second], [first, second, third]]
    held.discard(15)
    assert residents.oldest(1) == [first, (0, 5, 25)]  # its end is gone, and its beginning may be next


def test_a_prompt_that_goes_on_from_others_takes_them_along_to_the_end(residents, held):
    residents.use(30.0, (*range(11, 16), *range(41, 44)), 3)
    held.add(43)
    assert len(residents) == 3
    idle = []
    assert residents.lost(40.0, 999, lambda idle_s: idle.append(idle_s) or 1.0) == 5 + 5 + 8
    assert idle == [30.0, 20.0, 10.0]


def test_what_the_engine_no_longer_holds_is_forgotten(residents, held):
    held.discard(15)
    assert residents.lost(20.0, 5, always) == 5.0
    assert len(residents) == 2
    held.clear()
    assert residents.lost(20.0, 5, always) == 0.0
    assert len(residents) == 0


def test_their_number_is_bounded(residents, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESIDENTS", 3)
    residents.use(30.0, range(51, 56), 5)
    assert len(residents) == 3
    assert residents.lost(30.0, 1, lambda idle_s: idle_s) == 20.0


def test_of_many_small_prompts_some_stand_for_all():
    residents = Residents(lambda _block: True)
    for block in range(10 * MAX_LOOKED_AT):
        residents.use(float(block), (block,), 1)
    looked_at = []
    lost = residents.lost(0.0, 3 * MAX_LOOKED_AT, lambda idle_s: looked_at.append(idle_s) or 0.5)
    assert (lost, len(looked_at)) == (1.5 * MAX_LOOKED_AT, MAX_LOOKED_AT)


def test_of_prompts_that_left_nothing_of_their_own_none_is_lost():
    residents = Residents(lambda _block: True)
    for block in range(2 * MAX_LOOKED_AT):
        residents.use(0.0, (block,), 0)
    assert residents.lost(0.0, 10, always) == 0.0


def test_a_prompt_is_never_more_than_its_blocks(residents):
    residents.use(30.0, range(11, 16), 4)  # brought back, of which nobody had told that it was gone
    assert residents.lost(40.0, 999, always) == 5.0 + 5.0 + 5.0
