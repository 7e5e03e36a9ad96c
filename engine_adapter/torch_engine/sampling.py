"""Chooses tokens from logits; each request has its own sampler."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_adapter.torch_engine.requests import SamplingParams

_COLDEST = 1e-5
"""Below this temperature, sampling is greedy: dividing by less would only lose precision."""


class Choice(NamedTuple):
    """A token, with logprobs if asked for; see `Token`."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class Sampler:
    """Chooses the tokens of one request and keeps the state of its penalties.

    Attributes:
        plain: True when it chooses the largest logit and keeps no state.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: array[int],
        *,
        answered: int = 0,
        ends: frozenset[int],
        vocab_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        """`ends` are the tokens that stop the request; `seed` is used when `params` has none; the last
        `answered` tokens of the prompt were generated before."""
        self._params = params
        self._left_to_min = params.min_tokens
        self._ends = torch.tensor(sorted(ends), device=device, dtype=torch.long) if ends else None
        self._greedy = params.temperature < _COLDEST
        self._generator: torch.Generator | None = None
        if not self._greedy:
            chosen = params.seed if params.seed is not None else seed
            # Other numbers for the rest of an answer: the same ones would choose like its beginning.
            self._generator = torch.Generator(device).manual_seed((chosen + answered) & (2**63 - 1))
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            generated = torch.tensor(prompt[len(prompt) - answered :], device=device, dtype=torch.long)
            self._counts = torch.bincount(generated, minlength=vocab_size).float()
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            tokens = torch.tensor(prompt, device=device, dtype=torch.long)
            self._seen[tokens[tokens < vocab_size]] = True

    @property
    def plain(self) -> bool:
        """See the class."""
        return (
            self._greedy
            and self._counts is None
            and self._seen is None
            and self._params.logprobs is None
            and self._left_to_min <= 0
        )

    def choose(self, logits: Tensor) -> Choice:
        """The next token for `logits` [vocabulary]; does not change them.

        Raises:
            ValueError: the scores hold NaN or infinity, so that no token can be chosen.
        """
        scores = self._penalised(logits.float())
        token = int(scores.argmax()) if self._greedy else self._sample(scores / self._params.temperature)
        self._remember(token)
        if self._params.logprobs is None:
            return Choice(token)
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(min(self._params.logprobs, logprobs.shape[0]))
        return Choice(
            token,
            float(logprobs[token]),
            tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
        )

    def _penalised(self, scores: Tensor) -> Tensor:
        params = self._params
        if self._seen is not None:
            penalty = params.repetition_penalty
            lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores = torch.where(self._seen, lowered, scores)
        if self._counts is not None:
            scores = (
                scores
                - params.frequency_penalty * self._counts
                - params.presence_penalty * (self._counts > 0)
            )
        if self._left_to_min > 0 and self._ends is not None:
            scores = scores.index_fill(0, self._ends, float("-inf"))
        return scores

    def _sample(self, scores: Tensor) -> int:
        params = self._params
        _check_finite(float(scores.max()))  # on CUDA, sampling from NaN breaks the device for every request
        ids: Tensor | None = None
        if 0 < params.top_k < scores.shape[0]:
            scores, ids = scores.topk(params.top_k)
        elif params.top_p < 1.0:
            scores, ids = scores.sort(descending=True)
        chances = scores.softmax(-1)
        if params.top_p < 1.0:  # the token that crosses the limit stays, so the best one always does
            chances = chances * (chances.cumsum(-1) - chances < params.top_p)
        if params.min_p > 0.0:
            chances = chances * (chances >= params.min_p * chances.max())
        drawn = int(torch.multinomial(chances, 1, generator=self._generator))
        return drawn if ids is None else int(ids[drawn])

    def _remember(self, token: int) -> None:
        self._left_to_min -= 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True


@torch.inference_mode()
def choose_all(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception]:
    """One choice per row of `logits` [requests, vocabulary], or why there is none."""
    if not samplers:
        return []
    best = logits.max(-1)
    rows = zip(best.values.tolist(), best.indices.tolist(), logits, samplers, strict=True)
    return [_choose(*row) for row in rows]


def _choose(highest: float, best: int, logits: Tensor, sampler: Sampler) -> Choice | Exception:
    try:
        _check_finite(highest)
        return Choice(best) if sampler.plain else sampler.choose(logits)
    except Exception as error:  # noqa: BLE001 - the error of this row's request alone
        return error


def _check_finite(highest: float) -> None:
    if not math.isfinite(highest):
        raise ValueError(f"the model's highest score is {highest}: no token can be chosen")
