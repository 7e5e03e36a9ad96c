import pytest

from proxy.replay import doubts as module
from proxy.replay.batch import run_all
from proxy.replay.doubts import doubts
from proxy.replay.plan import ReplayPlan
from tests.proxy.replay.making import ask, model_of, trace_of

# 20 prompts of 10 s each, one a second.
BUSY = trace_of(*(ask(range(100 * n, 100 * n + 99), at=float(n), tail=100) for n in range(20)))
SHORT = (
    "too short to compare policies: 20 requests, and differences of a few percent are chance; "
    "use 1,000 requests or more"
)


def found(trace, *policies, engines=(2,), speedup=1.0):
    plan = ReplayPlan((model_of(1000),), engines, policies, speedup=speedup)
    return doubts(trace, run_all(trace, plan.runs(trace)))


def test_a_short_trace_compares_nothing():
    assert found(BUSY, "kvpin", "sticky") == [SHORT]


@pytest.fixture
def long_enough(monkeypatch):
    monkeypatch.setattr(module, "MIN_REQUESTS", len(BUSY.requests))


@pytest.mark.usefixtures("long_enough")
def test_a_light_trace_compares_nothing():
    assert found(BUSY, "kvpin", "sticky") == []
    # 200 s of work in 19 s keep 110 engines busy for a tenth of the time.
    assert found(BUSY, "kvpin", "sticky", engines=(100, 120, 150)) == [
        (
            "too light to compare policies with 120 and 150 engines: they compute less than 10% of the time; "
            "raise --load or --speedup, or use fewer engines"
        )
    ]
    assert found(BUSY, "kvpin", "sticky", engines=(120,), speedup=2.0) == []


@pytest.mark.usefixtures("long_enough")
def test_what_arrives_all_at_once_is_not_light():
    at_once = trace_of(*(ask(range(9)) for _ in range(20)))
    assert found(at_once, "kvpin", "sticky", engines=(50,)) == []


@pytest.mark.parametrize("policies", [("kvpin",), ("kvpin", "oracle"), ("oracle",)])
def test_one_policy_is_compared_with_none(policies):
    assert found(BUSY, *policies) == []
