"""The settings of a vLLM beyond those that every engine has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.lmcache.options import LmCacheOptions
from engine_adapter.routes import ASK, READ, REALTIME
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


# --- the routes of vLLM beside `/v1`, which run pooling models or no model, and its WebSocket -----------
# Not declared: what changes the server or shows its operator's side, such as `/reset_prefix_cache`, `/sleep`,
# `/pause`, `/collective_rpc`, `/server_info`, `/load`, `/metrics`; and `/invocations` and
# `/inference/v1/generate`, whose prompts kvpin does not follow.

ROUTES = {
    **dict.fromkeys(
        ("/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/v2/embed"),
        ASK,
    ),
    "/ping": READ,
    "/tokenizer_info": READ,
    "/version": READ,
    REALTIME: READ,
}
