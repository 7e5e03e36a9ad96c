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
