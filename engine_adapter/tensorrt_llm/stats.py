"""Reads a server's load and cache figures from one of two pages.

`/prometheus/metrics` (with `return_perf_metrics: true`) can be read at any time. `/metrics` (with
`enable_iter_perf_stats: true`) lists what each step did, and reading removes the list, also for other
readers. So kvpin reads it rarely, and only if the first page is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.prometheus_text import Samples, read_samples

_RUNNING, _WAITING = "trtllm_num_requests_running", "trtllm_num_requests_waiting"
_MAX_BLOCKS, _USED_BLOCKS = "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_used_blocks"
_BLOCK_SIZE = "trtllm_kv_cache_tokens_per_block"
_MODEL, _CACHE = "trtllm_model_config_info", "trtllm_kv_cache_config_info"
_NAMES = (_RUNNING, _WAITING, _MAX_BLOCKS, _USED_BLOCKS, _BLOCK_SIZE, _MODEL, _CACHE)


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The figures; None where unknown.

    Attributes:
        gpu_usage: share of GPU blocks in use, 0 to 1.
        tokens_per_block, gpu_blocks: block size and capacity.
        block_reuse, partial_reuse: whether blocks, and parts of them, are reused.
        model: directory or hub id.
    """

    running: int | None = None
    waiting: int | None = None
    gpu_usage: float | None = None
    tokens_per_block: int | None = None
    gpu_blocks: int | None = None
    block_reuse: bool | None = None
    partial_reuse: bool | None = None
    model: str | None = None
    max_model_len: int | None = None


class _CacheStats(msgspec.Struct, rename="camel"):
    max_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0


class _Iteration(msgspec.Struct, rename="camel"):
    num_active_requests: int = 0
    num_queued_requests: int = 0
    kv_cache_stats: _CacheStats | None = None


def read_prometheus(page: bytes) -> ServerFigures:
    """Reads `/prometheus/metrics`. Raises EngineUnavailable if it has another format."""
    samples = read_samples(page, _NAMES)
    model, cache = samples.labels(_MODEL), samples.labels(_CACHE)
    blocks, used = _most(samples, _MAX_BLOCKS), _most(samples, _USED_BLOCKS)
    length = model.get("max_model_len", "")
    return ServerFigures(
        running=_most(samples, _RUNNING),
        waiting=_most(samples, _WAITING),
        gpu_usage=used / blocks if blocks and used is not None else None,
        tokens_per_block=_most(samples, _BLOCK_SIZE) or None,
        gpu_blocks=blocks or None,
        block_reuse=_flag(cache, "enable_block_reuse"),
        partial_reuse=_flag(cache, "enable_partial_reuse"),
        model=model.get("model"),
        max_model_len=int(length) if length.isascii() and length.isdigit() else None,
    )


def read_iterations(steps: Any) -> ServerFigures:  # noqa: ANN401 - JSON
    """Reads the last step of a `/metrics` answer. Without a step, nothing runs. Raises EngineUnavailable if
    the answer is not a list of steps."""
    try:
        iterations = msgspec.convert(steps, list[_Iteration])
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"/metrics is not TensorRT-LLM's: {error}") from error
    if not iterations:
        return ServerFigures(running=0, waiting=0)
    last = iterations[-1]
    cache = last.kv_cache_stats or _CacheStats()
    return ServerFigures(
        running=last.num_active_requests,
        waiting=last.num_queued_requests,
        gpu_usage=cache.used_num_blocks / cache.max_num_blocks if cache.max_num_blocks else None,
        tokens_per_block=cache.tokens_per_block or None,
        gpu_blocks=cache.max_num_blocks or None,
    )


def _most(samples: Samples, name: str) -> int | None:
    """The value, which each process of the server repeats."""
    return max((int(sample.value) for sample in samples.all(name)), default=None)


def _flag(labels: Mapping[str, str], name: str) -> bool | None:
    value = labels.get(name)
    return None if value is None else value.lower() == "true"
