"""How tokens are chosen from rows of logits, and the filters of random choices."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
import torch

from engine_adapter.torch_engine.requests import GenerationRequest, RequestRefused, SamplingParams
from engine_adapter.torch_engine.sampling import Filters, Sampler, _first_above, choose_all, draw

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -30.0])


def sampler(prompt=(), ends=(), seed=0, answered=0, constraint=None, **params):
    request = GenerationRequest(
        "r", array("i", prompt), SamplingParams(**params), answered=answered, constraint=constraint
    )
    return Sampler(request, ends=frozenset(ends), vocab_size=len(LOGITS), seed=seed)


def choose(chosen, logits=LOGITS):
    """One choice."""
    (choice,) = choose_all(logits[None], [chosen])
    return choice


def tokens(number, *, logits=LOGITS, **params):
    """The tokens of one request."""
    chosen = sampler(**params)
    return [choose(chosen, logits).token_id for _ in range(number)]


class Allows:
    """A constraint: each token's set of token ids, in turn; None for all."""

    def __init__(self, *allowed):
        self.allowed = list(allowed)
        self.accepted = []

    def allow(self, words):
        allowed = self.allowed[len(self.accepted)]
        assert not words.any()
        for token in range(32 * len(words)) if allowed is None else allowed:
            words.view("u4")[token // 32] |= 1 << token % 32

    def accept(self, token):
        self.accepted.append(token)


def test_greedy_is_the_argmax_of_every_row():
    logits = torch.randn(50, 1000).bfloat16()  # with equal scores
    chosen = choose_all(logits, [sampler(temperature=0.0) for _ in logits])
    assert [choice.token_id for choice in chosen] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("seed", [-1, 9, 2**64])
def test_a_request_seed_wins_over_the_engines(seed):
    def drawn(fallback, seed):
        request = GenerationRequest("r", array("i"), SamplingParams(seed=seed))
        chosen = Sampler(request, ends=frozenset(), vocab_size=6, seed=fallback)
        return [choose(chosen).token_id for _ in range(30)]

    assert drawn(1, seed) == drawn(2, seed)
    assert drawn(1, None) != drawn(2, None)


def test_the_other_rows_of_a_step_change_no_choice():
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.8},
        {"min_p": 0.1, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5, "temperature": 0.7},
        {"logit_bias": ((4, 3.0),), "logprobs": 1},
        {"min_tokens": 50, "ends": [0], "frequency_penalty": 0.5},
    ]
    alone = [tokens(40, **kind, seed=seed) for seed, kind in enumerate(kinds)]
    samplers = [sampler(**kind, seed=seed) for seed, kind in enumerate(kinds)]
    steps = [choose_all(LOGITS[None].repeat(len(kinds), 1), samplers) for _ in range(40)]
    assert [[step[row].token_id for step in steps] for row in range(len(kinds))] == alone


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        # A repetition penalty covers the prompt, without its fake ids.
        ({"prompt": [0, 500], "repetition_penalty": 3.0}, [1]),
        ({"repetition_penalty": 3.0}, [0, 1, 0]),
        # Presence and frequency count generated tokens only.
        ({"prompt": [0], "presence_penalty": 1.5}, [0, 1, 0, 0]),
        ({"prompt": [0], "frequency_penalty": 0.6}, [0, 0, 1, 0]),
        ({"prompt": [1, 0], "answered": 1, "presence_penalty": 1.5}, [1, 0]),
        ({"ends": [0], "min_tokens": 2}, [1, 1, 0]),
        ({"logit_bias": ((1, -5.0), (0, -100.0))}, [2]),
        ({"logit_bias": ((2, 2.5),)}, [2]),
    ],
)
def test_what_changes_the_scores(params, greedy):
    assert tokens(len(greedy), temperature=0.0, **params) == greedy


def test_only_allowed_tokens_come_and_the_constraint_goes_on_by_them():
    allows = Allows({3, 2}, None, {5}, {1, 4})
    assert tokens(4, temperature=0.0, constraint=allows) == [2, 0, 5, 1]
    assert allows.accepted == [2, 0, 5, 1]
    drawn = tokens(60, temperature=2.0, constraint=Allows(*[{1, 3}] * 60))
    assert set(drawn) == {1, 3}


def test_a_constraint_of_one_row_leaves_the_others_alone():
    logits = torch.arange(100.0).repeat(3, 1)
    rows = [sampler(temperature=0.0, constraint=each) for each in (Allows({31, 32, 64}), None, Allows({5}))]
    assert [choice.token_id for choice in choose_all(logits, rows)] == [64, 99, 5]


def test_a_constraint_that_fails_ends_its_own_request():
    class Fails(Allows):
        def accept(self, token):
            raise RuntimeError(f"not {token}")

    rows = [sampler(temperature=0.0, constraint=each) for each in (Allows(), Fails({1}), Allows(set()), None)]
    nothing_more, refused, nothing, fine = choose_all(LOGITS.repeat(4, 1), rows)
    assert isinstance(nothing_more, IndexError)
    assert str(refused) == "not 1"
    assert str(nothing) == "the model's highest score is -inf: no token can be chosen"
    assert fine.token_id == 0


def test_logprobs_are_the_models_own():
    choice = choose(sampler(temperature=0.0, logprobs=2, presence_penalty=1.0, prompt=[0]))
    expected = LOGITS.log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in choice.top_logprobs] == [0, 1]
    assert choice.top_logprobs[1][1] == pytest.approx(float(expected[1]))
    assert choose(sampler(temperature=0.0, logprobs=0)).top_logprobs == ()
    assert len(choose(sampler(temperature=0.0, logprobs=99)).top_logprobs) == 6


