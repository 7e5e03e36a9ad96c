"""What kvpin knows of routes that it passes on: which several tenants may use, which take only POST, and what
a wrong path means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from engine_adapter import NATIVE_ROUTES, route_of
from proxy.errors import Forbidden
from proxy.request.stored import response_in
from proxy.request.translate import INPUT_TOKENS_PATH, RESPONSES_PATH

OPEN: Mapping[str, tuple[str, ...]] = {
    "POST": (
        *("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/chat/completions/render"),
        *("/v1/completions", "/v1/completions/render", RESPONSES_PATH, "/v1/responses/compact"),
        *(INPUT_TOKENS_PATH, "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),
        *("/v1/classify", "/v1/moderations", "/v1/pooling", "/v1/ranking", "/v1/rerank", "/v1/reranking"),
        *("/v1/score", "/v1/tokenize", "/v1/detokenize", "/v1/audio/speech", "/v1/audio/transcriptions"),
        *("/v1/audio/translations", "/v1/images/edits", "/v1/images/generations", "/v1/images/variations"),
        *("/apply-template", "/classify", "/completion", "/completions", "/detokenize", "/embedding"),
        *("/embeddings", "/encode", "/generate", "/infill", "/pooling", "/rerank", "/reranking", "/score"),
        *("/tokenize", "/v2/embed", "/v2/rerank"),
    ),
    "GET": (
        *("/v1/health", "/v1/health/live", "/v1/health/ready", "/v1/metadata", "/v1/version", "/version"),
        *("/get_model_info", "/lora-adapters", "/model_info", "/ping", "/props", "/tokenizer_info"),
    ),
}
"""Method → the routes that several tenants may use, beside those of one response."""
_OF_A_RESPONSE = frozenset({"GET ", "DELETE ", "GET input_items", "POST cancel"})
_CHATS = "/v1/chat/completions"
# A GET of chats lists those that an engine keeps.
POST_ONLY = frozenset(OPEN["POST"]) - {_CHATS, RESPONSES_PATH}
"""Routes that take no other method."""
_KEPT = ("conversations", "files", "uploads", "videos", "vector_stores", "containers")
_KNOWN = (*OPEN["POST"], *OPEN["GET"], *(f"/v1/{name}" for name in _KEPT), "/v1/models")
ALLOW_POST = "POST, OPTIONS"
"""The methods of such a route: kvpin itself answers OPTIONS."""
# The 404 of llama-server and of FastAPI for a path that they do not have.
_NOTHING_THERE = frozenset({"file not found", "not found"})
# Characters of a client's path that an error repeats.
_SHOWN = 100
# Lower, and `/v1/video` would mean `/v1/audio`.
_ALIKE = 0.8


def check_route(method: str, path: str) -> None:
    """Raises Forbidden for a route that several tenants may not use."""
    route, read = route_of(path), "GET" if method == "HEAD" else method
    if response_in(route) is None:
        is_open = route in OPEN.get(read, ())
    else:
        is_open = f"{read} {''.join(route.split('/', 4)[4:])}" in _OF_A_RESPONSE
    if not is_open:
        meant = _nearest(route, [*OPEN["POST"], *OPEN["GET"], "/v1/models"])
        hint = f" (did you mean {meant}?)" if meant is not None else ""
        raise Forbidden(
            f"kvpin refuses {method} {path.partition('?')[0]}{hint}: its API keys belong to several "
            "tenants, and it cannot tell whose objects engines keep there. Use one tenant, or for each "
            "tenant a kvpin with engines of its own"
        )


def is_known(route: str) -> bool:
    """True if kvpin knows the route: not if it names an object, or is written wrong."""
    return route in _KNOWN or route in NATIVE_ROUTES


def of_lacking(route: str, message: str) -> str:
    """The end of an engine's 404 `message`: that it is about the route, where the engine only says that there
    is nothing, and the route that may be meant."""
    is_lacking = message.strip().rstrip(".").lower() in _NOTHING_THERE
    lacks = f": no engine that was asked has the route {route[:_SHOWN]}" if is_lacking else ""
    return lacks + did_you_mean(route)


def did_you_mean(route: str) -> str:
    """The end of a sentence about a route that does not exist: the known one that it is like, if any."""
    meant = _nearest(route, _KNOWN)
    return f"; did you mean {meant}?" if meant is not None else ""


def _nearest(route: str, among: Sequence[str]) -> str | None:
    """The route that one which does not exist is like; None if there is none, or if it exists."""
    if route in _KNOWN or not route.strip("/"):
        return None
    nearest = get_close_matches(route, among, 1, _ALIKE)
    begun = (known for known in among if known.startswith(f"{route.rstrip('/')}/"))
    return nearest[0] if nearest else next(begun, None)
