"""The headers that kvpin reads, sets and drops, and what they mean. docs/reference/headers.md shows them.

Names are in lower case. Meanings are for people, in Markdown; links are relative to docs/. Which headers of a
client end at kvpin for every engine: `engine_adapter/http/control.py`.
"""

from __future__ import annotations

from typing import NamedTuple

REQUEST_ID_HEADER = "x-request-id"
# In requests.
KEY_HEADERS = ("authorization", "x-api-key", "cookie")
SESSION_HEADERS = (
    "session-id",
    "x-session-id",
    "x-claude-code-session-id",
    "x-conversation-id",
    "x-session-affinity",
)
PRIORITY_HEADER = "x-kvpin-priority"
DEADLINE_HEADERS = ("x-request-timeout", "x-stainless-timeout", "x-stainless-read-timeout")
FORWARDED_HEADERS = ("forwarded", "via", "x-real-ip")
FORWARDED_PREFIX = "x-forwarded-"
# In answers.
ANTHROPICS_ID_HEADER = "request-id"
ENGINE_HEADER = "x-kvpin-engine"
PREDICTED_HEADER = "x-kvpin-predicted-tokens"
CACHED_HEADER = "x-kvpin-cached-tokens"
NOTE_HEADER = "x-kvpin-note"
POLICY_HEADER = "content-security-policy"
RETRY_AFTER_HEADER = "retry-after"
SHOULD_RETRY_HEADER = "x-should-retry"
RETRY_HEADERS = (RETRY_AFTER_HEADER, "retry-after-ms", SHOULD_RETRY_HEADER)
LIMIT_PREFIX = "x-ratelimit-"
# Only kvpin sets headers with this prefix, and reads them.
OWN_PREFIX = "x-kvpin-"
# Headers of an engine's answer that kvpin does not pass on: those of one connection, and those that it sets
# itself. A cookie of an engine may be the session of kvpin's own key there. Which pages may use the data
# plane is kvpin's to say: `proxy/api/cors.py`.
DROPPED_HEADERS = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "server", "date", "x-kv-cached-tokens"),
    *(REQUEST_ID_HEADER, ANTHROPICS_ID_HEADER),
    "set-cookie",
    *("access-control-allow-credentials", "access-control-allow-headers", "access-control-allow-methods"),
    *("access-control-allow-origin", "access-control-expose-headers", "access-control-max-age"),
)


class OfRequest(NamedTuple):
    """Headers of a request, best first."""

    names: tuple[str, ...]
    meaning: str


class OfAnswer(NamedTuple):
    """Headers of an answer, on which answers they are, and an example of a value."""

    names: tuple[str, ...]
    on: str
    meaning: str
    example: str


REQUEST_HEADERS = (
    OfRequest(
        KEY_HEADERS,
        "the client's key, and cookies. Where kvpin has keys, they end here; else the key is the engine's",
    ),
    OfRequest(
        (REQUEST_ID_HEADER,), "the client's name for the request, up to 128 printable ASCII characters"
    ),
    OfRequest(
        SESSION_HEADERS,
        "the conversation: ties go to the engine that had it last. The fields `session_id` and "
        "`prompt_cache_key` of the body say the same",
    ),
    OfRequest(
        (PRIORITY_HEADER,),
        "-8 to 8; the lowest goes first among the [waiting](operations.md#overload) requests of a tenant",
    ),
    OfRequest(DEADLINE_HEADERS, "seconds that the client waits"),
    OfRequest(("content-type",), "on routes of files: a form, or a file"),
    OfRequest(("content-length", "expect"), "the length of the body, and whether to ask for it"),
    OfRequest(("content-encoding",), "a compressed body is refused"),
    OfRequest(
        ("origin", "access-control-request-method", "access-control-request-headers"),
        "the [web page](api.md#web-pages) that asks",
    ),
    OfRequest(
        ("sec-websocket-protocol",),
        "on [WebSockets](api.md#websockets): the client's key, as `openai-insecure-api-key.KEY`",
    ),
    OfRequest(
        (*FORWARDED_HEADERS, f"{FORWARDED_PREFIX}*"),
        "the request came through a proxy; [without an admin key](operations.md#without-an-admin-key), the "
        "admin API refuses it",
    ),
)
ANSWER_HEADERS = (
    OfAnswer(
        (REQUEST_ID_HEADER,),
        "answers under `/v1`, but not lists of models",
        "the client's own, or one of kvpin's; finds the request in logs and `kvpin requests`",
        "req-5bf1…",
    ),
    OfAnswer((ANTHROPICS_ID_HEADER,), "answers under `/v1/messages`", "the same", "req-5bf1…"),
    OfAnswer((ENGINE_HEADER,), "answers of engines", "the engine that answered", "vllm-0"),
    OfAnswer(
        (PREDICTED_HEADER,),
        "answers of engines",
        "prompt tokens that kvpin predicted to come from cache",
        "2416",
    ),
    OfAnswer(
        (CACHED_HEADER,),
        "answers whose engine reports it before the first byte: all that are no streams, and streams of an "
        "embedded engine",
        "prompt tokens that came from cache",
        "2416",
    ),
    OfAnswer(
        (NOTE_HEADER,),
        "answers served in an unusual way",
        "one sentence, e.g. that a request could not be pinned to a slot; also in `kvpin requests --json`",
        "ran alone: …",
    ),
    OfAnswer(
        (POLICY_HEADER,),
        "answers of engines",
        "a browser that shows the answer as a page runs [none of its scripts](threat-model.md#boundaries)",
        "sandbox",
    ),
    OfAnswer((RETRY_AFTER_HEADER,), "429, 503", "seconds", "1"),
    OfAnswer(
        (SHOULD_RETRY_HEADER,),
        "failures",
        "`false`: kvpin tried several engines and all failed; otherwise the engine's own",
        "false",
    ),
    OfAnswer((*RETRY_HEADERS, f"{LIMIT_PREFIX}*"), "errors of engines", "the engine's own", "20"),
    OfAnswer(("www-authenticate",), "401", "the kind of key", "Bearer"),
    OfAnswer(("allow",), "405, and answers to OPTIONS", "the methods of the route", "GET, HEAD, OPTIONS"),
    OfAnswer(
        ("access-control-*", "vary"),
        "with `cors_origins`, all answers under `/v1`",
        "what a [web page](api.md#web-pages) may read",
        "*",
    ),
)
