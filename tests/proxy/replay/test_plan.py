from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.replay import plan as module
from proxy.replay.figures import FigureSource
from proxy.replay.plan import ENGINES, P99Target, ReplayPlan, doubts, next_count, search
from proxy.replay.simulator import ReplayRun, run_all
from tests.proxy.replay.making import ask, chats, model_of, trace_of

SOURCES = {"gpu_tokens": FigureSource.GIVEN, "prefill_rate": FigureSource.DEFAULT}
KNOWN = dict.fromkeys(SOURCES, FigureSource.RECORDED)
TRACE = trace_of(ask((1, 2), tail=0), ask((1, 2), tail=0, at=20.0))


def test_every_policy_with_every_seed_on_every_number_of_engines_of_every_size():
    models = model_of(), model_of(20)
    plan = ReplayPlan(models, (1, 2), ("kvpin", "sticky"), (0, 5), speedup=3.0)
    assert plan.runs(TRACE) == [
        ReplayRun(policy, engines, model, 3.0, seed)
        for engines in (1, 2)
        for model in models
        for seed in (0, 5)
        for policy in ("kvpin", "sticky")
    ]


@pytest.mark.parametrize(("named", "engines"), [(0, ENGINES), (1, 1), (3, 3)])
def test_as_many_engines_as_the_trace_names(named, engines):
    trace, plan = replace(TRACE, engines=named), ReplayPlan((model_of(),), (), ("kvpin",))
    assert [run.engines for run in plan.runs(trace)] == [engines]
    of = {0: "", 1: " of 1 engine", 3: " of 3 engines"}[named]
    assert f"made: 2 requests{of}, 1x" in plan.title(trace)
    assert "engines" not in ReplayPlan((model_of(),), (2,), ("kvpin",)).title(trace)


def test_a_load_is_one_for_each_number_of_engines():
    plan = ReplayPlan((model_of(),), (1, 2), ("kvpin",), load=0.5)
    assert [run.speedup for run in plan.runs(TRACE)] == pytest.approx([25, 50])


# 20 prompts of 10 s each, one a second.
BUSY = trace_of(*(ask(range(100 * n, 100 * n + 99), at=float(n), tail=100) for n in range(20)))


def found(trace, *policies, engines=(2,), speedup=1.0):
    plan = ReplayPlan((model_of(1000),), engines, policies, speedup=speedup, sources=KNOWN)
    return doubts(plan, trace, run_all(trace, plan.runs(trace)))


@pytest.fixture
def long_enough(monkeypatch):
    monkeypatch.setattr(module, "MIN_REQUESTS", len(BUSY.requests))


@pytest.mark.usefixtures("long_enough")
def test_a_light_trace_compares_nothing():
    assert found(BUSY, "kvpin", "sticky") == []
    # 200 s of work in 19 s keep 110 engines busy for a tenth of the time.
    (light,) = found(BUSY, "kvpin", "sticky", engines=(100, 120, 150))
    assert light.startswith("too light to compare policies with 120 and 150 engines: they compute less than")
    assert found(BUSY, "kvpin", "sticky", engines=(120,), speedup=2.0) == []


@pytest.mark.usefixtures("long_enough")
def test_what_arrives_all_at_once_is_not_light():
    at_once = trace_of(*(ask(range(9)) for _ in range(20)))
    assert found(at_once, "kvpin", "sticky", engines=(50,)) == []


@pytest.mark.parametrize("policies", [("kvpin",), ("kvpin", "oracle")])
def test_a_short_trace_is_not_relied_on_for_one_policy_either(policies):
    (short,) = found(BUSY, *policies, engines=(120,))
    assert short.startswith("too short to rely on: 20 requests, and the p99 is that of the slowest 1; use")


def counts(p99_of, target):
    """The numbers of engines that are tried, and the one that is found."""
    p99s = {}
    while (engines := next_count(p99s, target)) is not None:
        assert engines not in p99s
        p99s[engines] = p99_of(engines)
    return list(p99s), min((n for n, p99_s in p99s.items() if p99_s <= target.p99_s), default=None)


@given(st.integers(1, 300), st.integers(1, 200))
def test_it_finds_the_fewest_that_suffice(needed, most):
    found = counts(lambda engines: 1.0 if engines >= needed else 9.0, P99Target(1.0, most))[1]
    assert found == (needed if needed <= most else None)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_the_search_says_what_runs_say(seeds):
    trace = chats(40, 3, seed=1)
    plan = ReplayPlan((model_of(1000),), (), ("kvpin", "round-robin"), seeds, target=P99Target(25.0, 32))
    needs, outcomes = search(plan, plan.target, trace, lambda runs: run_all(trace, runs))
    for need in needs:
        p99s = [
            max(outcome.ttft_s(0.99) for outcome in run_all(trace, plan.seeded(trace, need.policy, engines)))
            for engines in (need.engines - 1, need.engines)
        ]
        assert p99s[1] == need.p99_s <= 25.0 < p99s[0] == need.p99_s_with_one_less
    assert {outcome.run.policy for outcome in outcomes} == {"kvpin", "round-robin"}
    assert len(outcomes) % len(seeds) == 0


def test_more_engines_do_not_help_one_long_prompt():
    trace = trace_of(ask(range(9)))
    plan = ReplayPlan((model_of(),), (), ("kvpin",), target=P99Target(0.5, 3))
    needs, _ = search(plan, plan.target, trace, lambda runs: run_all(trace, runs))
    (said,) = map(str, needs)
    assert said.startswith(
        "kvpin: 3 engines are not enough for a p99 TTFT of 0.5 s: it is 0.95 s; allow more"
    )


def test_a_margin_of_traffic_takes_more_engines():
    trace = chats(40, 3, seed=1)
    plan = ReplayPlan((model_of(1000),), (), ("kvpin",), target=P99Target(25.0, 32, 0.3))
    (need,), outcomes = search(plan, plan.target, trace, lambda runs: run_all(trace, runs))
    faster = replace(plan, speedup=1.3)
    less, enough = (
        run_all(trace, faster.seeded(trace, "kvpin", engines))[0].ttft_s(0.99)
        for engines in (need.planned - 1, need.planned)
    )
    assert enough == need.planned_p99_s <= 25.0 < less
    assert need.engines <= need.planned
    assert {outcome.run.speedup for outcome in outcomes} == {1.0}  # the table shows the traffic as it is
