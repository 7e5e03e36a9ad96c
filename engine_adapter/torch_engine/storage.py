"""Where KV lies: the block pools of both tiers, for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_adapter.torch_engine.attention import LayerShape

STAGED_BLOCKS = 16
"""Blocks that move between the tiers at once: all the memory that moving them takes, however many move."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Planes (the keys or values of one layer) of one shape.

    Attributes:
        gpu: [planes, blocks, values of a block]; attention reads planes in one piece.
        host: [blocks, planes, values of a block]; a block is copied in one piece.
        staging: on the device, laid out as `host`; blocks change their layout there.
    """

    gpu: Tensor
    host: Tensor
    staging: Tensor


class KvStorage:
    """Paged KV of all layers on the device, and its host tier (in pinned memory next to CUDA).

    Copies and model execution share one stream, so they take effect in the order they are asked for.
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
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._groups: list[_Group] = []
        wanted = [(shape.heads, dim) for shape in shapes for dim in (shape.key_dim, shape.value_dim)]
        planes: dict[int, Tensor] = {}
        for heads, dim in dict.fromkeys(wanted):
            members = [index for index, other in enumerate(wanted) if other == (heads, dim)]
            values = tokens_per_block * heads * dim
            gpu = torch.zeros(len(members), gpu_blocks, values, dtype=dtype, device=device)
            host = torch.zeros(
                host_blocks, len(members), values, dtype=dtype, pin_memory=device.type == "cuda"
            )
            staged = min(STAGED_BLOCKS, host_blocks)
            staging = torch.empty(staged, len(members), values, dtype=dtype, device=device)
            self._groups.append(_Group(gpu, host, staging))
            for place, index in enumerate(members):
                planes[index] = gpu[place].view(gpu_blocks * tokens_per_block, heads, dim)
        self._layers = [(planes[2 * index], planes[2 * index + 1]) for index in range(len(shapes))]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [token slots, heads, dim], to read and to write."""
        return self._layers[index]

    def copy_to_host(self, gpu_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """See `BlockCopier`."""
        for blocks, slots in self._slices(gpu_slots, host_slots):
            for group in self._groups:
                staged = group.staging[: len(slots)]
                torch.index_select(group.gpu.transpose(0, 1), 0, blocks, out=staged)
                for block, slot in zip(staged, slots, strict=True):
                    group.host[slot].copy_(block, non_blocking=True)

    def copy_to_gpu(self, host_slots: Sequence[int], gpu_slots: Sequence[int]) -> None:
        """See `BlockCopier`."""
        for blocks, slots in self._slices(gpu_slots, host_slots):
            for group in self._groups:
                staged = group.staging[: len(slots)]
                for block, slot in zip(staged, slots, strict=True):
                    block.copy_(group.host[slot], non_blocking=True)
                group.gpu.index_copy_(1, blocks, staged.transpose(0, 1))

    def _slices(
        self, gpu_slots: Sequence[int], host_slots: Sequence[int]
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """The slots of both tiers, as many at a time as the staging buffer holds."""
        for start in range(0, len(host_slots), STAGED_BLOCKS):
            part = slice(start, start + STAGED_BLOCKS)
            yield torch.tensor(list(gpu_slots[part]), device=self._device), host_slots[part]


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of KV of one token over all layers."""
    values = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return values * dtype.itemsize
