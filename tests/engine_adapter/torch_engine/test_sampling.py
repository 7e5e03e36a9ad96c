from __future__ import annotations

from array import array
from collections import Counter

import pytest
import torch

from engine_adapter.torch_engine.requests import SamplingParams
from engine_adapter.torch_engine.sampling import Sampler, choose_all

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -30.0])


def sampler(prompt=(), ends=(), seed=0, **params):
    return Sampler(
        SamplingParams(**params),
        array("i", prompt),
        ends=frozenset(ends),
        vocab_size=len(LOGITS),
        seed=seed,
        device=torch.device("cpu"),
    )


def draw(number=400, **params):
    chosen = sampler(**params)
    return Counter(chosen.choose(LOGITS).token_id for _ in range(number))


def test_greedy_takes_the_best_and_is_plain():
    greedy = sampler(temperature=0.0)
    assert greedy.plain
    assert [choice.token_id for choice in choose_all(LOGITS[None].repeat(2, 1), [greedy, greedy])] == [0, 0]
    assert choose_all(LOGITS[:0].view(0, 0), []) == []


def test_frequencies_follow_the_probabilities():
    counts = draw(4000, temperature=1.0, seed=5)
    expected = LOGITS.softmax(-1) * 4000
    for token in range(5):
        assert counts[token] == pytest.approx(float(expected[token]), rel=0.25)


def test_equal_seeds_give_equal_samples():
    runs = [[sampler(seed=seed).choose(LOGITS).token_id for seed in range(50)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
    own = [sampler(seed=seed).choose(LOGITS).token_id for seed in (-1, 2**64)]
    assert all(0 <= token < 6 for token in own)


def test_a_request_seed_wins_over_the_engines():
    def tokens(fallback, seed):
        chosen = Sampler(
            SamplingParams(seed=seed),
            array("i"),
            ends=frozenset(),
            vocab_size=6,
            seed=fallback,
            device=torch.device("cpu"),
        )
        return [chosen.choose(LOGITS).token_id for _ in range(30)]

    assert tokens(1, 9) == tokens(2, 9)
    assert tokens(1, None) != tokens(2, None)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_filters_keep_the_best(params, allowed):
    assert set(draw(seed=1, **params)) == allowed


def test_repetition_penalty_covers_the_prompt_and_ignores_fake_ids():
    assert sampler(prompt=[0, 500], temperature=0.0, repetition_penalty=3.0).choose(LOGITS).token_id == 1
    turns = sampler(temperature=0.0, repetition_penalty=3.0)
    assert [turns.choose(LOGITS).token_id for _ in range(3)] == [0, 1, 0]


def test_presence_and_frequency_count_generated_tokens_only():
    presence = sampler(prompt=[0], temperature=0.0, presence_penalty=1.5)
    assert [presence.choose(LOGITS).token_id for _ in range(4)] == [0, 1, 0, 0]
    frequency = sampler(prompt=[0], temperature=0.0, frequency_penalty=0.6)
    assert [frequency.choose(LOGITS).token_id for _ in range(4)] == [0, 0, 1, 0]


def test_no_end_before_the_minimum():
    chosen = sampler(ends=[0], temperature=0.0, min_tokens=2)
    assert not chosen.plain
    assert [chosen.choose(LOGITS).token_id for _ in range(3)] == [1, 1, 0]
    assert chosen.plain


def test_logprobs_are_the_models_own():
    choice = sampler(temperature=0.0, logprobs=2, presence_penalty=1.0, prompt=[0]).choose(LOGITS)
    expected = LOGITS.log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in choice.top_logprobs] == [0, 1]
    assert choice.top_logprobs[1][1] == pytest.approx(float(expected[1]))
    assert sampler(temperature=0.0, logprobs=0).choose(LOGITS).top_logprobs == ()
    assert len(sampler(temperature=0.0, logprobs=99).choose(LOGITS).top_logprobs) == 6


def test_scores_that_are_no_numbers_are_an_error_of_their_row():
    rows = torch.stack([LOGITS, torch.full_like(LOGITS, float("nan")), LOGITS, LOGITS])
    overflow = {"temperature": 1.0, "repetition_penalty": 1e-45, "prompt": [0]}
    samplers = [sampler(temperature=0.0), sampler(), sampler(**overflow), sampler(temperature=0.0)]
    first, *errors, last = choose_all(rows, samplers)
    assert (first.token_id, last.token_id) == (0, 0)
    assert [str(error) for error in errors] == [
        f"the model's highest score is {score}: no token can be chosen" for score in ("nan", "inf")
    ]


def test_choosing_leaves_the_logits_as_they_are():
    logits = LOGITS.clone()
    sampler(
        temperature=0.5, ends=[1], min_tokens=1, repetition_penalty=2.0, presence_penalty=1.0, prompt=[0]
    ).choose(logits)
    assert torch.equal(logits, LOGITS)


def test_the_rest_of_an_answer_does_not_draw_as_its_beginning_did():
    def drawn(answered):
        chosen = Sampler(
            SamplingParams(temperature=1.0, seed=5),
            array("i"),
            answered=answered,
            ends=frozenset(),
            vocab_size=len(LOGITS),
            seed=0,
            device=torch.device("cpu"),
        )
        return [chosen.choose(LOGITS).token_id for _ in range(50)]

    assert drawn(0) != drawn(7)
    assert drawn(7) == drawn(7)
