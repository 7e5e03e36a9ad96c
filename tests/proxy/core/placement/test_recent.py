from math import e

import pytest

from proxy.core.placement.recent import WINDOW_S, Recent


def test_what_is_older_counts_less():
    recent = Recent()
    assert recent.sum(1000.0) == 0.0
    recent.add(1000.0, 3.0)
    recent.add(1000.0, 1.0)
    assert recent.sum(1000.0) == 4.0
    assert recent.sum(1000.0 + WINDOW_S) == pytest.approx(4 / e)
    recent.add(1000.0 + WINDOW_S, 1.0)
    assert recent.sum(1000.0 + WINDOW_S) == pytest.approx(4 / e + 1)


def test_what_happens_evenly_adds_up_to_a_window_of_it():
    recent = Recent()
    for at in range(100_000):
        recent.add(at / 100, 0.02)
    assert recent.sum(1000.0) == pytest.approx(2 * WINDOW_S, rel=1e-3)


def test_means_are_of_what_has_not_faded():
    recent = Recent()
    assert (recent.mean, recent.rest) == (0.0, 0.0)
    for amount in (2.0, 4.0):
        recent.add(0.0, amount)
    assert (recent.mean, recent.rest) == pytest.approx((3.0, (4 + 16) / 12))
    recent.add(WINDOW_S, 1.0)
    assert recent.mean == pytest.approx((6 / e + 1) / (2 / e + 1))
    assert recent.rest == pytest.approx((20 / e + 1) / (12 / e + 2))
