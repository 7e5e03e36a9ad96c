from dataclasses import replace

import pytest

from proxy.replay.figures import FIGURES, FigureSource, check, modelled, source_of
from proxy.replay.simulator import simulate
from proxy.replay.trace import RecordedEngine
from tests.proxy.replay.making import ask, model_of, trace_of

CURVE = ((100.0, 0.3), (1000.0, 1.0), (2000.0, 3.0))
ALL = RecordedEngine(
    "median",
    gpu_tokens=40_000,
    host_tokens=9000,
    prefill=CURVE,
    interference=0.1,
    restore_tok_s=5000.0,
    token_s=0.03,
)


def sources(recorded):
    return {name: source_of(name, recorded, is_given=False) for name in FIGURES}


def test_what_was_recorded_is_simulated():
    model = modelled(ALL, is_chunked=True)
    assert (model.gpu_tokens, model.host_tokens, model.restore_tok_s) == (40_000, 9000, 5000.0)
    assert (model.step_s, model.curve) == (0.03, CURVE)
    # A step of 2,048 tokens of prefill takes a tenth longer for each stream.
    assert model.stream_s == pytest.approx(0.1 * 2048 / model.prefill_tok_s)
    told = sources(ALL)
    assert told.pop("chunk_tokens") is FigureSource.DEFAULT
    assert set(told.values()) == {FigureSource.RECORDED}


def test_what_is_given_comes_first():
    assert source_of("prefill_rate", ALL, is_given=True) is FigureSource.GIVEN


@pytest.mark.parametrize(("tokens", "seconds"), [(50, 0.15), (100, 0.3), (1500, 2.0), (4000, 6.0)])
def test_a_prefill_takes_the_time_that_was_measured(tokens, seconds):
    model = modelled(ALL, is_chunked=False)
    assert model.prefill_s(0, tokens) == pytest.approx(seconds)
    assert model.prefill_s(700, 700 + tokens) == pytest.approx(seconds)


# One engine computes 10 blocks a second, so each of these takes 1 s.
REQUESTS = [ask(range(100 * n, 100 * n + 10), at=2.0 * n, tail=0) for n in range(10)]


def recorded(*ttfts, engines=1):
    trace = trace_of(*REQUESTS)
    requests = [replace(each, ttft_s=ttft) for each, ttft in zip(trace.requests, ttfts, strict=True)]
    return replace(trace, requests=tuple(requests), engines=engines)


def checked(trace, **options):
    return check(trace, model_of(20, **options), lambda runs: [simulate(trace, run) for run in runs])


# Their arrivals move by up to 2 s in four of the five runs, so that some wait for another.
PREDICTED = "on the 1 recorded engine, replay predicts a p99 TTFT of 1 to 1.97 s in 5 runs"


@pytest.mark.parametrize("measured_s", [0.9, 1.0, 1.2, 1.9, 2.3])
def test_times_that_fit_one_of_the_runs_are_told(measured_s):
    told = f"checked: {PREDICTED}; measured: {measured_s:.3g} s"
    assert checked(recorded(*[measured_s] * 10)) == (told, False)


@pytest.mark.parametrize(("chunked", "other"), [(False, "chunked"), (True, "fifo")])
def test_times_that_do_not_fit_are_a_doubt(chunked, other):
    sentence, is_doubt = checked(recorded(*[5.6] * 10), chunked=chunked)
    assert is_doubt
    assert sentence.startswith(f"DOES NOT FIT: {PREDICTED}")
    assert sentence.endswith(f"measured: 5.6 s: do not rely on the times here; try --model {other}")
