"""The loop lag between two readings of kvpin's histogram."""


def test_loop_lag_is_of_what_was_counted_meanwhile(script):
    before = {0.001: 50, 0.01: 60, float("inf"): 60}
    after = {0.001: 148, 0.01: 159, float("inf"): 160}
    assert script._lag_p99(before, after) == 10
    assert script._lag_p99({}, before) == 10
    assert script._lag_p99(before, before) is None
    assert script._lag_p99({}, {}) is None
