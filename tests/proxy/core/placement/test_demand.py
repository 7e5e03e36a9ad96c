from itertools import chain as joined
from math import e

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.blocks import Chain
from proxy.core.placement import demand as module
from proxy.core.placement.demand import (
    HALF_LIFE,
    MAX_LOOKED_AT,
    MAX_TURNS,
    MIN_UTILISATION,
    PRIOR,
    RATE_S,
    REFRESH,
    STRIDE,
    WINDOW_S,
    Demand,
    InUse,
    Rate,
    Recent,
    Residents,
)


def test_a_rate_is_that_of_the_last_seconds():
    rate = Rate()
    assert rate.is_young(0.0)
    assert rate.per_s(1000.0) == 0.0
    for at in range(100_000):
        rate.add(at / 100, 0.02)
    assert not rate.is_young(1000.0)
    assert rate.per_s(1000.0) == pytest.approx(2.0, rel=1e-3)
    assert rate.per_s(1000.0 + RATE_S) == pytest.approx(2 / e, rel=1e-3)


def test_an_amount_that_came_evenly_is_that_of_many_moments():
    seldom, often = Rate(), Rate()
    seldom.add_evenly(0.0, 1e6)
    assert seldom.per_s(0.0) == 0.0, "nobody knows since when they came"
    for at in range(1, 1001):
        often.add_evenly(at / 10, 0.3)
        if at in (7, 1000):
            seldom.add_evenly(at / 10, 0.3 * (at - 7 or 7))
        assert often.per_s(at / 10) <= 3 + 1e-9
    assert seldom.per_s(100.0) == pytest.approx(3, rel=0.01)
    seldom.add_evenly(100.0, 10.0)
    assert seldom.per_s(100.0) == pytest.approx(4, rel=0.01), "at the same moment"


def test_means_are_of_what_has_not_faded():
    recent = Recent()
    assert (recent.mean, recent.rest) == (0.0, 0.0)
    for amount in (2.0, 4.0):
        recent.add(0.0, amount)
    assert (recent.mean, recent.rest) == pytest.approx((3.0, (4 + 16) / 12))
    recent.add(WINDOW_S, 1.0)
    assert recent.mean == pytest.approx((6 / e + 1) / (2 / e + 1))
    assert recent.rest == pytest.approx((20 / e + 1) / (12 / e + 2))


@pytest.fixture
def demand():
    return Demand()


def prompt(name, blocks=100):
    """Blocks of its own: of two prompts of one name, the longer goes on from the shorter."""
    return Chain(tuple(1000 * name + at for at in range(blocks)), 16 * blocks + 5, 16)


def ask(demand, now, name, blocks=100, computed=100):
    demand.asked(now, prompt(name, blocks), 16 * computed)


