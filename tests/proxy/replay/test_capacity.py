import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.replay.batch import run_all
from proxy.replay.capacity import Need, next_count, search
from proxy.replay.plan import P99Target, ReplayPlan
from tests.proxy.replay.making import ask, chats, model_of, trace_of


def counts(p99_of, target):
    """The numbers of engines that are tried, and the one that is found."""
    p99s = {}
    while (engines := next_count(p99s, target)) is not None:
        assert engines not in p99s
        p99s[engines] = p99_of(engines)
    return list(p99s), min((n for n, p99_s in p99s.items() if p99_s <= target.p99_s), default=None)


def test_it_doubles_then_bisects():
    assert counts(lambda engines: 11 / engines, P99Target(1.0, 64)) == ([1, 2, 4, 8, 16, 12, 10, 11], 11)


def test_it_ends_at_the_most_that_is_allowed():
    assert counts(lambda engines: 100 / engines, P99Target(1.0, 20)) == ([1, 2, 4, 8, 16, 20], None)
    assert counts(lambda engines: 20 / engines, P99Target(1.0, 20)) == ([1, 2, 4, 8, 16, 20, 18, 19], 20)


@given(st.integers(1, 300), st.integers(1, 200))
def test_it_finds_the_fewest_that_suffice(needed, most):
    found = counts(lambda engines: 1.0 if engines >= needed else 9.0, P99Target(1.0, most))[1]
    assert found == (needed if needed <= most else None)


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
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
    assert [str(need) for need in needs] == [
        (
            "kvpin: 3 engines are not enough for a p99 TTFT of 0.5 s: it is 0.95 s; allow more with "
            "--max-engines, or use faster engines"
        )
    ]


def test_what_is_needed_in_words_and_as_data():
    target = P99Target(2.0, 64)
    assert str(Need("kvpin", target, 6, 1.842, 2.305)) == (
        "kvpin: 6 engines are enough for a p99 TTFT of 2 s: it is 1.84 s, and 2.31 s with 5"
    )
    assert str(Need("kvpin", target, 1, 1.0)) == (
        "kvpin: 1 engine is enough for a p99 TTFT of 2 s: it is 1 s"
    )
    assert Need("kvpin", target, 1, 1.0).as_data() == {
        "policy": "kvpin",
        "target_p99_s": 2.0,
        "max_engines": 64,
        "engines": 1,
        "p99_ttft_s": 1.0,
        "p99_ttft_s_with_one_less": None,
    }
