"""Draws tokens at random from rows of scores, all rows in one pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 1024
"""Best tokens among which `top_p` is tried first, in a vocabulary of 8 times as many or more: to sort such a
vocabulary takes several times as long."""
_MORE = 32
"""Tokens looked at beyond `top_k`: some may have the score of its last one."""
_NONE = -1


class Filters(NamedTuple):
    """Limits on the tokens that may be drawn; see `SamplingParams`. All are [rows], on the scores' device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @property
    def ranked(self) -> Tensor:
        """Rows whose limits depend on the order of the scores."""
        return (self.top_k > 0) | (self.top_p < 1.0)

    def rows(self, index: Tensor) -> Filters:
        """The filters of some rows, in order."""
        return self if len(index) == len(self.top_k) else Filters(*(values[index] for values in self))


def draw(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    """Token ids [rows] for `scores` [rows, vocabulary] and random `numbers` [rows], from 0 to below 1.

    The token of a row depends on its own scores, filters and number alone. The highest score of each row is
    finite. Tokens with equal scores are kept or left out together.
    """
    tokens = torch.full_like(filters.top_k, _NONE)
    few = filters.ranked if scores.shape[1] >= 8 * _CANDIDATES else filters.top_k > 0
    for rows, of_rows in ((few, _draw_of_best), (None, _draw_of_all)):
        index = (tokens == _NONE if rows is None else rows).nonzero()[:, 0]
        if len(index):
            part = scores if len(index) == len(scores) else scores[index]
            tokens[index] = of_rows(part, filters.rows(index), numbers[index])
    return tokens


def _draw_of_best(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    """The tokens of rows with `top_k` or `top_p`, drawn among the best alone; `_NONE` where they are too few:
    `top_p` keeps more, or equal scores go on behind them."""
    by_k = filters.top_k > 0
    width = max(int(filters.top_k.max()) + _MORE, 0 if bool(by_k.all()) else _CANDIDATES)
    best = scores.topk(min(width, scores.shape[1]))
    highest, temperature = best.values[:, :1], filters.temperature[:, None]
    scaled = (best.values - highest).div_(temperature)
    total = None
    if width < scores.shape[1] and not bool(by_k.all()):
        total = (scores - highest).div_(temperature).exp_().sum(-1)
    lowest = _lowest(scaled, filters, total)
    ids, order = best.indices.sort(-1)
    chances = scaled.exp().masked_fill_(scaled < lowest[:, None], 0.0).gather(1, order)
    tokens = ids.gather(1, _pick(chances, numbers)[:, None])[:, 0]
    open_ended = (scaled[:, -1] >= lowest) & (scaled.shape[1] < scores.shape[1])
    return tokens.masked_fill_(open_ended, _NONE)


def _draw_of_all(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    scaled = (scores - scores.max(-1, keepdim=True).values).div_(filters.temperature[:, None])
    lowest = filters.min_p.log()
    ranked = filters.ranked.nonzero()[:, 0]
    if len(ranked):
        lowest[ranked] = _lowest(_sorted(scaled[ranked]), filters.rows(ranked))
    if bool((lowest > -torch.inf).any()):
        scaled.masked_fill_(scaled < lowest[:, None], -torch.inf)
    return _pick(scaled.exp_(), numbers)


def _sorted(scaled: Tensor) -> Tensor:
    """The scores of each row, best first. On a CPU, numpy sorts them in less time."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.sort(scaled.numpy())).flip(-1)
    return scaled.sort(descending=True).values


def _lowest(values: Tensor, filters: Filters, total: Tensor | None = None) -> Tensor:
    """The lowest score that the filters keep, by row, as far as the best `values` show it. `total` is the sum
    of all chances of a row; None if that is the sum of those of `values`."""
    width = values.shape[1]
    chances = values.exp()
    sums = chances.cumsum(-1)
    by_k = filters.top_k > 0
    most = torch.where(by_k, filters.top_k, width).clamp(max=width)
    mass = sums.gather(1, most[:, None] - 1)[:, 0]
    if total is not None:
        mass = torch.where(by_k, mass, total)
    share = torch.where(filters.top_p < 1.0, filters.top_p * mass, torch.inf)
    before = (sums - chances < share[:, None]).sum(-1)  # the token that crosses the limit stays
    last = torch.minimum(before, most).clamp(min=1)
    return torch.maximum(filters.min_p.log(), values.gather(1, last[:, None] - 1)[:, 0])


def _pick(chances: Tensor, numbers: Tensor) -> Tensor:
    """The place in each row whose share of the sum holds the row's number. Changes `chances`."""
    sums = chances.cumsum_(-1)
    total = sums[:, -1]
    # The first sum above the target ends a token that may be drawn. No sum is above the total.
    target = torch.minimum(numbers.to(total.dtype) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0]
