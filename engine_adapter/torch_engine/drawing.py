"""Draws tokens at random from rows of scores, all rows in one pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 1024
"""Best tokens among which `top_p` is tried first. To sort a large vocabulary takes several times as long."""
_MORE = 32
"""Tokens looked at beyond `top_k`: some may have the score of its last one."""
_NONE = -1


class Filters(NamedTuple):
    """Limits on the tokens that may be drawn; see `SamplingParams`. All are [rows], on the scores' device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor) -> Filters:
        """The filters of some rows, in order."""
        return self if len(index) == len(self.top_k) else Filters(*(values[index] for values in self))


def draw(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    """Token ids [rows] for `scores` [rows, vocabulary] and random `numbers` [rows], from 0 to below 1.

    The token of a row depends on its own scores, filters and number alone. The highest score of each row is
    finite. Tokens with equal scores are kept or left out together.
    """
    tokens = torch.full_like(filters.top_k, _NONE)
    for rows, of_rows in ((filters.top_k > 0, _draw_of_best), (None, _draw_of_all)):
        index = (tokens == _NONE if rows is None else rows).nonzero()[:, 0]
        if len(index):
            part = scores if len(index) == len(scores) else scores[index]
            tokens[index] = of_rows(part, filters.rows(index), numbers[index])
    return tokens


def _draw_of_best(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    """The tokens of rows with `top_k`, without a look at the whole vocabulary; `_NONE` where equal scores go
    on beyond what was looked at."""
    best = scores.topk(min(int(filters.top_k.max()) + _MORE, scores.shape[1]))
    scaled = (best.values - best.values[:, :1]).div_(filters.temperature[:, None])
    last, _ = _last_among(scaled, scaled, filters)
    lowest = torch.maximum(filters.min_p.log(), last)
    ids, order = best.indices.sort(-1)
    chances = scaled.exp().masked_fill_(scaled < lowest[:, None], 0.0).gather(1, order)
    tokens = ids.gather(1, _pick(chances, numbers)[:, None])[:, 0]
    open_ended = (scaled[:, -1] >= lowest) & (scaled.shape[1] < scores.shape[1])
    return tokens.masked_fill_(open_ended, _NONE)


def _draw_of_all(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    scaled = (scores - scores.max(-1, keepdim=True).values).div_(filters.temperature[:, None])
    lowest = filters.min_p.log()
    cut = ((filters.top_k > 0) | (filters.top_p < 1.0)).nonzero()[:, 0]
    if len(cut):
        rows = scaled if len(cut) == len(scaled) else scaled[cut]
        lowest[cut] = torch.maximum(lowest[cut], _last_of_best(rows, filters.rows(cut)))
    if bool((lowest > -torch.inf).any()):
        scaled.masked_fill_(scaled < lowest[:, None], -torch.inf)
    return _pick(scaled.exp_(), numbers)


def _pick(chances: Tensor, numbers: Tensor) -> Tensor:
    """The place in each row whose share of the sum holds the row's number. Changes `chances`."""
    sums = chances.cumsum_(-1)
    total = sums[:, -1]
    # The first sum above the target ends a token that may be drawn. No sum is above the total.
    target = torch.minimum(numbers.to(total.dtype) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0]


def _last_of_best(scaled: Tensor, filters: Filters) -> Tensor:
    """The score of the last token that `top_k` and `top_p` keep, by row. Each row has one of them."""
    width = int(filters.top_k.max())
    if bool((filters.top_k == 0).any()):
        width = max(width, _CANDIDATES)
    values = _best(scaled, width)
    last, found = _last_among(values, scaled, filters)
    missed = (~found).nonzero()[:, 0]
    if len(missed):
        rows = scaled[missed]
        last[missed], _ = _last_among(_best(rows, rows.shape[1]), rows, filters.rows(missed))
    return last


def _best(scaled: Tensor, width: int) -> Tensor:
    """At least the `width` highest scores of each row, best first."""
    size = scaled.shape[1]
    if scaled.device.type == "cpu" and width > size // 8:  # from there on, numpy sorts all in less time
        return torch.from_numpy(np.sort(scaled.numpy())).flip(-1)
    return scaled.topk(min(width, size)).values


def _last_among(values: Tensor, scaled: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """The same, looked for among the best `values`; and whether it is there."""
    width = values.shape[1]
    chances = values.exp()
    sums = chances.cumsum(-1)
    by_k = filters.top_k > 0
    most = torch.where(by_k, filters.top_k, width).clamp(max=width)
    mass = sums.gather(1, most[:, None] - 1)[:, 0]
    if width < scaled.shape[1] and not bool(by_k.all()):
        mass = torch.where(by_k, mass, scaled.exp().sum(-1))
    share = torch.where(filters.top_p < 1.0, filters.top_p * mass, torch.inf)
    before = (sums - chances < share[:, None]).sum(-1)  # the token that crosses the limit stays
    last = torch.minimum(before, most).clamp(min=1)
    found = by_k | (before < width) if width < scaled.shape[1] else torch.ones_like(by_k)
    return values.gather(1, last[:, None] - 1)[:, 0], found
