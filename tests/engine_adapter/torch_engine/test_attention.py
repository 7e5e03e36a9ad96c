from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import (
    STAGED_BLOCKS,
    AttentionCall,
    KvStorage,
    LayerShape,
    PagedBatch,
    Part,
    Probe,
    Scratch,
    attention_context,
    bytes_per_token,
    paged_attention,
)

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 8, 4


class Planes:
    def __init__(self, tokens):
        draw = torch.Generator().manual_seed(0)
        self.keys = torch.randn(tokens, KV_HEADS, DIM, generator=draw)
        self.values = torch.randn(tokens, KV_HEADS, DIM, generator=draw)

    @property
    def layers(self):
        return [(self.keys, self.values)]


def call(rows, **kwargs):
    draw = torch.Generator().manual_seed(1)
    values = {"scaling": 0.3, "softcap": None, "window": None, **kwargs}
    return AttentionCall(
        0,
        torch.randn(rows, HEADS, DIM, generator=draw),
        torch.randn(rows, KV_HEADS, DIM, generator=draw),
        torch.randn(rows, KV_HEADS, DIM, generator=draw),
        **values,
    )


def by_hand(query, keys, values, asked):
    """Attention of one query over its keys, step by step."""
    output = torch.empty(HEADS, DIM)
    start = 0 if asked.window is None else max(0, len(keys) - asked.window)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[start:, group] @ query[head] * asked.scaling
        if asked.softcap is not None:
            scores = asked.softcap * torch.tanh(scores / asked.softcap)
        output[head] = scores.softmax(-1) @ values[start:, group]
    return output


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_mixed_step_attends_each_row_over_its_own_sequence(window, softcap):
    planes = Planes(40)
    asked = call(2 + 3 + 5, window=window, softcap=softcap)
    sequences = [  # block ids, tokens after this step, rows in this step
        ([3, 1], 6, 1),
        ([0], 2, 1),
        ([5, 6], 7, 3),  # contiguous
        ([9, 2], 5, 5),  # from the first token, and not contiguous
    ]
    slots, parts, row = [], [Part(0, 2, torch.tensor([6, 2]), 6, blocks=torch.tensor([3, 1, 0, 0]))], 0
    for blocks, length, rows in sequences:
        slots += [blocks[at // SIZE] * SIZE + at % SIZE for at in range(length - rows, length)]
        if rows > 1:
            together = blocks[-1] - blocks[0] == len(blocks) - 1
            scattered = None if together else torch.tensor(blocks)
            lengths = torch.tensor([length])
            parts.append(Part(row, row + rows, lengths, length, blocks[0] * SIZE, scattered))
        row += rows
    output = PagedBatch(planes.layers, torch.tensor(slots), parts, Scratch(SIZE)).attend(asked)
    row = 0
    for blocks, length, rows in sequences:
        at = [blocks[position // SIZE] * SIZE + position % SIZE for position in range(length)]
        for position in range(length - rows, length):
            seen = at[: position + 1]
            expected = by_hand(asked.query[row], planes.keys[seen], planes.values[seen], asked)
            torch.testing.assert_close(output[row], expected)
            row += 1


@pytest.mark.parametrize(
    ("layer", "mask", "message"),
    [
        ({}, torch.zeros(1), "masks of its own"),
        ({"is_causal": False}, None, "not causal"),
        ({"layer_idx": None}, None, "not numbered"),
    ],
)
def test_attention_that_cannot_be_paged_is_refused(layer, mask, message):
    module = SimpleNamespace(**{"layer_idx": 1, "is_causal": True, **layer})
    query, key, value = (torch.zeros(1, heads, 2, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with attention_context(Probe()), pytest.raises(EngineSpecError, match=message):
        paged_attention(module, query, key, value, mask)


SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 6, 4), LayerShape(2, 4, 3)]


def test_many_blocks_move_through_a_buffer_of_fixed_size():
    count = 3 * STAGED_BLOCKS + 1
    kv = KvStorage(
        SHAPES,
        gpu_blocks=count,
        host_blocks=count,
        tokens_per_block=2,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    planes = [plane for index in range(3) for plane in kv.layers[index]]
    for number, plane in enumerate(planes):
        plane.copy_(torch.arange(plane.numel()).view(plane.shape) + 1000 * number)
    before = [plane.clone() for plane in planes]
    slots = list(range(count))
    with torch.profiler.profile(profile_memory=True) as profile:
        kv.copy_to_host(slots, slots[::-1])
        for plane in planes:
            plane.zero_()
        kv.copy_to_gpu(slots[::-1], slots)
    assert all(torch.equal(plane, old) for plane, old in zip(planes, before, strict=True))
    block_bytes = 2 * bytes_per_token(SHAPES, torch.float32)
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    assert allocated < STAGED_BLOCKS * block_bytes  # the slot numbers, and no KV
