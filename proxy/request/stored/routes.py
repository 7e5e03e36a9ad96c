"""The routes that are open where kvpin has several tenants. Every other route is refused.

A route is open if it reaches nothing that an engine keeps, or only an object that its path names and that the
tenant made. A test holds this table against the routes of the adapters and of OpenAI's own client library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from engine_adapter import route_of
from proxy.errors import Forbidden


class Kind(StrEnum):
    """A kind of objects that engines keep for clients, in a word for people."""

    RESPONSE = "response"
    CONVERSATION = "conversation"
    FILE = "file"
    UPLOAD = "upload"
    PART = "part"
    VIDEO = "video"
    VECTOR_STORE = "vector store"
    CONTAINER = "container"
    # These are only named in bodies, and nobody knows who made them.
    AUDIO = "audio"
    PROMPT = "prompt"
    SKILL = "skill"
    VOICE = "voice"


COLLECTIONS: Mapping[Kind, str] = {
    Kind.RESPONSE: "/v1/responses",
    Kind.CONVERSATION: "/v1/conversations",
    Kind.FILE: "/v1/files",
    Kind.UPLOAD: "/v1/uploads",
    Kind.VIDEO: "/v1/videos",
    Kind.VECTOR_STORE: "/v1/vector_stores",
    Kind.CONTAINER: "/v1/containers",
}
"""Kind → the route at which a POST makes an object, and below which each has its own."""
FOLLOWED = frozenset({*COLLECTIONS, Kind.PART})
"""Kinds whose owners are known."""

# What is open below each object of a kind. A second {} is something inside that object.
_BELOW: Mapping[Kind, tuple[str, ...]] = {
    Kind.RESPONSE: ("GET", "DELETE", "GET /input_items", "POST /cancel"),
    Kind.CONVERSATION: (
        *("GET", "POST", "DELETE"),
        *("GET /items", "POST /items", "GET /items/{}", "DELETE /items/{}"),
    ),
    Kind.FILE: ("GET", "DELETE", "GET /content"),
    Kind.UPLOAD: ("POST /parts", "POST /complete", "POST /cancel"),
    Kind.VIDEO: ("GET", "DELETE", "GET /content", "POST /remix"),
    Kind.VECTOR_STORE: (
        *("GET", "POST", "DELETE", "POST /search"),
        *("GET /files", "POST /files", "GET /files/{}", "POST /files/{}", "DELETE /files/{}"),
        *("GET /files/{}/content", "POST /file_batches", "GET /file_batches/{}"),
        *("POST /file_batches/{}/cancel", "GET /file_batches/{}/files"),
    ),
    Kind.CONTAINER: (
        *("GET", "DELETE", "GET /files", "POST /files", "GET /files/{}", "DELETE /files/{}"),
        "GET /files/{}/content",
    ),
}
# Answers below an object that make others: the field that holds the new id → its kind.
_MADE_BELOW: Mapping[tuple[Kind, str], Mapping[str, Kind]] = {
    (Kind.UPLOAD, "POST /parts"): {"id": Kind.PART},
    (Kind.UPLOAD, "POST /complete"): {"file": Kind.FILE},
    (Kind.VIDEO, "POST /remix"): {"id": Kind.VIDEO},
}
STATELESS: Mapping[str, tuple[str, ...]] = {
    "POST": (
        *("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/chat/completions/render"),
        *("/v1/completions", "/v1/completions/render", "/v1/responses/compact", "/v1/responses/input_tokens"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/classify", "/v1/moderations"),
        *("/v1/pooling", "/v1/ranking", "/v1/rerank", "/v1/reranking", "/v1/score", "/v1/tokenize"),
        *("/v1/detokenize", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/images/edits", "/v1/images/generations", "/v1/images/variations"),
        *("/apply-template", "/classify", "/completion", "/completions", "/detokenize", "/embedding"),
        *("/embeddings", "/encode", "/generate", "/infill", "/pooling", "/rerank", "/reranking", "/score"),
        *("/tokenize", "/v2/embed", "/v2/rerank"),
    ),
    "GET": (
        *("/v1/health", "/v1/health/live", "/v1/health/ready", "/v1/metadata", "/v1/version"),
        *(
            "/get_model_info",
            "/lora-adapters",
            "/model_info",
            "/ping",
            "/props",
            "/tokenizer_info",
            "/version",
        ),
    ),
}
"""Method → routes that reach nothing that an engine keeps."""
# Why routes are refused, with all that is below them. What is not here is refused, too, in other words.
_REFUSED: Mapping[str, tuple[str, ...]] = {
    "engines run prompts there that kvpin does not see": (
        *("/v1/agents", "/v1/assistants", "/v1/batches", "/v1/chatkit", "/v1/evals", "/v1/fine_tuning"),
        *("/v1/live", "/v1/messages/batches", "/v1/realtime", "/v1/threads"),
    ),
    "kvpin does not follow who made what is kept there": (
        *("/v1/audio/voice_consents", "/v1/audio/voices", "/v1/chat/completions", "/v1/skills"),
        *("/v1/vaults", "/v1/videos/characters", "/v1/videos/edits", "/v1/videos/extensions"),
    ),
    "it belongs to the engines' operator": (
        *("/models", "/v1/organization", "/v1/projects", "/v1/safety", "/v1/webhook_endpoints"),
        "/v1/webhook_event_types",
    ),
    "no engine is known to serve it": ("/v1/content_provenance_checks", "/v1/decisions"),
}
_LISTS = "it shows what engines keep, or do, for all of them"
_SHOWS_ALL = frozenset({*COLLECTIONS.values(), "/slots"})
_UNKNOWN = "kvpin does not know what it reaches"


class OpenRoute(NamedTuple):
    """A route that is open to several tenants.

    Attributes:
        kind: the kind of the object that its path names; None if it names none.
        makes: the field of the answer that holds the id of a new object → its kind.
        ends: it deletes the object.
    """

    kind: Kind | None = None
    makes: Mapping[str, Kind] = {}
    ends: bool = False


def check_route(method: str, path: str) -> None:
    """Raises Forbidden for a route that is not open to several tenants."""
    if open_route(method, route_of(path)) is None:
        raise Forbidden(
            f"kvpin refuses {method} {path.partition('?')[0]} while it has several tenants: "
            f"{why_refused(method, route_of(path)) or _UNKNOWN}"
        )


def open_route(method: str, route: str) -> OpenRoute | None:
    """The entry of a route; None if it is not open."""
    method, names = "GET" if method == "HEAD" else method, segments(route)
    # Ids follow each collection.
    with_holes = [name if at % 2 or not at else "{}" for at, name in enumerate(names)]
    return _OPEN.get((method, *names)) or _OPEN.get((method, *with_holes))


def why_refused(method: str, route: str) -> str | None:
    """Why a route that is not open is refused; None if it is in no table at all."""
    route = route.rstrip("/")
    if method == "GET" and route in _SHOWS_ALL:
        return _LISTS
    reasons = (
        reason
        for reason, prefixes in _REFUSED.items()
        for prefix in prefixes
        if f"{route}/".startswith(f"{prefix}/")
    )
    return next(reasons, None)


def segments(route: str) -> list[str]:
    """The segments of a route. An object's id is the third."""
    return route.strip("/").split("/")


def _entries() -> Iterator[tuple[str, OpenRoute]]:
    for method, paths in STATELESS.items():
        for path in paths:
            yield f"{method} {path}", OpenRoute()
    for kind, collection in COLLECTIONS.items():
        yield f"POST {collection}", OpenRoute(makes={"id": kind})
        for each in _BELOW[kind]:
            method, _, rest = each.partition(" ")
            makes = _MADE_BELOW.get((kind, each), {})
            yield f"{method} {collection}/{{}}{rest}", OpenRoute(kind, makes, ends=each == "DELETE")


_OPEN = {
    (method, *segments(path)): entry
    for name, entry in _entries()
    for method, _, path in [name.partition(" ")]
}
