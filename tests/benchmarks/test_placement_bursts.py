"""Bursts of one new prefix, simulated: kvpin's placement beside one by load alone."""

from argparse import Namespace

import pytest


@pytest.mark.parametrize("before", ["idle", "cold", "busy"])
@pytest.mark.parametrize(("burst", "prefix", "engines"), [(8, 8000, 5), (64, 1000, 5), (64, 8000, 16)])
@pytest.mark.parametrize("gap_ms", [1.0, 4.0])
def test_a_burst_is_answered_as_soon_as_by_load_alone(script, before, burst, prefix, engines, gap_ms):
    args = Namespace(cold=before == "cold", busy=before == "busy", gap_ms=gap_ms, model="fifo")
    ours, by_load = (script.simulated(way, burst, prefix, engines, 1, args) for way in script.SIMULATED)
    assert ours.mean_s <= 1.03 * by_load.mean_s
    assert ours.p99_s <= 1.05 * by_load.p99_s
    assert ours.used >= min(burst, engines) - 1
