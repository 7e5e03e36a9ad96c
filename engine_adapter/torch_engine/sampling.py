"""Chooses the next tokens from logits: one pass over all rows of a step.

The order: penalties, `logit_bias`, no end before `min_tokens`, the request's `Grammar`; then temperature,
`top_k`, `top_p`, `min_p`. A random choice takes one number of the request's generator. It depends on the
seed and on how many tokens the answer has, not on the other requests of the step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.torch_engine.requests import (
    GenerationRequest,
    NoScores,
    RequestRefused,
    SamplingParams,
    Token,
)

_COLDEST = 1e-5
"""Below this temperature, sampling is greedy: dividing by less would only lose precision."""
_SEEDS = 2**64


class Sampler:
    """The rules by which the tokens of one request are chosen, and their state from token to token."""

    def __init__(
        self, request: GenerationRequest, *, ends: frozenset[int], vocab_size: int, seed: int
    ) -> None:
        """`ends` are the tokens that stop the request; `seed` is used when it has none."""
        self.params = params = request.sampling
        self.constraint = request.constraint  # allows some tokens, as a grammar does; None allows every one
        prompt, answered = request.token_ids, request.answered
        self.greedy = params.temperature < _COLDEST
        chosen = params.seed if params.seed is not None else seed
        # The rest of an answer takes the numbers that it would have taken without the interruption.
        # Draws its numbers, one for each token.
        self.random = np.random.Generator(np.random.PCG64(chosen % _SEEDS).advance(answered))
        self.tally: Tally | None = None  # the tokens that penalties concern; None without penalties
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            generated = prompt[len(prompt) - answered :]
            seen = prompt if params.repetition_penalty != 1.0 else generated
            self.tally = Tally(token for token in seen if token < vocab_size)
            for token in generated:
                self.tally.count(token)
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._left_to_min = params.min_tokens
        self._biased = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)

    @property
    def forbidden(self) -> NDArray[np.int64]:
        """Token ids that may not come next, whatever the constraint says."""
        return self._ends if self._left_to_min > 0 else self._ends[:0]

    @property
    def edits(self) -> bool:
        """True if `edit` would do anything."""
        rules = self.tally, self.constraint, self.params.logit_bias or None
        return any(rule is not None for rule in rules) or len(self.forbidden) > 0

    def edit(self, scores: Tensor) -> None:
        """Changes the scores [vocabulary] of its next token. Raises NoScores, and what a constraint does."""
        params, forbidden = self.params, self.forbidden
        leaves_few = self.constraint is not None or len(forbidden) > 0
        # What they leave may be numbers, although the model is broken.
        if leaves_few and not math.isfinite(highest := float(scores.max())):
            raise _no_scores(highest)
        if self.tally is not None:
            ids = _beside(scores, np.array(self.tally.ids))
            counts = _beside(scores, np.array(self.tally.counts))
            found, repetition = scores[ids], params.repetition_penalty
            found = torch.where(found > 0, found / repetition, found * repetition)
            scores[ids] = found - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if params.logit_bias:
            scores[_beside(scores, self._biased)] += _beside(scores, self._biases)
        if len(forbidden):
            scores[_beside(scores, forbidden)] = -torch.inf
        if self.constraint is not None:
            words = np.zeros(-(-len(scores) // 32), dtype="<i4")
            self.constraint.allow(words)
            allowed = np.unpackbits(words.view(np.uint8), count=len(scores), bitorder="little")
            scores.masked_fill_(_beside(scores, allowed) == 0, -torch.inf)

    def accept(self, token: int) -> None:
        """Moves on by a chosen token."""
        self._left_to_min -= 1
        if self.tally is not None:
            self.tally.count(token)
        if self.constraint is not None:
            self.constraint.accept(token)


class Tally:
    """Tokens that were seen, each once, and how often the answer has them, in the same order."""

    def __init__(self, seen: Iterable[int]) -> None:
        self.ids = array("q", dict.fromkeys(seen))
        self.counts = array("f", bytes(4 * len(self.ids)))
        self._places = {token: place for place, token in enumerate(self.ids)}

    def count(self, token: int) -> None:
        """Counts a token of the answer."""
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.counts.append(0.0)
        self.counts[place] += 1.0


@torch.inference_mode()
def choose_all(logits: Tensor, samplers: Sequence[Sampler]) -> list[Token | Exception]:
    """One choice per row of `logits` [requests, vocabulary], or why there is none. Does not change them."""
    if not samplers:
        return []
    scores, errors = _edited(logits, samplers)
    best = scores.max(-1)
    tokens = best.indices
    for row, highest in enumerate(best.values.tolist()):
        if not math.isfinite(highest):  # on CUDA, sampling from NaN breaks the device for every request
            errors.setdefault(row, _no_choice(highest, samplers[row], logits[row]))
    drawn = [row for row, each in enumerate(samplers) if not each.greedy and row not in errors]
    if drawn:
        few = [samplers[row] for row in drawn]
        numbers = torch.tensor([each.random.random() for each in few], device=logits.device)
        rows = scores if len(few) == len(samplers) else scores[drawn]
        tokens[drawn] = draw(rows, Filters.of([each.params for each in few], logits.device), numbers)
    choices = _choices(logits, tokens, samplers)
    return [errors.get(row) or _accepted(sampler, choices[row]) for row, sampler in enumerate(samplers)]


def _no_choice(highest: float, sampler: Sampler, logits: Tensor) -> Exception:
    """Why no token can be chosen: the request forbids all that are left, or the model is at fault."""
    if highest == -math.inf and len(sampler.forbidden) and math.isfinite(logits.max()):
        return RequestRefused("min_tokens forbids the only tokens that may come next", param="min_tokens")
    return _no_scores(highest)


def _no_scores(highest: float) -> NoScores:
    return NoScores(f"the model's highest score is {highest}: no token can be chosen")


def _accepted(sampler: Sampler, choice: Token) -> Token | Exception:
    try:
        sampler.accept(choice.token_id)
    except Exception as error:  # noqa: BLE001 - the error of this row's request alone
        return error
    return choice


def _edited(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[Tensor, dict[int, Exception]]:
    """The scores to choose from, and errors by row."""
    if not any(each.edits for each in samplers):
        return logits.float(), {}
    scores = logits.to(torch.float32, copy=True)
    errors: dict[int, Exception] = {}
    for row, sampler in enumerate(samplers):
        try:
            sampler.edit(scores[row])
        except Exception as error:  # noqa: BLE001 - the error of this row's request alone
            errors[row] = error
    return scores, errors


def _beside(scores: Tensor, values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(scores.device)


def _choices(logits: Tensor, tokens: Tensor, samplers: Sequence[Sampler]) -> list[Token]:
    """The chosen tokens; with the model's own logprobs for the rows that want them."""
    choices = [Token(token) for token in tokens.tolist()]
    asked = [each.params.logprobs for each in samplers]
    wanted = {row: most for row, most in enumerate(asked) if most is not None}
    if wanted:
        rows = list(wanted)
        scored = logprobs_of(logits[rows], tokens[rows], max(wanted.values()))
        for row, (logprob, best) in zip(rows, scored, strict=True):
            choices[row] = Token(choices[row].token_id, logprob, best[: wanted[row]])
    return choices


