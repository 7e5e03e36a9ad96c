"""The memory of the KV cache: the block pools of both tiers, for all layers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_adapter.torch_engine.attention import LayerShape

STAGED_BLOCKS = 16
"""Blocks per copy between the tiers. A buffer of this size is all the memory that copying ever takes."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Planes (the keys or values of one layer) of one shape.

    Attributes:
        gpu: [planes, blocks, values of a block], so that attention reads a plane in one piece.
        host: [blocks, planes, values of a block], so that a block is copied in one piece.
        staging: laid out as `host`, on the device; blocks change their layout there.
    """

    gpu: Tensor
    host: Tensor
    staging: Tensor


class KvStorage:
    """The paged KV of all layers on the device, and its host tier (pinned memory with CUDA).

    Copies and forward passes share one stream, so they take effect in call order.

    Attributes:
        layers: keys and values of each layer, [token slots, heads, dim], for reading and writing.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        gpu_blocks: int,
        host_blocks: int,
        tokens_per_block: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._groups: list[_Group] = []
        wanted = [(shape.heads, dim) for shape in shapes for dim in (shape.key_dim, shape.value_dim)]
        planes: dict[int, Tensor] = {}
        for heads, dim in dict.fromkeys(wanted):
            members = [index for index, other in enumerate(wanted) if other == (heads, dim)]
            values = tokens_per_block * heads * dim
            gpu = _zeros(len(members), gpu_blocks, values, dtype=dtype, device=device)
            host = (
                _zeros(host_blocks, len(members), values, dtype=dtype, device=device)
                if device.type == "cpu"
                else torch.zeros(host_blocks, len(members), values, dtype=dtype, pin_memory=True)
            )
            staged = min(STAGED_BLOCKS, host_blocks)
            staging = torch.empty(staged, len(members), values, dtype=dtype, device=device)
            self._groups.append(_Group(gpu, host, staging))
            for place, index in enumerate(members):
                planes[index] = gpu[place].view(gpu_blocks * tokens_per_block, heads, dim)
        self.layers = [(planes[2 * index], planes[2 * index + 1]) for index in range(len(shapes))]

    def copy_to_host(self, gpu_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """Copies block `gpu_slots[i]` to `host_slots[i]`. The host slots are distinct."""
        for blocks, slots in self._slices(gpu_slots, host_slots):
            for group in self._groups:
                staged = group.staging[: len(slots)]
                torch.index_select(group.gpu.transpose(0, 1), 0, blocks, out=staged)
                for part, run in _runs(slots):
                    group.host[run].copy_(staged[part], non_blocking=True)

    def copy_to_gpu(self, host_slots: Sequence[int], gpu_slots: Sequence[int]) -> None:
        """Copies block `host_slots[i]` to `gpu_slots[i]`. The GPU slots are distinct."""
        for blocks, slots in self._slices(gpu_slots, host_slots):
            for group in self._groups:
                staged = group.staging[: len(slots)]
                for part, run in _runs(slots):
                    staged[part].copy_(group.host[run], non_blocking=True)
                group.gpu.index_copy_(1, blocks, staged.transpose(0, 1))

    def _slices(
        self, gpu_slots: Sequence[int], host_slots: Sequence[int]
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Pairs of GPU and host slots, in slices that fit the staging buffer."""
        for start in range(0, len(host_slots), STAGED_BLOCKS):
            part = slice(start, start + STAGED_BLOCKS)
            yield torch.tensor(list(gpu_slots[part]), device=self._device), host_slots[part]


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU, they take memory when they are written to; those of `torch.zeros` take it at once."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _runs(slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Runs of consecutive slots, to copy in one piece: their places in `slots`, and the slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield slice(begin, end), slice(slots[begin], slots[end - 1] + 1)
            begin = end


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of KV of one token over all layers."""
    values = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return values * dtype.itemsize
