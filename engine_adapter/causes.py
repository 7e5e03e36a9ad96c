"""Why a request, or its attempt on one engine, ended. This one table has all consequences of each cause.

If the cause allows it, another engine is tried. The request's cause is that of its last attempt.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Self

# --- codes ----------------------------------------------------------------------------------------------
# The codes of errors: `error.code` of an answer, for programs. docs/reference/errors.md shows them.

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

    # fmt: off
    INVALID_JSON = "invalid_json", 400, "the body is no JSON object"
    INVALID_VALUE = "invalid_value", 400, (
        "a field is missing, or its value or type is wrong; `param` names it")
    ARRAY_ABOVE_MAX_LENGTH = "array_above_max_length", 400, (
        "`messages`, `input` or `tools`, or a list in one of their entries, has more than 16,384 entries")
    TOO_COMPLEX = "body_too_complex", 400, (
        "the body has more values or fields than `limits.json_values` and `limits.json_fields` allow, or a "
        "field of it is too long or too deep: [the gate](reference/gate.md)")
    INVALID_MESSAGES = "invalid_messages", 400, "messages, tools or template options that cannot be rendered"
    INVALID_EMBEDDINGS = "invalid_embeddings", 400, (
        "a prompt table, embeddings or extra ids that break their rules")
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", 400, (
        "the prompt is longer than the model's context; a llama-server tells `n_prompt_tokens` and `n_ctx`")
    INVALID_ENGINE = "invalid_engine", 400, "an engine description that cannot be used"
    INVALID_API_KEY = "invalid_api_key", 401, "no key, or a wrong or expired one"
    FORBIDDEN = "forbidden", 403, (
        "the admin API [without a key](keys.md#without-an-admin-key) was called from another machine or "
        "through a proxy, or a [web page](api.md#web-pages) or a [WebSocket](api.md#websockets) may not "
        "use kvpin, or a route or a field reaches what an engine keeps for [all "
        "tenants](api.md#several-tenants)")
    NOT_FOUND = "not_found", 404, "no such route, engine, operation, request or table"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found", 404, (
        "`previous_response_id` names no response that is kept for this client")
    MODEL_NOT_FOUND = "model_not_found", 404, (
        "no engine serves [that model](api.md#model-names), or [the key may not use "
        "it](keys.md#models-and-end-of-a-key)")
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "the route takes other methods, which `allow` names"
    SLOW_BODY = "slow_body", 408, "the body did not arrive in time"
    CONFLICT = "conflict", 409, (
        "the same name exists with other content, or kvpin was not started for this: the message says why")
    BODY_TOO_LARGE = "body_too_large", 413, (
        "the body is longer than `limits.body_bytes`, or than `limits.json_bytes` beside base64")
    ENCODED_BODY = "encoded_body", 415, "the body is compressed, but not by gzip, deflate or zstd"
    MODEL_FAILED = "model_failed", 424, (
        "no engine can load the model: the message says why. After 10 s, and up to 10 minutes after repeated "
        "failures, a request tries again")
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded", 429, (
        "the tenant is over a [limit](keys.md#limits-of-a-tenant); `retry-after` says when to retry")
    INTERNAL_ERROR = "internal_error", 500, "a bug in kvpin; the log has the details"
    NOT_SUPPORTED = "not_supported", 501, "the engine cannot do this; the message says what to do instead"
    ENGINE_FAILED = "engine_failed", 502, "every engine that kvpin tried failed before the answer began"
    ENGINE_UNAVAILABLE = "engine_unavailable", 502, "the engine is gone"
    TIME_LIMIT = "time_limit", 504, "the request took longer than `timeouts.total_s` allows"
    # Its status is the engine's.
    ENGINE_REJECTED = "engine_rejected", 502, "the engine answered an error that has no code"
    ENGINE_ERROR = "engine_error", 502, "any other error of an engine"
    ENGINE_TAKEN = "engine_taken", 503, "another kvpin uses the engine, and only one may"
    NO_ENGINE = "no_engine", 503, (
        "no engine became ready within 2 s, kvpin is stopping, or it has all the "
        "[connections](operations.md#limits-on-connections) it can; `retry-after` says when to retry")
    OVERLOADED = "overloaded", 503, (
        "all engines are [too busy](operations.md#overload), or requests' bodies take all [memory for "
        "them](operations.md#memory-for-bodies); `retry-after` says when to retry")
    # fmt: on


# --- causes ---------------------------------------------------------------------------------------------


class Blame(Enum):
    """The consequence of a failed attempt for its engine."""

    NOBODY = "nobody"
    """Nothing: the engine is as healthy as before."""
    CHECK = "check"
    """Check its health at once."""
    SUSPECT = "suspect"
    """Check its health at once, prefer other engines until then, count a failure in its breaker."""
    REFUSED = "refused"
    """Count a failure in its circuit breaker."""
    UNLESS_ALL = "unless all"
    """The same, unless all other engines refuse the request, too: then the request is at fault."""
    IF_ANSWERED = "if answered"
    """The same, but only once another engine has answered the request."""
    LACKS = "lacks"
    """It has not got the route: prefer engines that may have it."""


class Cause(StrEnum):
    """A cause, and what follows from it.

    Attributes:
        code: kvpin's error if nothing has reached the client, as the documentation tells it: what counts is
            the error's own code. None where there is none, or an engine's own.
        elsewhere: another engine may still answer the request.
        again: that engine may, too: it did not get the request.
        blame: the consequence for the engine.
        is_poison: the request itself may kill engines. After two such attempts, no other engine is tried.
        meaning: for people.
    """

    code: Code | None
    elsewhere: bool
    again: bool
    blame: Blame
    is_poison: bool
    meaning: str

    def __new__(
        cls, word: str, code: Code | None, meaning: str, blame: Blame = Blame.NOBODY, *flags: str
    ) -> Self:
        """A cause of this table. `flags` may hold "elsewhere", "again" and "poison"; an absent flag is
        False."""
        self = str.__new__(cls, word)
        self._value_, self.code, self.meaning, self.blame = word, code, meaning, blame
        self.elsewhere, self.again = "elsewhere" in flags, "again" in flags
        self.is_poison = "poison" in flags
        return self

    # fmt: off
    ANSWERED = "answered", None, "the client has the whole answer"
    # The client.
    CLIENT_LEFT = "client_left", None, "the client disconnected before the end of its answer"
    CLIENT_SLOW = "client_slow", Code.SLOW_BODY, "the client sent its body, or took its answer, too slowly"
    PART_FAILED = "part_failed", None, "another part of the same request failed"
    INVALID = (
        "invalid", Code.INVALID_VALUE,
        "the request is wrong, or not allowed: kvpin refused it, or no engine has what its path names")
    MODEL_REFUSED = "model_refused", Code.MODEL_NOT_FOUND, "the client's key is not for the model"
    # kvpin.
    QUOTA = "quota", Code.RATE_LIMIT_EXCEEDED, "the tenant is over one of its limits"
    OVERLOADED = (
        "overloaded", Code.OVERLOADED,
        "the wait for an engine exceeds `limits.queue_s`, the queue is full, or no memory is left")
    NO_ENGINE = "no_engine", Code.NO_ENGINE, "no engine takes the request now"
    OUR_LIMIT = (
        "our_limit", Code.TIME_LIMIT,
        ("the request exceeded `timeouts.total_s`, or reached no engine within `timeouts.first_byte_s` + "
         "`limits.queue_s`"))
    STOPPING = "stopping", Code.NO_ENGINE, "kvpin stopped"
    BUG = "bug", Code.INTERNAL_ERROR, "a bug in kvpin; the log has the details"
    # The engine.
    ENGINE_REJECTED = "engine_rejected", None, "the engine's own error about the request, passed on"
    ENGINE_UNREACHABLE = (
        "engine_unreachable", Code.ENGINE_FAILED, "no connection to the engine", Blame.SUSPECT, "elsewhere")
    ENGINE_LOST = (
        "engine_lost", Code.ENGINE_FAILED, "health checks lost the engine, or it was removed",
        Blame.NOBODY, "elsewhere")
    ENGINE_CHANGED = (
        "engine_changed", Code.ENGINE_FAILED,
        "another process may have taken the engine's place before the request was sent",
        Blame.NOBODY, "elsewhere", "again")
    ENGINE_BUSY = (
        "engine_busy", Code.OVERLOADED,
        "the engine had no room within `timeouts.first_byte_s`, for example no slot",
        Blame.NOBODY, "elsewhere")
    ENGINE_DIED = (
        "engine_died", Code.ENGINE_FAILED, "the connection broke after the request was sent",
        Blame.SUSPECT, "elsewhere", "poison")
    ENGINE_LATE = (
        "engine_late", Code.ENGINE_FAILED, "no answer began within `timeouts.first_byte_s`",
        Blame.SUSPECT, "elsewhere")
    ENGINE_SILENT = (
        "engine_silent", Code.ENGINE_FAILED, "nothing of a running answer came for `timeouts.idle_s`",
        Blame.CHECK, "elsewhere")
    ENGINE_GARBLED = (
        "engine_garbled", Code.ENGINE_FAILED,
        "the answer is no HTTP, no JSON, not of the API's shape, empty (204), or leads elsewhere (3xx)",
        Blame.SUSPECT, "elsewhere", "poison")
    ENGINE_REFUSED = (
        "engine_refused", Code.ENGINE_REJECTED, "the engine answered 429, or 500 and above but for 501",
        Blame.UNLESS_ALL, "elsewhere")
    ENGINE_DENIED = (
        "engine_denied", Code.ENGINE_REJECTED,
        ("the engine answered 401, 403, 405 or 501, or 404 for its model; one other engine is asked whether "
         "it does, too"),
        Blame.IF_ANSWERED, "elsewhere")
    ENGINE_MODEL_FAILED = (
        "engine_model_failed", Code.MODEL_FAILED, "the engine cannot load the model",
        Blame.REFUSED, "elsewhere")
    ENGINE_LACKS = (
        "engine_lacks", Code.ENGINE_REJECTED, "the engine has not got the route, file or batch",
        Blame.LACKS, "elsewhere")
    DIVERGED = (
        "diverged", Code.ENGINE_FAILED, "the engine that was to go on with a stream gave another answer",
        Blame.NOBODY, "elsewhere")
    # fmt: on
