"""Attention over paged KV, plugged into transformers' attention interface.

transformers calls `paged_attention` in every layer. The context of the running step decides what happens: a
`Probe` records how the model calls it, a `PagedBatch` attends. transformers' mask interface does not know
the name `kvpin_paged` and builds no mask, so masks are built here. (Without a mask, transformers' own sdpa
path crops the keys of a prompt whose beginning is cached.)
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine_adapter.errors import EngineSpecError

# --- the memory of the KV cache: the block pools of both tiers, for all layers --------------------------

STAGED_BLOCKS = 16
"""Blocks per copy between the tiers. A buffer of this size is all the memory that copying ever takes."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Planes (the keys or values of one layer) of one shape."""

    gpu: Tensor  # [planes, blocks, values of a block], so that attention reads a plane in one piece
    host: Tensor  # [blocks, planes, values of a block], so that a block is copied in one piece
    staging: Tensor  # laid out as `host`, on the device; blocks change their layout there


class KvStorage:
    """The paged KV of all layers on the device, and its host tier (pinned memory with CUDA). Copies and
    forward passes share one stream, so they take effect in call order. Keys and values of each layer, [token
    slots, heads, dim], are read and written in `layers`."""

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


# --- attention ------------------------------------------------------------------------------------------

IMPLEMENTATION = "kvpin_paged"
_IGNORED_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings"})


class LayerShape(NamedTuple):
    """Shape of one layer's KV for one token: `heads` keys of `key_dim` and values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int


class AttentionCall(NamedTuple):
    """One layer's attention: `query` [N, heads, key_dim], `key` and `value` [N, kv heads, dim]."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    softcap: float | None
    window: int | None


_context: ContextVar[Probe | PagedBatch] = ContextVar("attention_context")


@contextmanager
def attention_context(context: Probe | PagedBatch) -> Iterator[None]:
    """Within it, layers on this thread attend through `context`."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **extra: Any,  # noqa: ANN401 - whatever a model passes
) -> tuple[Tensor, None]:
    """The registered attention function; `query`, `key`, `value` are [1, heads, N, dim]."""
    context = _context.get()
    if isinstance(context, Probe):
        context.check(module, attention_mask, extra)
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]  # a plain int on every attention module
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scaling=scaling,
        softcap=softcap,
        window=sliding_window,
    )
    return context.attend(call).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


class Probe:
    """Learns the KV shapes of a model from a run of one token; refuses models that cannot work."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def check(self, module: torch.nn.Module, attention_mask: Tensor | None, extra: dict[str, Any]) -> None:
        """Raises EngineSpecError for attention that is more than causal attention over the KV."""
        if attention_mask is not None:
            raise EngineSpecError("the model builds attention masks of its own")
        if not getattr(module, "is_causal", True):
            raise EngineSpecError("the model's attention is not causal")
        if getattr(module, "layer_idx", None) is None:
            raise EngineSpecError("the model's attention layers are not numbered")
        tensors = [name for name, value in extra.items() if isinstance(value, Tensor)]
        unknown = sorted(set(tensors) - _IGNORED_TENSORS)
        if unknown:
            raise EngineSpecError(f"the model's attention needs {', '.join(unknown)} (sinks or biases)")

    def attend(self, call: AttentionCall) -> Tensor:
        """Records the shapes. The output has the right shape and no meaning."""
        if call.layer in self.shapes:
            raise EngineSpecError(f"layer {call.layer} attends twice: its KV would be overwritten")
        shape = LayerShape(call.key.shape[1], call.key.shape[2], call.value.shape[2])
        self.shapes[call.layer] = shape
        self.windows[call.layer] = call.window
        return call.query.new_zeros(*call.query.shape[:2], shape.value_dim)


class Scratch:
    """Two buffers to gather keys and values into. All layers and steps use the same memory, as fresh memory
    costs several times as much as the copy itself."""

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._buffers: dict[bool, Tensor] = {}

    def gather(self, plane: Tensor, blocks: Tensor, *, values: bool) -> Tensor:
        """The tokens of `blocks`, [tokens, heads, dim]. Valid until the next call with the same `values`."""
        rows = plane.view(-1, self._size * plane.shape[1] * plane.shape[2])
        needed = len(blocks) * rows.shape[1]
        buffer = self._buffers.get(values)
        if buffer is None or buffer.numel() < needed:
            buffer = self._buffers[values] = rows.new_empty(2 * needed)
        gathered = buffer[:needed].view(len(blocks), -1)
        torch.index_select(rows, 0, blocks, out=gathered)
        return gathered.view(-1, *plane.shape[1:])


