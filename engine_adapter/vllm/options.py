"""The settings of a vLLM beyond those that every engine has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.lmcache.options import LmCacheOptions
from engine_adapter.types import EngineSpec
from engine_adapter.vllm.nixl import MARGIN_S


class VllmOptions(LmCacheOptions, frozen=True):
    """Options of `vllm` engines: those of its KV events, of an LMCache below it, and of transfers.

    Attributes:
        kv_transfer: `nixl`: it has no role, and passes KV both ways by a NixlConnector. In dev mode it says
            so itself.
        kv_lease_s: its `kv_lease_duration`: seconds for which it keeps the KV of a prompt that it computed
            for another engine.
    """

    kv_transfer: Annotated[str, msgspec.Meta(pattern="^nixl$")] | None = None
    kv_lease_s: Annotated[float, msgspec.Meta(gt=MARGIN_S)] = 30.0


VllmSpec = EngineSpec[VllmOptions]
