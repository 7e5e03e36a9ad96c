"""Draws tokens at random from rows of scores, all rows in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CANDIDATES = 1024
"""Best tokens in which the end of `top_p` is looked for first. To sort a vocabulary takes 16 times as long."""


class Filters(NamedTuple):
    """What may be drawn; see `SamplingParams`. All are [rows], on the device of the scores."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor) -> Filters:
        """The filters of some rows."""
        return Filters(*(values[index] for values in self))


def draw(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    """Token ids [rows] for `scores` [rows, vocabulary] and random `numbers` [rows], from 0 to below 1.

    The token of a row depends on its own scores, filters and number alone. Each row needs a highest score that
    is finite. Tokens with equal scores are kept or left out together.
    """
    scaled = (scores - scores.max(-1, keepdim=True).values) / filters.temperature[:, None]
    sums = scaled.exp().masked_fill_(scaled < _lowest(scaled, filters)[:, None], 0.0).cumsum(-1)
    total = sums[:, -1]
    # The first sum above the target ends a token that may be drawn. No sum is above the total.
    target = torch.minimum(numbers.to(total.dtype) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0]


def _lowest(scaled: Tensor, filters: Filters) -> Tensor:
    """The lowest score that may be drawn, by row."""
    lowest = filters.min_p.log()
    cut = ((filters.top_k > 0) | (filters.top_p < 1.0)).nonzero()[:, 0]
    if len(cut):
        lowest[cut] = torch.maximum(lowest[cut], _last_of_best(scaled[cut], filters.rows(cut)))
    return lowest


def _last_of_best(scaled: Tensor, filters: Filters) -> Tensor:
    """The score of the last token that `top_k` and `top_p` keep, by row. Each row has one of them."""
    width = int(filters.top_k.max())
    if bool((filters.top_k == 0).any()):
        width = max(width, _CANDIDATES)
    last, found = _last_among(scaled, filters, width)
    missed = (~found).nonzero()[:, 0]
    if len(missed):
        last[missed], _ = _last_among(scaled[missed], filters.rows(missed), scaled.shape[1])
    return last


def _last_among(scaled: Tensor, filters: Filters, width: int) -> tuple[Tensor, Tensor]:
    """The same, looked for among the `width` best tokens; and whether it was there."""
    width = min(width, scaled.shape[1])
    values = scaled.topk(width).values
    chances = values.exp()
    sums = chances.cumsum(-1)
    by_k = filters.top_k > 0
    most = torch.where(by_k, filters.top_k, width).clamp(max=width)
    mass = torch.where(by_k, sums.gather(1, most[:, None] - 1)[:, 0], scaled.exp().sum(-1))
    share = torch.where(filters.top_p < 1.0, filters.top_p * mass, torch.inf)
    before = (sums - chances < share[:, None]).sum(-1)  # the token that crosses the limit stays
    kept = torch.minimum(before, most).clamp(min=1)
    found = by_k | (before < width) | torch.tensor(width == scaled.shape[1], device=scaled.device)
    return values.gather(1, kept[:, None] - 1)[:, 0], found