class TestReturns:
    def test_how_often_one_is_asked_for_follows(self, demand):
        assert demand.turns == pytest.approx(1 / (1 - PRIOR))
        for turn in range(50 * REFRESH):
            ask(demand, float(turn), 1, blocks=100 + turn, computed=1)
        assert demand.turns == MAX_TURNS

    def test_the_ages_at_which_prompts_come_back_are_learned(self, demand):
        for name in range(REFRESH // 2):
            ask(demand, 100.0 * name, name)
            ask(demand, 100.0 * name + 10.0, name, blocks=101, computed=1)
        # 8 prompts of 100 blocks came back after 10 s; 8 of 101 have not yet. A hundred more are the prior.
        assert demand.returns(5.0) == pytest.approx((800 + 30) / (1608 + 100))
        assert demand.returns(20.0) == pytest.approx(30 / (1608 - 800 + 100))

    def test_a_prompt_that_comes_back_again_and_again_is_one_prompt(self, demand):
        for turn in range(REFRESH):
            ask(demand, 10.0 * turn, 1, blocks=100 + turn, computed=1 if turn else 100)
        made = sum(100 + turn for turn in range(REFRESH))
        back = made - (100 + REFRESH - 1)
        assert demand.returns(5.0) == pytest.approx((back + 30) / (made + 100))
        assert len(demand._asked) == 1

    def test_what_was_learned_fades(self, demand):
        name, now = 0, 0.0
        for comes_back in (True, False):
            for _ in range(2 * HALF_LIFE):
                name, now = name + 1, now + 1.0
                ask(demand, now, name, 10, 10)
                if comes_back:
                    ask(demand, now + 1.0, name, 11, 1)
            if comes_back:
                assert demand.returns(0.5) == pytest.approx(10 / 21, rel=0.01)
        # Half of what was learned before counted half with every HALF_LIFE prompts since.
        assert 0.05 < demand.returns(0.5) < 0.15

    def test_prompts_are_waited_for_within_bounds(self, demand, monkeypatch):
        monkeypatch.setattr(module, "MAX_PROMPTS", 3)
        for name in range(5):
            ask(demand, float(name), name)
        assert list(demand._asked) == [1000 * name + 99 for name in (2, 3, 4)]

    @given(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.floats(0, 500)), max_size=200), st.data()
    )
    def test_who_is_idle_for_longer_is_never_likelier_to_come_back(self, asked, data):
        demand, now = Demand(), 0.0
        for name, blocks, passed in asked:
            now += passed
            ask(demand, now, name, blocks, blocks // 2)
        less, more = sorted((data.draw(st.floats(0, 1e7)), data.draw(st.floats(0, 1e7))))
        assert 0 <= demand.returns(more) <= demand.returns(less) <= 1


class TestUtilisation:
    def test_counts_what_was_placed_in_the_last_seconds(self, demand):
        assert demand.utilisation(50.0, 1) == MIN_UTILISATION
        for second in range(600):
            demand.placed(float(second), 0.8)
        busy = demand.utilisation(599.0, 1)
        assert busy == pytest.approx(0.8, rel=0.06)
        assert demand.utilisation(599.0, 2) == pytest.approx(busy / 2)
        assert demand.utilisation(599.0 + RATE_S, 1) == pytest.approx(busy / 2.718, rel=0.01)
        assert demand.utilisation(9999.0, 1) == MIN_UTILISATION

    def test_of_a_young_pool_is_that_since_its_first_prompt(self, demand):
        for tenth in range(21):
            demand.placed(7 + tenth / 10, 0.05)
        assert demand.utilisation(9.0, 1) == pytest.approx(0.5, rel=0.1)


def test_work_that_is_found_under_way_is_longer_than_most(demand):
    assert demand.prefills.rest == 0.0
    for _ in range(10):
        demand.prefills.add(0.0, 1.0)
    assert demand.prefills.rest == pytest.approx(0.5)
    demand.prefills.add(0.0, 90.0)
    assert demand.prefills.rest == pytest.approx((10 * 1.0 + 90.0**2) / (2 * 100))


def test_what_answers_take_is_that_of_the_last_while(demand):
    assert demand.answers.mean == 0.0
    demand.answers.add(0.0, 2.0)
    demand.answers.add(0.0, 4.0)
    assert demand.answers.mean == pytest.approx(3.0)
    demand.answers.add(12_000.0, 9.0)
    assert demand.answers.mean == pytest.approx(9.0)


# --- memory in use, and what is evicted ----------------------------------------------------------

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
    assert len(residents._prompts) == 3
    idle = []
    assert residents.lost(40.0, 999, lambda idle_s: idle.append(idle_s) or 1.0) == 5 + 5 + 8
    assert idle == [30.0, 20.0, 10.0]


def test_what_the_engine_no_longer_holds_is_forgotten(residents, held):
    held.discard(15)
    assert residents.lost(20.0, 5, always) == 5.0
    assert len(residents._prompts) == 2
    held.clear()
    assert residents.lost(20.0, 5, always) == 0.0
    assert len(residents._prompts) == 0


def test_their_number_is_bounded(residents, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESIDENTS", 3)
    residents.use(30.0, range(51, 56), 5)
    assert len(residents._prompts) == 3
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
