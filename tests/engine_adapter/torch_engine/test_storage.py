from __future__ import annotations

import torch

from engine_adapter.torch_engine.attention import STAGED_BLOCKS, KvStorage, LayerShape, bytes_per_token

SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 6, 4), LayerShape(2, 4, 3)]


def storage(gpu_blocks=5, host_blocks=3):
    return KvStorage(
        SHAPES,
        gpu_blocks=gpu_blocks,
        host_blocks=host_blocks,
        tokens_per_block=2,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_blocks_go_down_and_up_whole():
    kv = storage()
    planes = [plane for index in range(3) for plane in kv.layers[index]]
    for number, plane in enumerate(planes):
        plane.copy_(torch.arange(plane.numel()).view(plane.shape) + 1000 * number)
    before = [plane.clone() for plane in planes]
    kv.copy_to_host([4, 1], [0, 2])
    for plane in planes:
        plane.zero_()
    kv.copy_to_gpu([2, 0], [3, 0])
    for plane, old in zip(planes, before, strict=True):
        assert torch.equal(plane[6:8], old[2:4])
        assert torch.equal(plane[0:2], old[8:10])
        assert not plane[2:6].any()


def test_many_blocks_move_through_a_buffer_of_fixed_size():
    count = 3 * STAGED_BLOCKS + 1
    kv = storage(gpu_blocks=count, host_blocks=count)
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
