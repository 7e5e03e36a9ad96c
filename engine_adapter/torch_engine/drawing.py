"""Draws tokens at random from rows of scores, all rows in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CANDIDATES = 1024
"""Best tokens among which `top_p` is tried first. To sort a whole vocabulary takes 16 times as long."""


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

    The token of a row depends on its own scores, filters and number alone. The highest score of each row is
    finite. Tokens with equal scores are kept or left out together.
    """
    scaled = (scores - scores.max(-1, keepdim=True).values).div_(filters.temperature[:, None])
    _filter(scaled, filters)
    sums = scaled.exp_().cumsum_(-1)
    total = sums[:, -1]
    # The first sum above the target ends a token that may be drawn. No sum is above the total.
    target = torch.minimum(numbers.to(total.dtype) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0]


def _filter(scaled: Tensor, filters: Filters) -> None:
    """Sets the scores of tokens that may not be drawn to minus infinity."""
    cut = ((filters.top_k > 0) | (filters.top_p < 1.0)).nonzero()[:, 0]
    lowest = filters.min_p.log()
    if len(cut):
        rows = scaled if len(cut) == len(scaled) else scaled[cut]
        lowest[cut] = torch.maximum(lowest[cut], _last_of_best(rows, filters.rows(cut)))
    if bool((lowest > -torch.inf).any()):
        scaled.masked_fill_(scaled < lowest[:, None], -torch.inf)


def _last_of_best(scaled: Tensor, filters: Filters) -> Tensor:
    """The score of the last token that `top_k` and `top_p` keep, by row. Each row has one of them."""
    width = int(filters.top_k.max())
    if bool((filters.top_k == 0).any()):
        width = max(width, _CANDIDATES)
    last, found = _last_among(scaled, filters, width)
    missed = (~found).nonzero()[:, 0]
    if len(missed) and width < scaled.shape[1]:
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
    mass = sums.gather(1, most[:, None] - 1)[:, 0]
    if not bool(by_k.all()):
        mass = torch.where(by_k, mass, scaled.exp().sum(-1))
    share = torch.where(filters.top_p < 1.0, filters.top_p * mass, torch.inf)
    before = (sums - chances < share[:, None]).sum(-1)  # the token that crosses the limit stays
    found = by_k | (before < width)
    last = torch.minimum(before, most).clamp(min=1)
    return values.gather(1, last[:, None] - 1)[:, 0], found
