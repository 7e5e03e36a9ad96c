"""The computation of one step: a request that fails costs no other request its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from msgspec.structs import replace
from torch import Tensor

from engine_adapter.torch_engine.requests import NoScores, RequestRefused, Token
from engine_adapter.torch_engine.runner import Runner, Work
from engine_adapter.torch_engine.sampling import choose_all, logprobs_of
from engine_adapter.torch_engine.scheduler import Item

Outcome = Token | Exception | None
"""The outcome of one item: the next token, an error, or None while its prompt is not complete."""

_log = logging.getLogger("kvpin.engine")
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "HIP error")
_ROWS = 32  # of the vocabulary's size, in float32, that are scored at a time


def is_fatal(error: Exception) -> bool:
    """True for an error of the device. It stays broken for as long as the process lives, with its KV."""
    if isinstance(error, torch.AcceleratorError):
        return True
    if isinstance(error.__cause__, Exception) and is_fatal(error.__cause__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE_ERRORS)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: torch adds advice on debugging to errors of the device."""
    return str(error).partition("\n")[0]


def compute(runner: Runner, items: Sequence[Item]) -> list[Outcome]:
    """The outcome of each item, in order. Keeps the logprobs of prompts that want them in `Active.scores`.

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
            return [_judged(error, items[0], None)]
        _log.warning("a step of %d requests failed (%r): running them one by one", len(items), error)
    return [outcome for item in items for outcome in compute(runner, [item])]


@torch.inference_mode()
def _run(runner: Runner, items: Sequence[Item]) -> list[Outcome]:
    work = [
        Work(item.active.sequence, item.count, item.logits, item.active.request.embeddings) for item in items
    ]
    wants_hidden = any(item.wants_hidden for item in items)
    logits, hidden = runner.run_with_hidden(work) if wants_hidden else (runner.run(work), None)
    ends = list(accumulate(item.logits for item in items))
    for item, end in zip(items, ends, strict=True):
        if item.active.scores is not None and item.logits:
            item.active.scores += _scores(logits[end - item.logits : end], item)
    complete = [(item, end - 1) for item, end in zip(items, ends, strict=True) if item.completes]
    rows = [row for _, row in complete]
    chosen = choose_all(
        logits if len(rows) == len(logits) else logits[rows], [item.active.sampler for item, _ in complete]
    )
    made = iter(
        _judged(choice, item, None if hidden is None else hidden[row])
        for choice, (item, row) in zip(chosen, complete, strict=True)
    )
    return [next(made) if item.completes else None for item in items]


def _judged(choice: Token | Exception, item: Item, hidden: Tensor | None) -> Token | Exception:
    """The outcome of a choice. Embeddings of a client's are the cause of scores that are no numbers. Raises
    errors of the device."""
    if isinstance(choice, NoScores) and item.active.request.embeddings:
        return RequestRefused("the prompt's embeddings lead to scores that are no numbers", param="prompt")
    if isinstance(choice, Exception):
        if is_fatal(choice):
            raise choice
        return choice
    if hidden is None or not item.wants_hidden:
        return choice
    return replace(choice, hidden=hidden.float().cpu().numpy().tobytes())


def _scores(rows: Tensor, item: Item) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Logprobs of the prompt tokens after each of the item's, but for those that are known. `rows` are the
    logits after the item's tokens."""
    active = item.active
    begin, known = active.sequence.computed, len(active.scores or ())
    first = max(known, begin)
    targets = active.request.token_ids[first + 1 : begin + item.count + 1]
    best = active.request.sampling.prompt_logprobs or 0
    return [
        score
        for at in range(0, len(targets), _ROWS)
        for score in logprobs_of(
            rows[first - begin + at : first - begin + len(targets)][:_ROWS],
            torch.tensor(targets[at : at + _ROWS], device=rows.device, dtype=torch.long),
            best,
        )
    ]
