from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.placement.whole_answers import (
    MIN_ANSWERS,
    REFIT,
    REFIT_S,
    WINDOW,
    AnswerFit,
    AnswerSample,
    Fit,
    fit,
    weighted_median,
)

# Prompt tokens a second, and seconds a decode step: a CPU, small and large GPUs.
HARDWARE = [(200, 0.05), (4000, 0.02), (20_000, 0.015), (60_000, 0.008)]


def between(random, low, high):
    """A length; as many short ones as long ones."""
    return round(low * (high / low) ** random.random())


def answers(seed, tok_s, step_s, *, noise=0.0, held_up=0.0):
    """Answers of mixed lengths; a share of them was held up for as long as they took, or thrice that."""
    random = Random(seed)  # noqa: S311 - a test
    for _ in range(WINDOW):
        answer = AnswerSample(between(random, 100, 8000), between(random, 16, 600), 0.0)
        seconds = Fit(1 / tok_s, step_s).seconds(answer) * random.gauss(1.0, noise)
        late = random.uniform(2, 4) if random.random() < held_up else 1.0
        yield AnswerSample(answer.prefilled, answer.output, seconds * late)


@pytest.mark.parametrize(("tok_s", "step_s"), HARDWARE)
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32))
def test_what_is_exact_is_found_exactly(tok_s, step_s, seed):
    found = fit(list(answers(seed, tok_s, step_s)))
    assert (1 / found.token_s, found.step_s) == pytest.approx((tok_s, step_s), rel=1e-6)


@pytest.mark.parametrize(("tok_s", "step_s"), HARDWARE)
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32))
def test_noise_and_answers_that_were_held_up_move_it_little(tok_s, step_s, seed):
    found = fit(list(answers(seed, tok_s, step_s, noise=0.05, held_up=0.1)))
    assert 0.5 < found.token_s * tok_s < 2
    assert 0.8 < found.step_s / step_s < 1.25


def test_longer_prompts_that_take_less_time_say_nothing():
    assert fit([AnswerSample(1000 * n, 10, 100.0 - 9 * n) for n in range(1, 11)]) is None


def test_longer_answers_that_take_less_time_cost_no_less_than_nothing():
    assert fit([AnswerSample(64_000, n, 64.0 - n) for n in range(1, 40)]).step_s == 0.0


def test_it_is_made_of_the_last_answers_every_few_of_them_then_once_a_window():
    fits = AnswerFit()
    made = [fits.add(float(at), AnswerSample(1000, 0, 1.0 + at // WINDOW)) for at in range(3 * WINDOW)]
    found = [at for at, each in enumerate(made, 1) if each]
    assert found == [*range(MIN_ANSWERS, WINDOW, REFIT), 2 * WINDOW, 3 * WINDOW], (
        "the first full window is explained"
    )
    last = [found for at in range(WINDOW) if (found := fits.add(1000.0 + at, AnswerSample(1000, 0, 9.0)))]
    assert last == [Fit(0.009, 0.0)]


@pytest.mark.parametrize(
    ("long", "short", "is_made"), [(1, 1, False), (1.04, 0.96, False), (2, 1, True), (1, 2, True)]
)
def test_a_window_that_the_last_fit_explains_is_not_fitted_again(long, short, is_made):
    """Answers to long prompts, which are mostly prefill, and to short ones take so many times as long."""
    fits = AnswerFit()
    for at in range(WINDOW):
        fits.add(0.0, AnswerSample(1000, 10, 1.1) if at % 2 else AnswerSample(100, 100, 1.1))
    made = [
        fits.add(100.0, AnswerSample(1000, 10, 1.1 * long) if at % 2 else AnswerSample(100, 100, 1.1 * short))
        for at in range(WINDOW)
    ]
    assert any(made) is is_made


def test_a_full_window_is_fitted_once_in_a_while_however_many_answers_come():
    fits, a_second = AnswerFit(), 20 * WINDOW
    made = [fits.add(at / a_second * REFIT_S, AnswerSample(1000, 0, 1.0 + at)) for at in range(3 * a_second)]
    assert [at for at, each in enumerate(made, 1) if each] == [
        *range(MIN_ANSWERS, WINDOW + 1, REFIT),
        *(WINDOW + seconds * a_second for seconds in (1, 2)),
    ]


def test_half_of_the_weight_lies_below_the_median():
    assert weighted_median([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)]) == 2.0
    assert weighted_median([(3.0, 5.0), (1.0, 1.0), (2.0, 1.0)]) == 3.0