def logprobs_of(
    logits: Tensor, tokens: Tensor, best: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row the logprob of its token, and the `best` tokens with theirs, best first."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    top = logprobs.topk(min(best, logprobs.shape[1]))
    pairs = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [(logprob, tuple(zip(ids, values, strict=True))) for logprob, ids, values in pairs]


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

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Filters:
        """Those of each row."""
        values = ([getattr(each, name) for each in params] for name in cls._fields)
        return cls(*(torch.tensor(each, device=device) for each in values))

    @property
    def ranked(self) -> Tensor:
        """Rows whose limits depend on the order of the scores."""
        return (self.top_k > 0) | (self.top_p < 1.0)

    def rows(self, index: Tensor) -> Filters:
        """The filters of some rows, in order."""
        return self if len(index) == len(self.top_k) else Filters(*(values[index] for values in self))


def draw(scores: Tensor, filters: Filters, numbers: Tensor) -> Tensor:
    """Token ids [rows] for `scores` [rows, vocabulary] and random `numbers` [rows], from 0 to below 1. The
    token of a row depends on its own scores, filters and number alone. The highest score of each row is
    finite. Tokens with equal scores are kept or left out together."""
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
    tokens = ids.gather(1, _first_above(chances.cumsum(-1), chances, numbers)[:, None])[:, 0]
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
    chances = scaled.exp_()
    return _first_above(chances.cumsum(-1), chances, numbers)


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


def _first_above(sums: Tensor, chances: Tensor, numbers: Tensor) -> Tensor:
    """The place in each row whose share of the sum holds the row's number. `sums` are those of `chances`.
    Changes `sums`. A GPU adds in parallel, so rounding may leave a sum below the one before it, or above it
    at a token that has no chance (PyTorch's issue 13867)."""
    sums.masked_fill_(chances == 0, 0.0)
    total = sums.amax(-1)
    # The sum at which a row's number lies, always below its total.
    target = torch.minimum(numbers.to(total.dtype) * total, total.nextafter(torch.zeros_like(total)))
    return (sums > target[:, None]).to(torch.uint8).argmax(-1)  # the first of equals
