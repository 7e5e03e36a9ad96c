"""The settings of a vLLM beyond those that every engine has."""

from __future__ import annotations

from engine_adapter.lmcache.options import LmCacheOptions
from engine_adapter.types import EngineSpec


class VllmOptions(LmCacheOptions, frozen=True):
    """Options of `vllm` engines: those of its KV events, and of an LMCache below it."""


VllmSpec = EngineSpec[VllmOptions]
