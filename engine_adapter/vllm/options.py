"""The settings of a vLLM beyond those that every engine has, and its routes beside `/v1`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.events.options import EventOptions
from engine_adapter.options import ASK, READ, REALTIME
from engine_adapter.types import EngineSpec

# KV that another engine keeps is used for this many seconds less than its lease: the lease may begin a little
# before its engine says so, and the decode engine needs time to fetch the KV.
MARGIN_S = 5.0


class VllmOptions(EventOptions, frozen=True):
    """Options of `vllm` engines: those of its KV events, of an LMCache below it, and of transfers.

    Attributes:
        lmcache: HTTP address of the LMCache server beside the engine.
        lmcache_coordinator: address of the LMCache coordinator, by default that server's own.
        kv_transfer: `nixl`: it has no role, and passes KV both ways by a NixlConnector. In dev mode it says
            so itself.
        kv_lease_s: its `kv_lease_duration`: seconds for which it keeps the KV of a prompt that it computed
            for another engine.
    """

    lmcache: str | None = None
    lmcache_coordinator: str | None = None
    kv_transfer: Annotated[str, msgspec.Meta(pattern="^nixl$")] | None = None
    kv_lease_s: Annotated[float, msgspec.Meta(gt=MARGIN_S)] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lmcache", "lmcache_coordinator"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("http://", "https://")):
                raise ValueError(f"{name}: {address!r} is not an http:// or https:// address")
        if self.lmcache_coordinator is not None and self.lmcache is None:
            raise ValueError("lmcache_coordinator goes with lmcache=http://HOST:PORT")


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
