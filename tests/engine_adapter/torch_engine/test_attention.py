"""What attention refuses, and KV that moves. That it is right: load_model checks it, and test_engine.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import (
    STAGED_BLOCKS,
    KvStorage,
    LayerShape,
    Probe,
    attention_context,
    paged_attention,
)

HEADS, KV_HEADS, DIM = 4, 2, 8


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
    block_bytes = 2 * 4 * sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in SHAPES)
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    assert allocated < STAGED_BLOCKS * block_bytes  # the slot numbers, and no KV
