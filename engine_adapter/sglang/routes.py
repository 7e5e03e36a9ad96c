"""The routes of SGLang beside `/v1`.

Not declared: what changes the server or shows its operator's side, such as `/flush_cache`, `/server_info`,
`/load_lora_adapter`, `/update_weights_from_disk`, `/abort_request`, `/open_session`; and `/invocations`,
`/vertex_generate` and `/api/*`, whose prompts kvpin does not follow.
"""

from __future__ import annotations

from engine_adapter.routes import ASK, READ, NativeRoute, PromptFields

GENERATE = "/generate"
# With these fields of /generate, token ids do not identify the prompt, or its KV.
_MORE_THAN_TEXT = frozenset(
    {
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "session_params",
        "lora_path",
        "extra_key",
        "positional_embed_overrides",
    }
)
ROUTES = {
    GENERATE: NativeRoute(
        prompt=PromptFields(text="text", ids="input_ids", unless=_MORE_THAN_TEXT), runs=True
    ),
    **dict.fromkeys(("/encode", "/classify", "/tokenize", "/detokenize"), ASK),
    **dict.fromkeys(("/get_model_info", "/model_info", "/ping"), READ),
}
RUNS_NONE = frozenset(
    {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"}
)
"""Routes that run no model. On all others, a salt keeps tenants apart, or they are refused."""
