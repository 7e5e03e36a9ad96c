"""The headers that kvpin reads, sets and drops, in lower case. docs/reference/headers.md says what they mean.

Which headers of a client end at kvpin for every engine: `engine_adapter/http/prepare.py`.
"""

from __future__ import annotations

REQUEST_ID_HEADER = "x-request-id"
# In requests.
KEY_HEADERS = ("authorization", "x-api-key", "cookie")
SESSION_HEADERS = (
    "session-id", "session_id", "x-session-id", "x-claude-code-session-id", "x-conversation-id",
    "x-session-affinity", "x-affinity", "x-litellm-session-id",
)  # fmt: skip
PRIORITY_HEADER = "x-kvpin-priority"
COMPARISON_HEADER = "x-kvpin-compare-with"
DEADLINE_HEADERS = ("x-request-timeout", "x-stainless-timeout", "x-stainless-read-timeout")
FORWARDED_HEADERS = ("forwarded", "via", "x-real-ip")
FORWARDED_PREFIX = "x-forwarded-"
# In answers.
ANTHROPICS_ID_HEADER = "request-id"
ENGINE_HEADER = "x-kvpin-engine"
PREDICTED_HEADER = "x-kvpin-predicted-tokens"
FIRM_HEADER = "x-kvpin-prediction"
CACHED_HEADER = "x-kvpin-cached-tokens"
NOTE_HEADER = "x-kvpin-note"
RETENTION_HEADER = "x-kvpin-retention"
NORMALISED_HEADER = "x-kvpin-normalised"
CHANGED_HEADER = "x-kvpin-changed"
POLICY_HEADER = "content-security-policy"
RETRY_AFTER_HEADER = "retry-after"
SHOULD_RETRY_HEADER = "x-should-retry"
RETRY_HEADERS = (RETRY_AFTER_HEADER, "retry-after-ms", SHOULD_RETRY_HEADER)
LIMIT_PREFIX = "x-ratelimit-"
OWN_PREFIX = "x-kvpin-"  # only kvpin sets headers with this prefix, and reads them
# Headers of an engine's answer that kvpin does not pass on: those of one connection, and those that it sets
# itself. A cookie of an engine may be the session of kvpin's own key there. Which pages may use the data
# plane is kvpin's to say: `proxy/api/auth.py`. The last ones tell a browser, or the proxy in front of kvpin,
# to do more than pass an answer on: leave the page, forget kvpin's data, insist on HTTPS, send a file.
DROPPED_HEADERS = (
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "server", "date", "x-kv-cached-tokens",
    REQUEST_ID_HEADER, ANTHROPICS_ID_HEADER, "set-cookie",
    "access-control-allow-credentials", "access-control-allow-headers", "access-control-allow-methods",
    "access-control-allow-origin", "access-control-expose-headers", "access-control-max-age",
    "alt-svc", "clear-site-data", "content-security-policy-report-only", "link", "nel", "public-key-pins",
    "refresh", "report-to", "reporting-endpoints", "service-worker-allowed", "sourcemap", "speculation-rules",
    "strict-transport-security", "www-authenticate", "x-accel-redirect", "x-sendfile",
)  # fmt: skip
