"""The settings of a vLLM beyond those that every engine has."""

from __future__ import annotations

from engine_adapter.lmcache.options import LmCacheOptions
from engine_adapter.types import EngineSpec


class VllmOptions(LmCacheOptions, frozen=True):
    """Options of `vllm` engines: those of its KV events, and of an LMCache below it."""


VllmSpec = EngineSpec[VllmOptions]


def rank_headers(rank: int | None) -> dict[str, str]:
    """The headers that send a request to a data-parallel rank; none where the server is left to choose."""
    return {} if rank is None else {"x-data-parallel-rank": str(rank)}
