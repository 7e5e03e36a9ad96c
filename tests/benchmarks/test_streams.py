"""The table of streams.py, and loop lag between two readings of kvpin's histogram."""

import resource

import pytest


@pytest.fixture
def streams():
    import streams

    return streams


def test_loop_lag_is_of_what_was_counted_meanwhile(streams):
    before = {0.001: 50, 0.01: 60, float("inf"): 60}
    after = {0.001: 148, 0.01: 159, float("inf"): 160}
    assert streams._lag_p99(before, after) == 10
    assert streams._lag_p99({}, before) == 10
    assert streams._lag_p99(before, before) is None
    assert streams._lag_p99({}, {}) is None


def test_a_row_tells_memory_pace_and_losses(streams):
    row = streams.Held(
        streams=1000,
        seconds=60.0,
        before_mb=100.0,
        open_mb=120.0,
        most_mb=125.0,
        chunks_per_s=9_900.0,
        late_p50_ms=1.25,
        late_p99_ms=20.0,
        late_worst_ms=99.6,
        lag_p99_ms=None,
        probe_p99_ms=3.0,
        dropped=1,
        first_error="a stream ended early",
        kvpin_busy=0.5,
        others_busy=0.25,
    )
    head, rule, cells = streams.markdown([row]).splitlines()
    assert cells == (
        "| 1,000 | 60 | 100 → 120 | 25.0 | 9,900, 99.0% | 1.2 / 20.0 / 100 | – | 3.0 "
        "| 1 a stream ended early | 50% | 25% |"
    )
    assert head.count("|") == rule.count("|") == cells.count("|")


def test_a_file_limit_that_may_not_be_raised_is_one_sentence(streams, monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    from cost_native import NativeError

    with pytest.raises(NativeError, match=r"^9000 open files are needed and 4096 are allowed: raise"):
        streams.raise_file_limit(9000)
