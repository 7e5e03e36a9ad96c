"""The computation of one step: a request that fails costs no other request its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine_adapter.torch_engine.prompt_scores import keep_scores
from engine_adapter.torch_engine.requests import RequestRefused
from engine_adapter.torch_engine.runner import Runner, Work
from engine_adapter.torch_engine.sampling import Choice, NoScores, choose_all
from engine_adapter.torch_engine.scheduler import Item

Outcome = Choice | Exception | None
"""The outcome of one item: the next token, an error, or None while its prompt is not complete."""

_log = logging.getLogger("kvpin.engine")
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "HIP error")


def is_fatal(error: Exception) -> bool:
    """True for an error of the device. It stays broken for as long as the process lives, with its KV."""
    if isinstance(error, torch.AcceleratorError):
        return True
    if isinstance(error.__cause__, Exception) and is_fatal(error.__cause__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE_ERRORS)


def compute(runner: Runner, items: Sequence[Item]) -> list[Outcome]:
    """The outcome of each item, in order.

    When a step fails, its items run one by one: only those that fail alone have failed. That repeats no
    choice: tokens are chosen after the step has run. KV that was written already is written again.

    Raises:
        Exception: the device is broken, see `is_fatal`; nothing can run on it any more.
    """
    try:
        return _run(runner, items)
    except Exception as error:
        if is_fatal(error):
            raise
        if len(items) == 1:
            return [error]
        _log.warning("a step of %d requests failed (%r): running them one by one", len(items), error)
    return [outcome for item in items for outcome in compute(runner, [item])]


def _run(runner: Runner, items: Sequence[Item]) -> list[Outcome]:
    work = [
        Work(item.active.sequence, item.count, item.logits, item.active.request.embeddings) for item in items
    ]
    wants_hidden = any(item.wants_hidden for item in items)
    logits, hidden = runner.run_with_hidden(work) if wants_hidden else (runner.run(work), None)
    samplers = [item.active.sampler for item in items if item.completes]
    chosen = iter(choose_all(keep_scores(logits, items), samplers))
    outcomes: list[Outcome] = [_judged(next(chosen), item) if item.completes else None for item in items]
    if hidden is not None:
        outcomes = _with_hidden(outcomes, items, hidden)
    for outcome in outcomes:
        if isinstance(outcome, Exception) and is_fatal(outcome):
            raise outcome
    return outcomes


def _judged(outcome: Choice | Exception, item: Item) -> Choice | Exception:
    """The outcome. Embeddings of a client's are the cause of scores that are no numbers."""
    if isinstance(outcome, NoScores) and item.active.request.embeddings:
        return RequestRefused("the prompt's embeddings lead to scores that are no numbers", param="prompt")
    return outcome


def _with_hidden(outcomes: Sequence[Outcome], items: Sequence[Item], hidden: Tensor) -> list[Outcome]:
    """Adds the hidden states that items want to their choices. `hidden` has the rows of the logits."""
    rows = accumulate(item.logits for item in items)
    return [
        outcome._replace(hidden=hidden[row - 1].float().cpu().numpy().tobytes())
        if item.wants_hidden and isinstance(outcome, Choice)
        else outcome
        for outcome, item, row in zip(outcomes, items, rows, strict=True)
    ]
