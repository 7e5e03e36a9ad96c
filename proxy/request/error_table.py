"""The code and the cause of each class of errors, and the shape of an error (OpenAI's)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from engine_adapter import (
    ChatError,
    EngineDied,
    EngineDiverged,
    EngineError,
    EngineGarbled,
    EngineLate,
    EngineLost,
    EngineRejected,
    EngineSpecError,
    EngineTaken,
    EngineUnavailable,
    EngineUnhealthy,
    EngineUnreachable,
    FieldError,
    ModelFailed,
    ModelNotLoaded,
    NotSupported,
    PromptTableError,
)
from proxy import errors
from proxy.core.life import Cause
from proxy.errors.codes import Code

NO_MORE: Mapping[str, object] = MappingProxyType({})
# Errors with an answer of their own. Any other is a bug.
ANSWERED = (errors.ProxyError, EngineError, msgspec.DecodeError)
# A subclass that is not listed has the code of its nearest base.
CODES: dict[type[Exception], Code] = {
    errors.BadRequest: Code.INVALID_VALUE,
    errors.TooLong: Code.CONTEXT_LENGTH_EXCEEDED,
    errors.Unauthorized: Code.INVALID_API_KEY,
    errors.Forbidden: Code.FORBIDDEN,
    errors.NotFound: Code.NOT_FOUND,
    errors.ModelRefused: Code.MODEL_NOT_FOUND,
    errors.MethodNotAllowed: Code.METHOD_NOT_ALLOWED,
    errors.Conflict: Code.CONFLICT,
    errors.SlowBody: Code.SLOW_BODY,
    errors.BodyTooLarge: Code.BODY_TOO_LARGE,
    errors.EncodedBody: Code.ENCODED_BODY,
    errors.RateLimited: Code.RATE_LIMIT_EXCEEDED,
    errors.Overloaded: Code.OVERLOADED,
    errors.TimeLimit: Code.TIME_LIMIT,
    errors.NoMemory: Code.OVERLOADED,
    errors.NoEngine: Code.NO_ENGINE,
    errors.EngineFailed: Code.ENGINE_FAILED,
    errors.ProxyError: Code.INTERNAL_ERROR,
    msgspec.ValidationError: Code.INVALID_VALUE,
    msgspec.DecodeError: Code.INVALID_JSON,
    PromptTableError: Code.INVALID_EMBEDDINGS,
    ChatError: Code.INVALID_MESSAGES,
    FieldError: Code.INVALID_VALUE,
    EngineSpecError: Code.INVALID_ENGINE,
    NotSupported: Code.NOT_SUPPORTED,
    EngineTaken: Code.ENGINE_TAKEN,
    **dict.fromkeys(
        (
            EngineUnhealthy,
            ModelNotLoaded,
            EngineUnreachable,
            EngineDied,
            EngineGarbled,
            EngineLate,
            EngineLost,
            EngineDiverged,
            EngineUnavailable,
        ),
        Code.ENGINE_UNAVAILABLE,
    ),
    EngineRejected: Code.ENGINE_REJECTED,
    ModelFailed: Code.MODEL_FAILED,
    EngineError: Code.ENGINE_ERROR,
}


# The cause of each class of errors, see `core/life/`. A class that is not listed has the cause of its nearest
# base. An error without a cause here means an invalid request.
CAUSES: dict[type[BaseException], Cause] = {
    EngineUnavailable: Cause.ENGINE_UNREACHABLE,
    EngineDied: Cause.ENGINE_DIED,
    EngineGarbled: Cause.ENGINE_GARBLED,
    EngineLate: Cause.ENGINE_LATE,
    EngineLost: Cause.ENGINE_LOST,
    EngineDiverged: Cause.DIVERGED,
    ModelFailed: Cause.ENGINE_MODEL_FAILED,
    errors.ModelRefused: Cause.MODEL_REFUSED,
    errors.RateLimited: Cause.QUOTA,
    errors.Overloaded: Cause.OVERLOADED,
    errors.NoEngine: Cause.NO_ENGINE,
    errors.EngineFailed: Cause.ENGINE_GARBLED,
    errors.SlowBody: Cause.CLIENT_SLOW,
    errors.TimeLimit: Cause.OUR_LIMIT,
    EngineError: Cause.INVALID,
    errors.ProxyError: Cause.INVALID,
    msgspec.DecodeError: Cause.INVALID,
}

# Reasons of `kvpin_refused_total`. scripts/reference/gate.py has all limits.
_REASONS: dict[type[Exception], str] = {
    errors.NoMemory: "memory",
    errors.SlowBody: "slow",
    errors.BodyTooLarge: "size",
    errors.ModelRefused: "model",
}
_SHAPE_CODES = (Code.TOO_COMPLEX, Code.ARRAY_ABOVE_MAX_LENGTH)


def cause_of(error: BaseException) -> Cause:
    """The cause of an error; `BUG` for an unexpected one."""
    return next((CAUSES[base] for base in type(error).__mro__ if base in CAUSES), Cause.BUG)


def code_of(error: Exception) -> Code:
    """The code of an error: its own, else its class's, else the code of bugs."""
    own = getattr(error, "code", None)
    if isinstance(own, Code):
        return own
    return next((CODES[base] for base in type(error).__mro__ if base in CODES), Code.INTERNAL_ERROR)


def status_of(error: Exception) -> int:
    """The HTTP status an error is answered with."""
    return error.status if isinstance(error, EngineRejected) else code_of(error).status


def refusal_of(error: Exception) -> str | None:
    """The reason of `kvpin_refused_total` for a request that was refused before the flow got it; None for an
    error of another kind."""
    return "shape" if code_of(error) in _SHAPE_CODES else _REASONS.get(type(error))


def error_body(
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    more: Mapping[str, object] = NO_MORE,
) -> bytes:
    """An error in OpenAI's shape. `more` fields may replace these."""
    error = {"message": message, "type": kind, "param": param, "code": code, **more}
    return msgspec.json.encode({"error": error})
