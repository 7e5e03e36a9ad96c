from math import e

import pytest

from proxy.core.placement.recent import RATE_S, WINDOW_S, YOUNG_S, Rate, Recent


def test_a_rate_is_that_of_the_last_seconds():
    rate = Rate()
    assert rate.is_young(0.0)
    assert rate.per_s(1000.0) == 0.0
    for at in range(100_000):
        rate.add(at / 100, 0.02)
    assert not rate.is_young(1000.0)
    assert rate.per_s(1000.0) == pytest.approx(2.0, rel=1e-3)
    assert rate.per_s(1000.0 + RATE_S) == pytest.approx(2 / e, rel=1e-3)


def test_a_young_rate_is_that_since_its_first_amount():
    rate = Rate()
    rate.add(1000.0, 3.0)
    assert rate.is_young(1009.0)
    assert rate.per_s(1000.0) == pytest.approx(3 / YOUNG_S, rel=0.1)
    rate.add(1004.0, 3.0)
    assert rate.per_s(1004.0) == pytest.approx(6 / 4, rel=0.1)


def test_a_rate_may_be_that_of_the_last_minutes():
    rate = Rate(WINDOW_S)
    for at in range(1000):
        rate.add(float(at), 2.0)
    assert rate.per_s(999.0 + RATE_S) == pytest.approx(2 * e ** (-RATE_S / WINDOW_S), rel=0.01)
    young = Rate(WINDOW_S)
    young.add(0.0, 3.0)
    assert young.is_young(WINDOW_S - 1)
    assert young.per_s(6.0) == pytest.approx(3 / 6, rel=0.1)


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