@dataclass(slots=True)
class Part:
    """The last tokens of some sequences, equally many of each: the rows `begin` to `end` of a step."""

    begin: int
    end: int
    lengths: Tensor  # [sequences] tokens
    longest: int  # the most of them
    start: int = 0  # the first token slot of the KV of one sequence whose blocks are contiguous
    # [sequences * width] block ids otherwise, each sequence padded to `width` blocks.
    blocks: Tensor | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    sequences: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = len(self.lengths)  # which torch answers slowly

    def attend(self, call: AttentionCall, keys: Tensor, values: Tensor, scratch: Scratch) -> Tensor:
        """The output [rows, heads, value_dim] over a layer's `keys` and `values`."""
        query = call.query[self.begin : self.end]
        query = query.view(self.sequences, -1, *query.shape[1:]).transpose(1, 2)
        key, value = (self._read(plane, scratch, values=plane is values) for plane in (keys, values))
        output = attention(query, key, value, self.mask(call.window, call.query), call)
        return output.transpose(1, 2).flatten(0, 1)

    def _read(self, plane: Tensor, scratch: Scratch, *, values: bool) -> Tensor:
        """[sequences, heads, longest, dim]; a view if the blocks are contiguous."""
        if self.blocks is None:
            tokens = plane[self.start : self.start + self.longest]
        else:
            tokens = scratch.gather(plane, self.blocks, values=values)
        return tokens.view(self.sequences, -1, *plane.shape[1:])[:, : self.longest].transpose(1, 2)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Additive mask [sequences, 1, rows, longest]: the last row of a sequence sees all its tokens, each
        row before it one less. None if it would be all 0."""
        if self.end - self.begin == 1 and (window is None or self.longest <= window):
            return None
        if window not in self.masks:
            rows = (self.end - self.begin) // self.sequences
            at = (self.lengths[:, None] + torch.arange(-rows, 0, device=like.device))[:, None, :, None]
            keys = torch.arange(self.longest, device=like.device)
            hidden = keys > at
            if window is not None:
                hidden |= keys <= at - window
            zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self.masks[window] = zeros.masked_fill_(hidden, -torch.inf)
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Attention of one step: writes the KV of its rows, then attends each row over its own sequence."""

    layers: Sequence[tuple[Tensor, Tensor]]  # those of `KvStorage`
    slots: Tensor  # [N] the token slots of the rows
    parts: Sequence[Part]  # they hold all rows, in order
    scratch: Scratch
    # Of the keys and values of each layer: one that is no number or infinite shows in its sum.
    sums: list[Tensor] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        """The layer's output [N, heads, value_dim]."""
        keys, values = self.layers[call.layer]
        # Attention reads past the end of a sequence and masks the rest, but a mask cannot hide NaN. Without
        # this, the NaN of one request reaches the next owner of its blocks.
        self.sums.extend(each.sum(dtype=torch.float32) for each in (call.key, call.value))
        keys.index_copy_(0, self.slots, call.key.nan_to_num(0.0, 0.0, 0.0))
        values.index_copy_(0, self.slots, call.value.nan_to_num(0.0, 0.0, 0.0))
        outputs = [part.attend(call, keys, values, self.scratch) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    """Attention of `query` [B, heads, rows, dim] over `key`, `value` [B, kv heads, length, dim]."""
    shape, groups = query.shape, query.shape[1] // key.shape[1]
    if groups > 1 and shape[2] == 1:  # one row each: the heads of a group become rows
        query = query.view(shape[0], key.shape[1], groups, shape[3])
    elif groups > 1 and (call.softcap is not None or query.device.type != "cpu"):
        # With a mask, only the CPU has a fast kernel for groups.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if call.softcap is None:
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=call.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        scale = call.scaling if call.scaling is not None else shape[3] ** -0.5
        weights = torch.tanh(query @ key.transpose(2, 3) * scale / call.softcap) * call.softcap
        if mask is not None:
            weights = weights + mask
        output = weights.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return output.reshape(*shape[:3], output.shape[3])
