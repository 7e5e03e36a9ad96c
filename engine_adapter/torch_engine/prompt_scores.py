"""Logprobs of prompt tokens: how likely the model found each of them after those before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_adapter.torch_engine.scheduler import Active, Item

_ROWS = 32  # of the vocabulary's size, in float32, at a time
Scores = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@torch.inference_mode()
def keep_scores(logits: Tensor, items: Sequence[Item]) -> Tensor:
    """Keeps the scores of the prompts that want them, in `Active.scores`. Returns the logits to choose from.

    Args:
        logits: [rows, vocabulary], for each item `Item.logits` rows.
        items: the step's items, in order.
    """
    if not any(item.active.wants_scores for item in items):
        return logits
    last, begin = [], 0
    for item in items:
        rows = logits[begin : begin + item.logits]
        begin += item.logits
        if item.active.wants_scores:
            item.active.scores = _scores(rows, item.active, item.count)
        if item.completes:
            last.append(begin - 1)
    return logits[last]


def _scores(rows: Tensor, active: Active, count: int) -> Scores:
    """Scores of the prompt tokens after each of the next `count`, but for those that are known."""
    prompt = active.request.token_ids
    begin = active.sequence.computed
    first = max(active.scored - 1, begin)
    targets = prompt[first + 1 : begin + count + 1]
    active_rows = rows[first - begin : first - begin + len(targets)]
    best = active.request.sampling.prompt_logprobs or 0
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] = []
    for at in range(0, len(targets), _ROWS):
        logprobs = active_rows[at : at + _ROWS].float().log_softmax(-1)
        wanted = torch.tensor(targets[at : at + _ROWS], device=rows.device, dtype=torch.long)
        chosen = logprobs.gather(1, wanted[:, None])[:, 0].tolist()
        top = logprobs.topk(min(best, logprobs.shape[1]))
        pairs = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
        scores += [(score, tuple(zip(ids, values, strict=True))) for score, ids, values in pairs]
    return tuple(scores)
