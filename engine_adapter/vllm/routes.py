"""The routes of vLLM beside `/v1`, which run pooling models or no model, and its WebSocket.

Not declared: what changes the server or shows its operator's side, such as `/reset_prefix_cache`, `/sleep`,
`/pause`, `/collective_rpc`, `/server_info`, `/load`, `/metrics`; and `/invocations` and
`/inference/v1/generate`, whose prompts kvpin does not follow.
"""

from __future__ import annotations

from engine_adapter.routes import ASK, READ, REALTIME

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
