from dataclasses import replace

import pytest

from proxy.replay.batch import run_all
from proxy.replay.plan import ENGINES, ReplayPlan, notes
from proxy.replay.simulator import ReplayRun
from tests.proxy.replay.making import ask, model_of, trace_of

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
    plan = ReplayPlan((model_of(4),), (1,), ("sticky", "kvpin"))
    told = notes(trace, run_all(trace, plan.runs(trace)))
    assert told == [
        "1 requests do not fit into an engine and were left out",
        "the trace names no sessions: the first block that not all requests share counts as one (sticky)",
    ]
    two_sizes = ReplayPlan((model_of(1000), model_of(4)), (1,), ("kvpin",))
    assert notes(trace, run_all(trace, two_sizes.runs(trace))) == [
        "1 requests do not fit into an engine of 400 GPU tokens: its figures are those of the others"
    ]
    sessions = trace_of(ask((1,), session="s"))
    assert notes(sessions, run_all(sessions, plan.runs(sessions))) == []


def test_what_was_done_to_a_trace_is_told():
    trace = replace(TRACE, rechained=True, failed=1200, cut=True)
    outcomes = run_all(trace, ReplayPlan((model_of(),), (1,), ("kvpin",)).runs(trace))
    failed, cut, chained = notes(trace, outcomes)
    assert failed == "1,200 requests got an error and were left out"
    assert cut == "the last line of the trace is incomplete and was left out"
    assert "replay chained them" in chained
