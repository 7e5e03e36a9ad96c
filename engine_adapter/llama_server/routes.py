"""The routes of llama-server beside `/v1`, and those on which a prompt runs.

Not declared, because they change the server for all clients or belong to its operator: `POST /props`,
`POST /slots/{id}`, `POST /lora-adapters`, `/metrics`, `/models/unload`, `/models/sse`, `/tools`,
`/cors-proxy`.
"""

from __future__ import annotations

from engine_adapter.routes import ASK, READ, NativeRoute, PromptFields

INFILL, SLOTS, LOAD = "/infill", "/slots", "/models/load"
NATIVE_COMPLETIONS = frozenset({"/completion", "/completions"})
"""The server's own completions. Their answers are not OpenAI's."""
PINNED_ROUTES = NATIVE_COMPLETIONS | {"/v1/chat/completions", "/v1/completions", INFILL}
"""The server honours `id_slot` on these routes."""

ROUTER_ROUTES = {LOAD: ASK}
"""What only a router has. `LOAD` does what any request for the model does."""
_COMPLETION = NativeRoute(prompt=PromptFields(text="prompt", ids="prompt"), runs=True, lists=True)
_SAME = {
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/audio/transcriptions": "/v1/audio/transcriptions",
}
ROUTES = {
    **{path: NativeRoute(same_as=same_as) for path, same_as in _SAME.items()},
    "/models": NativeRoute("GET", same_as="/v1/models"),
    **dict.fromkeys(NATIVE_COMPLETIONS, _COMPLETION),
    INFILL: NativeRoute(runs=True),
    "/tokenize": ASK,
    "/detokenize": ASK,
    "/apply-template": ASK,
    "/embedding": ASK,
    "/embeddings": ASK,
    "/rerank": ASK,
    "/reranking": ASK,
    "/props": READ,
    SLOTS: READ,
    "/lora-adapters": READ,
}
SERVED = ROUTES | {"/v1/health": READ}
"""Those, and one below `/v1` that few other engines have."""
ALL_ROUTES = ROUTES | ROUTER_ROUTES
"""Those of a router."""
