"""The settings of a llama-server beyond those that every engine has, and its routes beside `/v1`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.options import ASK, READ, EngineOptions, NativeRoute, PromptFields, Size
from engine_adapter.types import EngineSpec


class LlamaServerOptions(EngineOptions, frozen=True):
    """Options of `llama_server` engines.

    Attributes:
        host_cache_dir: directory where it saves KV files, as kvpin sees it; best in memory. A managed one has
            `/dev/shm/kvpin-<uid>`, or without room there `~/.cache/kvpin/kv`.
        host_cache_bytes: room for them. A managed one has half of what is free there at start, at most 8 GiB.
        disk_cache_dir: directory where kvpin moves the files that find no room there.
        disk_cache_bytes: room for those.
        cache_reuse: it may move KV in runs of at least so many tokens: more of a prompt comes from cache, and
            such answers are not exact. By default never, also where the server has `--cache-reuse`.
        load_s: of a router: a model that is loading and tells no progress for so many seconds has failed.
    """

    host_cache_dir: str | None = None
    host_cache_bytes: Size | None = None
    disk_cache_dir: str | None = None
    disk_cache_bytes: Size | None = None
    cache_reuse: Annotated[int, msgspec.Meta(gt=0)] | None = None
    load_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0


LlamaServerSpec = EngineSpec[LlamaServerOptions]


# --- the routes of llama-server beside `/v1`, and those on which a prompt runs --------------------------
# Not declared, because they change the server for all clients or belong to its operator: `POST /props`,
# `POST /slots/{id}`, `POST /lora-adapters`, `/metrics`, `/models/unload`, `/models/sse`, `/tools`,
# `/cors-proxy`.

INFILL, SLOTS, LOAD = "/infill", "/slots", "/models/load"
NATIVE_COMPLETIONS = frozenset({"/completion", "/completions"})
"""The server's own completions. Their answers are not OpenAI's."""
PINNED_ROUTES = NATIVE_COMPLETIONS | {"/v1/chat/completions", "/v1/completions", INFILL}
"""The server honours `id_slot` on these routes."""

ROUTER_ROUTES = {LOAD: ASK}
"""What only a router has. `LOAD` does what any request for the model does."""
_COMPLETION = NativeRoute(prompt=PromptFields(text="prompt", ids="prompt"), runs=True, lists=True)
_COUNTED = ("/chat/completions", "/responses")
_SAME = [path + end for path in _COUNTED for end in ("", "/input_tokens")] + ["/audio/transcriptions"]
_OWN = ("/tokenize", "/detokenize", "/apply-template", "/embedding", "/embeddings", "/rerank", "/reranking")
ROUTES = {
    **{path: NativeRoute(same_as=f"/v1{path}") for path in _SAME},
    "/models": NativeRoute("GET", same_as="/v1/models"),
    **dict.fromkeys(NATIVE_COMPLETIONS, _COMPLETION),
    INFILL: NativeRoute(runs=True, lists=True),
    **dict.fromkeys(_OWN, ASK),
    **dict.fromkeys(("/props", SLOTS, "/lora-adapters"), READ),
}
SERVED = ROUTES | {"/v1/health": READ}
"""Those, and one below `/v1` that few other engines have."""
ALL_ROUTES = ROUTES | ROUTER_ROUTES
OF_ROUTER = SERVED | ROUTER_ROUTES
"""Those of a router, without and with that one."""