def test_scores_that_are_no_numbers_are_an_error_of_their_row():
    nan, inf = (torch.tensor([value, *LOGITS[1:]]) for value in (float("nan"), float("inf")))
    overflow = {"temperature": 1.0, "repetition_penalty": 1e-45, "prompt": [0]}
    # The tokens that a structure leaves have scores, but those of others are no numbers.
    samplers = [sampler(), *(sampler(constraint=Allows({1})) for _ in range(2)), sampler(**overflow)]
    *errors, last = choose_all(
        torch.stack([nan, nan, inf, LOGITS, LOGITS]), [*samplers, sampler(temperature=0.0)]
    )
    assert last.token_id == 0
    assert [str(error) for error in errors] == [
        f"the model's highest score is {score}: no token can be chosen"
        for score in ("nan", "nan", "inf", "inf")
    ]


def test_a_request_that_forbids_all_that_is_left_is_at_fault_itself():
    ends = {"ends": [4], "min_tokens": 1}
    rows = [
        sampler(temperature=0.0, constraint=Allows({4}), **ends),
        sampler(ends=range(6), min_tokens=1),
        sampler(**ends),
    ]
    logits = torch.stack([LOGITS, LOGITS, torch.full_like(LOGITS, -torch.inf)])
    structured, unstructured, broken = choose_all(logits, rows)
    for refused in (structured, unstructured):
        assert isinstance(refused, RequestRefused)
        assert refused.param == "min_tokens"
    assert isinstance(broken, ValueError)


def test_the_rest_of_an_answer_is_the_same_after_an_interruption():
    whole = tokens(50, temperature=1.0, seed=5, presence_penalty=0.5)
    assert (
        tokens(43, temperature=1.0, seed=5, presence_penalty=0.5, prompt=whole[:7], answered=7) == whole[7:]
    )


NUMBERS = torch.arange(4000) / 4000


def drawn(scores=LOGITS, numbers=NUMBERS, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """How often each token is drawn over evenly spread numbers."""
    rows = len(numbers)
    filters = Filters(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )
    return Counter(draw(scores.expand(rows, -1), filters, numbers).tolist())


EQUAL = torch.tensor([1.0, 3.0, 3.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("scores", "filters", "allowed"),
    [
        (LOGITS, {}, {0, 1, 2, 3, 4}),
        (LOGITS, {"top_k": 1}, {0}),
        (LOGITS, {"top_k": 99}, {0, 1, 2, 3, 4}),
        (LOGITS, {"top_p": 0.01}, {0}),
        (LOGITS, {"top_p": 0.7}, {0, 1}),
        (LOGITS, {"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        (LOGITS, {"top_k": 3, "top_p": 0.6}, {0}),
        (LOGITS, {"min_p": 0.3}, {0, 1}),
        (LOGITS, {"min_p": 1.0}, {0}),
        (LOGITS, {"top_k": 3, "min_p": 0.3}, {0, 1}),
        (LOGITS, {"temperature": 0.01}, {0}),
        (EQUAL, {"top_k": 1}, {1, 2, 3}),
        (EQUAL, {"top_p": 0.2}, {1, 2, 3}),
        (EQUAL, {"min_p": 0.9}, {1, 2, 3}),
    ],
)
def test_filters_keep_the_best_by_their_probabilities(scores, filters, allowed):
    counts = drawn(scores, **filters)
    assert set(counts) == allowed
    chances = (scores / filters.get("temperature", 1.0)).softmax(-1)
    whole = sum(float(chances[token]) for token in allowed)
    assert all(abs(counts[token] - 4000 * float(chances[token]) / whole) <= 2 for token in allowed)


@pytest.mark.parametrize("more", [0, 1, 64])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 0.5}])
def test_the_best_alone_give_the_same_tokens_as_the_whole_vocabulary(more, filters, monkeypatch):
    scores = torch.randn(500, generator=torch.Generator().manual_seed(1)).mul(4).round().div(2)  # with equals
    monkeypatch.setattr("engine_adapter.torch_engine.sampling._MORE", more)
    narrow = drawn(scores, top_k=20, **filters)
    monkeypatch.setattr("engine_adapter.torch_engine.sampling._draw_of_best", nothing)
    assert drawn(scores, top_k=20, **filters) == narrow


def nothing(scores, filters, numbers):
    return torch.full_like(filters.top_k, -1)


def test_sums_of_a_gpu_give_no_chance_to_a_token_without_one():
    chances = torch.tensor([0.0, 0.5, 0.0, 0.0, 1e-9, 0.5, 0.0]).expand(len(NUMBERS) + 1, -1)
    sums = torch.tensor([1e-7, 0.5, 0.50001, 0.49999, 0.49999, 1.0, 1.00001]).repeat(len(chances), 1)
    numbers = torch.cat([NUMBERS, torch.ones(1)])
    assert Counter(_first_above(sums, chances, numbers).tolist()) == {1: 2000, 5: 2001}


@pytest.mark.parametrize("width", [1, 4, 20])
def test_the_end_of_top_p_is_found_wherever_it_lies(width, monkeypatch):
    scores = torch.linspace(3, -3, 40)
    monkeypatch.setattr("engine_adapter.torch_engine.sampling._CANDIDATES", width)
    chances = scores.softmax(-1)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        kept = int((chances.cumsum(-1) - chances < top_p).sum())
        assert set(drawn(scores, top_p=top_p)) <= set(range(kept))
        assert kept - 1 in drawn(scores, top_p=top_p)
