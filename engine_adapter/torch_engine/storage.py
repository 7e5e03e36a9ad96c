"""Where KV lies: the block pools of both tiers, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_adapter.torch_engine.attention import LayerShape


@dataclass(frozen=True, slots=True)
class _Group:
    """Planes (the keys or values of one layer) of one shape.

    Attributes:
        gpu: [planes, blocks, values of a block]; attention reads planes in one piece.
        host: [blocks, planes, values of a block]; a block is copied in one piece.
    """

    gpu: Tensor
    host: Tensor


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
            self._groups.append(_Group(gpu, host))
            for place, index in enumerate(members):
                planes[index] = gpu[place].view(gpu_blocks * tokens_per_block, heads, dim)
        self._layers = [(planes[2 * index], planes[2 * index + 1]) for index in range(len(shapes))]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [token slots, heads, dim], to read and to write."""
        return self._layers[index]

    def copy_to_host(self, gpu_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """See `BlockCopier`."""
        blocks = torch.tensor(list(gpu_slots), device=self._device)
        for group in self._groups:
            staged = group.gpu.index_select(1, blocks).transpose(0, 1).contiguous()
            for index, slot in enumerate(host_slots):
                group.host[slot].copy_(staged[index], non_blocking=True)

    def copy_to_gpu(self, host_slots: Sequence[int], gpu_slots: Sequence[int]) -> None:
        """See `BlockCopier`."""
        blocks = torch.tensor(list(gpu_slots), device=self._device)
        for group in self._groups:
            shape = (len(host_slots), group.gpu.shape[0], group.gpu.shape[2])
            staged = torch.empty(shape, dtype=group.gpu.dtype, device=self._device)
            for index, slot in enumerate(host_slots):
                staged[index].copy_(group.host[slot], non_blocking=True)
            group.gpu.index_copy_(1, blocks, staged.transpose(0, 1))


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of KV of one token over all layers."""
    values = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return values * dtype.itemsize
