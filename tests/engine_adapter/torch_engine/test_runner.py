"""Which sequences of a step attend together. What comes of it: test_engine.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from engine_adapter.torch_engine.runner import PADDING_TOKENS, Runner

SIZE = 4
LONG = PADDING_TOKENS // SIZE + 2


@pytest.mark.parametrize(
    ("counts", "blocks", "most_blocks", "groups"),
    [
        ([1, 1, 1], [1, 2, 2], 99, [(0, 2)]),
        ([1, 1, 3, 1], [1, 1, 1, 1], 99, [(0, 1), (2, 2), (3, 3)]),
        ([1, 1], [1, LONG - 1], 9999, [(0, 1)]),
        ([1, 1, 1], [1, 1, LONG], 9999, [(0, 1), (2, 2)]),
        ([1] * 5, [1] * 5, 2, [(0, 1), (2, 3), (4, 4)]),
    ],
    ids=["similar", "a prompt between", "some padding", "much padding", "the CPU's cache"],
)
def test_single_tokens_of_similar_sequences_attend_together(counts, blocks, most_blocks, groups):
    runner = SimpleNamespace(_size=SIZE, _most_blocks=most_blocks)
    rows = SimpleNamespace(counts=np.array(counts), tables=[range(each) for each in blocks])
    assert Runner._groups(runner, rows) == groups
