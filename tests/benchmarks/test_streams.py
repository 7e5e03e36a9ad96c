"""The loop lag between two readings of kvpin's histogram, and the limit of open files."""

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


def test_a_file_limit_that_may_not_be_raised_is_one_sentence(streams, monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    from cost_native import NativeError

    with pytest.raises(NativeError, match=r"^9000 open files are needed and 4096 are allowed: raise"):
        streams.raise_file_limit(9000)
