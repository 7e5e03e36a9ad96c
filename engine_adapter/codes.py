"""The codes of errors: `error.code` of an answer, for programs. docs/reference/errors.md shows them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    424: "server_error",
    501: "not_supported_error",
}
_SERVERS_FAULT = 500


class Code(StrEnum):
    """A code, the status of its answers, and what it means.

    Attributes:
        status: HTTP status.
        meaning: for people, in Markdown; links are relative to docs/.
    """

    status: int
    meaning: str

    def __new__(cls, code: str, status: int, meaning: str) -> Self:
        """A code of this table; each argument becomes the attribute of its name."""
        self = str.__new__(cls, code)
        self._value_, self.status, self.meaning = code, status, meaning
        return self

    @property
    def type(self) -> str:
        """OpenAI's type of such errors."""
        other = "server_error" if self.status >= _SERVERS_FAULT else "invalid_request_error"
        return _TYPES.get(self.status, other)

    INVALID_JSON = "invalid_json", 400, "the body is no JSON object"
    INVALID_VALUE = (
        "invalid_value",
        400,
        "a field is missing, or its value or type is wrong; `param` names it",
    )
    ARRAY_ABOVE_MAX_LENGTH = (
        "array_above_max_length",
        400,
        "`messages`, `input` or `tools`, or a list in one of their entries, has more than 16,384 entries",
    )
    TOO_COMPLEX = (
        "body_too_complex",
        400,
        (
            "the body has more values or fields than `limits.json_values` and `limits.json_fields` allow, "
            "or a field of it is too long or too deep: [the gate](reference/gate.md)"
        ),
    )
    INVALID_MESSAGES = "invalid_messages", 400, "messages, tools or template options that cannot be rendered"
    INVALID_EMBEDDINGS = (
        "invalid_embeddings",
        400,
        "a prompt table, embeddings or extra ids that break their rules",
    )
    CONTEXT_LENGTH_EXCEEDED = (
        "context_length_exceeded",
        400,
        "the prompt is longer than the model's context; a llama-server tells `n_prompt_tokens` and `n_ctx`",
    )
    INVALID_ENGINE = "invalid_engine", 400, "an engine description that cannot be used"
    INVALID_API_KEY = "invalid_api_key", 401, "no key, or a wrong or expired one"
    FORBIDDEN = (
        "forbidden",
        403,
        (
            "the admin API [without a key](operations.md#without-an-admin-key) was called from another "
            "machine or through a proxy, or a [web page](api.md#web-pages) or a "
            "[WebSocket](api.md#websockets) may not use kvpin, or a route or a field reaches what an engine "
            "keeps for [all tenants](api.md#several-tenants)"
        ),
    )
    NOT_FOUND = "not_found", 404, "no such route, engine, operation, request or table"
    PREVIOUS_RESPONSE_NOT_FOUND = (
        "previous_response_not_found",
        404,
        "`previous_response_id` names no response that is kept for this client",
    )
    MODEL_NOT_FOUND = (
        "model_not_found",
        404,
        (
            "no engine serves [that model](api.md#model-names), or "
            "[the key may not use it](operations.md#models-and-end-of-a-key)"
        ),
    )
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "the route takes other methods, which `allow` names"
    SLOW_BODY = "slow_body", 408, "the body did not arrive in time"
    CONFLICT = (
        "conflict",
        409,
        "the same name exists with other content, or kvpin was not started for this: the message says why",
    )
    BODY_TOO_LARGE = (
        "body_too_large",
        413,
        ("the body is longer than `limits.body_bytes`, or than `limits.json_bytes` beside base64"),
    )
    ENCODED_BODY = "encoded_body", 415, "the body is compressed"
    MODEL_FAILED = (
        "model_failed",
        424,
        "no engine can load the model: the message says why. Each request tries to load it again",
    )
    RATE_LIMIT_EXCEEDED = (
        "rate_limit_exceeded",
        429,
        "the tenant is over a [limit](operations.md#limits-of-a-tenant); `retry-after` says when to retry",
    )
    INTERNAL_ERROR = "internal_error", 500, "a bug in kvpin; the log has the details"
    NOT_SUPPORTED = "not_supported", 501, "the engine cannot do this; the message says what to do instead"
    ENGINE_FAILED = "engine_failed", 502, "every engine that kvpin tried failed before the answer began"
    ENGINE_UNAVAILABLE = "engine_unavailable", 502, "the engine is gone"
    TIME_LIMIT = "time_limit", 504, "the request took longer than `timeouts.total_s` allows"
    # Its status is the engine's.
    ENGINE_REJECTED = "engine_rejected", 502, "the engine answered an error that has no code"
    ENGINE_ERROR = "engine_error", 502, "any other error of an engine"
    ENGINE_TAKEN = "engine_taken", 503, "another kvpin uses the engine, and only one may"
    NO_ENGINE = (
        "no_engine",
        503,
        (
            "no engine became ready within 2 s, kvpin is stopping, or it has all the "
            "[connections](operations.md#limits-on-connections) it can; `retry-after` says when to retry"
        ),
    )
    OVERLOADED = (
        "overloaded",
        503,
        (
            "all engines are [too busy](operations.md#overload), or requests' bodies take all "
            "[memory for them](operations.md#memory-for-bodies); `retry-after` says when to retry"
        ),
    )
