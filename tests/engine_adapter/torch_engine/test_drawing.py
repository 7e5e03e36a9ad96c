from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine_adapter.torch_engine.sampling import Filters, _first_above, _pick, draw

SCORES = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -30.0])
NUMBERS = torch.arange(4000) / 4000


def drawn(scores=SCORES, numbers=NUMBERS, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """How often each token is drawn over evenly spread numbers."""
    rows = len(numbers)
    filters = Filters(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )
    return Counter(draw(scores.expand(rows, -1), filters, numbers).tolist())


def test_frequencies_are_the_probabilities():
    counts = drawn()
    expected = SCORES.softmax(-1) * 4000
    assert all(abs(counts[token] - float(expected[token])) <= 1 for token in range(6))


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.6}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.01}, {0}),
        ({"temperature": 1e-5, "top_p": 0.9}, {0}),
    ],
)
def test_filters_keep_the_best(filters, allowed):
    assert set(drawn(**filters)) == allowed


def test_tokens_with_equal_scores_stay_together():
    equal = torch.tensor([1.0, 3.0, 3.0, 3.0, 1.0])
    for filters in ({"top_k": 1}, {"top_p": 0.2}, {"min_p": 0.9}):
        assert set(drawn(equal, **filters)) == {1, 2, 3}


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


def test_no_number_draws_a_token_that_is_left_out():
    scores = torch.full((300,), -torch.inf)
    scores[7] = scores[100] = 0.0
    ends = torch.tensor([0.0, 1 - 2**-24, 1.0])
    assert drawn(scores, ends) == {7: 1, 100: 2}


def test_sums_of_a_gpu_give_no_chance_to_a_token_without_one():
    chances = torch.tensor([0.0, 0.5, 0.0, 0.0, 1e-9, 0.5, 0.0]).expand(len(NUMBERS) + 1, -1)
    sums = torch.tensor([1e-7, 0.5, 0.50001, 0.49999, 0.49999, 1.0, 1.00001]).repeat(len(chances), 1)
    numbers = torch.cat([NUMBERS, torch.ones(1)])
    assert Counter(_first_above(sums, chances, numbers).tolist()) == {1: 2000, 5: 2001}


def test_a_gpu_picks_what_a_cpu_does():
    draw = torch.Generator().manual_seed(2)
    chances = torch.rand(500, 40, generator=draw) * (torch.rand(500, 40, generator=draw) < 0.3)
    chances[:, 7] = 0.1
    numbers = torch.rand(500, generator=draw)
    found = _first_above(chances.cumsum(-1), chances, numbers)
    assert torch.equal(found, _pick(chances.clone(), numbers))


@pytest.mark.parametrize("width", [1, 4, 20])
def test_the_end_of_top_p_is_found_wherever_it_lies(width, monkeypatch):
    scores = torch.linspace(3, -3, 40)
    monkeypatch.setattr("engine_adapter.torch_engine.sampling._CANDIDATES", width)
    chances = scores.softmax(-1)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        kept = int((chances.cumsum(-1) - chances < top_p).sum())
        assert set(drawn(scores, top_p=top_p)) <= set(range(kept))
        assert kept - 1 in drawn(scores, top_p=top_p)


def test_rows_have_filters_of_their_own():
    filters = Filters(
        torch.tensor([1.0, 1.0, 1e-3, 1.0]),
        torch.tensor([0, 2, 0, 0]),
        torch.tensor([1.0, 1.0, 1.0, 0.6]),
        torch.zeros(4),
    )
    numbers = torch.full((4,), 0.9999)
    assert draw(SCORES.repeat(4, 1), filters, numbers).tolist() == [4, 1, 0, 0]
