import pytest

from proxy.replay.figures import (
    FIGURES,
    FigureSource,
    modelled,
    source_of,
)
from proxy.replay.trace import RecordedFigures

CURVE = ((100.0, 0.3), (1000.0, 1.0), (2000.0, 3.0))
ALL = RecordedFigures(40_000, 9000, CURVE, interference=0.1, restore_tok_s=5000.0, token_s=0.03)


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
