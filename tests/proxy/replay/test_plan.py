from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.replay import plan as module
from proxy.replay.figures import FigureSource
from proxy.replay.plan import ENGINES, Need, P99Target, ReplayPlan, doubts, next_count, notes, search
from proxy.replay.simulator import ReplayRun, run_all
from proxy.replay.trace import RecordedFigures
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


def test_one_policy_with_every_seed():
    plan = ReplayPlan((model_of(),), (), ("kvpin",), (0, 5), speedup=3.0)
    assert plan.seeded(TRACE, "sticky", 7) == [
        ReplayRun("sticky", 7, model_of(), 3.0, seed) for seed in (0, 5)
    ]


def test_a_load_is_one_for_each_number_of_engines():
    plan = ReplayPlan((model_of(),), (1, 2), ("kvpin",), load=0.5)
    assert [run.speedup for run in plan.runs(TRACE)] == pytest.approx([25, 50])


def test_titles_and_settings():
    plan = ReplayPlan((model_of(10, 20, chunked=True),), (1,), ("kvpin",), load=0.9)
    assert plan.title(TRACE) == (
        "made: 2 requests, load 0.9; each engine 1,000 tokens on the GPU and 2,000 in host memory, "
        "chunked prefill with decode"
    )
    assert ReplayPlan((model_of(),), (1,), ("kvpin",), speedup=2.0).title(TRACE) == (
        "made: 2 requests, 2x as recorded; each engine 1,000 tokens on the GPU, prefill alone"
    )
    assert "; each engine 1,000 or 500 tokens on the GPU, prefill" in ReplayPlan(
        (model_of(), model_of(5)), (1,), ("kvpin",)
    ).title(TRACE)
    settings = plan.settings(TRACE)
    assert (settings["prompt_tokens"], settings["load"]) == (400, 0.9)
    assert [model["gpu_tokens"] for model in settings["models"]] == [1000]


def test_notes_say_what_figures_do_not():
    trace = trace_of(ask((1, 2)), ask((1, 2, 3, 4)))
    plan = ReplayPlan((model_of(4),), (1,), ("sticky", "kvpin"), sources=SOURCES)
    figures, *told = notes(plan, trace, run_all(trace, plan.runs(trace)))
    assert figures == "each engine: 400 tokens on the GPU (given), prefill 1,000 tokens/s (DEFAULT)"
    assert told == [
        "1 requests do not fit into an engine and were left out",
        "the trace names no sessions: the first block that not all requests share counts as one (sticky)",
    ]
    two_sizes = ReplayPlan((model_of(1000), model_of(4)), (1,), ("kvpin",), sources=SOURCES)
    assert notes(two_sizes, trace, run_all(trace, two_sizes.runs(trace)))[1:] == [
        "1 requests do not fit into an engine of 400 GPU tokens: its figures are those of the others"
    ]
    sessions = trace_of(ask((1,), session="s"))
    assert notes(plan, sessions, run_all(sessions, plan.runs(sessions)))[1:] == []


def test_what_was_done_to_a_trace_is_told():
    trace = replace(TRACE, rechained=True, failed=1200, cut=True)
    plan = ReplayPlan((model_of(),), (1,), ("kvpin",), sources=SOURCES)
    _, failed, cut, chained = notes(plan, trace, run_all(trace, plan.runs(trace)))
    assert failed == "1,200 requests got an error and were left out"
    assert cut == "the last line of the trace is incomplete and was left out"
    assert "replay chained them" in chained


# 20 prompts of 10 s each, one a second.
BUSY = trace_of(*(ask(range(100 * n, 100 * n + 99), at=float(n), tail=100) for n in range(20)))
SHORT = (
    "too short to compare policies: 20 requests, and differences of a few percent are chance; "
    "use 1,000 requests or more"
)


def found(trace, *policies, engines=(2,), speedup=1.0):
    plan = ReplayPlan((model_of(1000),), engines, policies, speedup=speedup, sources=KNOWN)
    return doubts(plan, trace, run_all(trace, plan.runs(trace)))


def test_figures_that_are_no_engines_and_requests_that_are_missing_are_doubts():
    trace = replace(BUSY, unrecorded=7, figures=RecordedFigures(differ="they differ"))
    plan = ReplayPlan((model_of(1000),), (2,), ("oracle",), sources=SOURCES)
    assumed, differ, missing = doubts(plan, trace, run_all(trace, plan.runs(trace)))
    assert assumed.startswith("DEFAULTS, NOT YOUR ENGINES: prefill 1,000 tokens/s; ")
    assert assumed.endswith("give --prefill-rate")
    assert differ == "they differ"
    assert missing.startswith("7 more requests were served meanwhile")


def test_a_short_trace_compares_nothing():
    assert found(BUSY, "kvpin", "sticky") == [SHORT]


def test_that_a_trace_is_short_is_told_before_what_else_is_doubtful():
    trace = replace(BUSY, unrecorded=7)
    assert found(trace, "kvpin", "sticky")[0] == SHORT


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


@pytest.mark.parametrize("policies", [("kvpin",), ("kvpin", "oracle")])
def test_a_short_trace_is_not_relied_on_for_one_policy_either(policies):
    assert found(BUSY, *policies, engines=(120,)) == [
        (
            "too short to rely on: 20 requests, and the p99 is that of the slowest 1; use 1,000 requests or "
            "more"
        )
    ]


def test_the_oracle_has_no_times_to_doubt():
    assert found(BUSY, "oracle") == []


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


def test_what_is_needed_in_words_and_as_data():
    target = P99Target(2.0, 64, 0.2)
    assert str(Need("kvpin", target, 6, 1.842, 2.305, 7, 1.91)) == (
        "kvpin: plan 7 engines for a p99 TTFT of 2 s: it is 1.91 s with 20% more traffic; "
        "6 engines are enough for the traffic as it is: 1.84 s, and 2.31 s with 5"
    )
    assert str(Need("kvpin", target, 1, 1.0, None, 1, 1.5)) == (
        "kvpin: plan 1 engine for a p99 TTFT of 2 s: it is 1.5 s with 20% more traffic; "
        "1 engine is enough for the traffic as it is: 1 s"
    )
    assert str(Need("kvpin", target, 64, 1.0, 2.1, None, 2.5)) == (
        "kvpin: 64 engines are enough for the traffic as it is: 1 s, and 2.1 s with 63; "
        "with 20% more traffic, 64 engines are not enough for a p99 TTFT of 2 s: 2.5 s; "
        "allow more with --max-engines, or use faster engines"
    )
    assert Need("kvpin", target, 1, 1.0, None, 2, 1.5).as_data() == {
        "policy": "kvpin",
        "target_p99_s": 2.0,
        "max_engines": 64,
        "engines": 1,
        "p99_ttft_s": 1.0,
        "p99_ttft_s_with_one_less": None,
        "margin": 0.2,
        "engines_with_margin": 2,
        "p99_ttft_s_with_margin": 1.5,
    }
