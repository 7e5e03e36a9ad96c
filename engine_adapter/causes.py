"""Why a request, or its attempt on one engine, ended. This one table has all consequences of each cause.

If the cause allows it, another engine is tried. The request's cause is that of its last attempt.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Self

from engine_adapter.codes import Code


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
        blame: the consequence for the engine.
        is_poison: the request itself may kill engines. After two such attempts, no other engine is tried.
        meaning: for people.
    """

    code: Code | None
    elsewhere: bool
    blame: Blame
    is_poison: bool
    meaning: str

    def __new__(
        cls,
        word: str,
        code: Code | None,
        meaning: str,
        blame: Blame = Blame.NOBODY,
        *flags: str,
    ) -> Self:
        """A cause of this table. `flags` may hold "elsewhere" and "poison"; an absent flag is False."""
        self = str.__new__(cls, word)
        self._value_, self.code, self.meaning, self.blame = word, code, meaning, blame
        self.elsewhere, self.is_poison = "elsewhere" in flags, "poison" in flags
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
