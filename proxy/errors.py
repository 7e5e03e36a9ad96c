"""Errors that kvpin itself answers with: the other branch of the tree in `engine_adapter/errors.py`.

ProxyError
├── BadRequest           a field is wrong; names the field
│   └── TooLong          the prompt is longer than the model's context
├── NotFound             no such model, route, engine, operation, request or table
│   └── ModelRefused     none that the request's key may use
├── MethodNotAllowed     the route exists, for other methods
├── Conflict             the name exists with other content
├── Unauthorized         no key, or a wrong or expired one
├── Forbidden            the caller may not do this from where it is, or as one of several tenants
├── BodyTooLarge         over the limit
├── SlowBody             not sent in time
├── EncodedBody          compressed in an unknown way
├── RateLimited          over a limit of its tenant: retry in `retry_after_s`
├── Overloaded           all engines are busy: retry in `retry_after_s`
│   └── NoMemory         requests' bodies take all the memory for them
├── TimeLimit            it took longer than `timeouts.total_s`
├── NoEngine             no engine can take it now: retry in a second
└── EngineFailed         the engines that were asked went away
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine_adapter.causes import Cause, Code
from engine_adapter.errors import NO_HEADERS, KvpinError
from engine_adapter.options import plain_error
from proxy.headers import RETRY_AFTER_HEADER, SHOULD_RETRY_HEADER

ANSWERED = (KvpinError, msgspec.DecodeError)
"""Errors with an answer of their own. Any other is a bug."""
_SHAPE_CODES = (Code.TOO_COMPLEX, Code.ARRAY_ABOVE_MAX_LENGTH)


class ProxyError(KvpinError):
    """Base of every error kvpin answers with."""

    headers: Mapping[str, str] = NO_HEADERS  # added to the answer; `retry_after_s` becomes one

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: Code | None = None,
        more: Mapping[str, Any] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field at fault, if any
        if code is not None:
            self.code = code
        if code in _SHAPE_CODES:
            self.refusal = "shape"
        self.more = more or {}  # further fields of the error, in OpenAI's shape
        if retry_after_s is not None:
            self.headers = {RETRY_AFTER_HEADER: str(retry_after_s)}


class BadRequest(ProxyError):
    """The request is wrong."""

    code = Code.INVALID_VALUE


class TooLong(BadRequest):
    """The prompt is longer than the model's context. Its tenant pays for what was counted of it."""

    code = Code.CONTEXT_LENGTH_EXCEEDED

    def __init__(self, message: str, tokens: int, **more: Any) -> None:  # noqa: ANN401 - as ProxyError takes it
        super().__init__(message, **more)
        self.tokens = tokens  # those that were counted


class NotFound(ProxyError):
    """The request names something that does not exist."""

    code = Code.NOT_FOUND


class ModelRefused(NotFound):
    """The request names no model that its key may use, whether there is such a model or not."""

    code = Code.MODEL_NOT_FOUND
    cause = Cause.MODEL_REFUSED
    refusal = "model"


class MethodNotAllowed(ProxyError):
    """The route takes other methods, which the answer names."""

    code = Code.METHOD_NOT_ALLOWED

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.headers = {"allow": allow}


class Conflict(ProxyError):
    """The request would create something that exists with other content."""

    code = Code.CONFLICT


class Unauthorized(ProxyError):
    """The key is missing, wrong or expired."""

    code = Code.INVALID_API_KEY
    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}


class Forbidden(ProxyError):
    """The caller may not do this from where it is, or as one of several tenants."""

    code = Code.FORBIDDEN


class BodyTooLarge(ProxyError):
    """The request body is over the limit."""

    code = Code.BODY_TOO_LARGE
    refusal = "size"


class SlowBody(ProxyError):
    """The request body did not arrive in time."""

    code = Code.SLOW_BODY
    cause = Cause.CLIENT_SLOW
    refusal = "slow"


class EncodedBody(ProxyError):
    """The request body is compressed in a way that kvpin does not read."""

    code = Code.ENCODED_BODY


class RateLimited(ProxyError):
    """The tenant is over one of its limits."""

    code = Code.RATE_LIMIT_EXCEEDED
    cause = Cause.QUOTA


class Overloaded(ProxyError):
    """Engines are ready, but too busy."""

    code = Code.OVERLOADED
    cause = Cause.OVERLOADED


class NoMemory(Overloaded):
    """The bodies of requests take all the memory that they may."""

    refusal = "memory"


class TimeLimit(ProxyError):
    """The request took longer than kvpin allows. Repeating it would take as long again."""

    code = Code.TIME_LIMIT
    cause = Cause.OUR_LIMIT
    headers: Mapping[str, str] = {SHOULD_RETRY_HEADER: "false"}


class NoEngine(ProxyError):
    """No engine can take the request now. The client should retry in a second, unless an operator has to act
    first (`lasts`)."""

    code = Code.NO_ENGINE
    cause = Cause.NO_ENGINE

    def __init__(self, message: str, *, lasts: bool = False) -> None:
        super().__init__(message, retry_after_s=None if lasts else 1)


class EngineFailed(ProxyError):
    """The engines that were asked went away before the answer began."""

    code = Code.ENGINE_FAILED
    cause = Cause.ENGINE_GARBLED


def message_of(error: Exception) -> str:
    """What its client, and the record of the request, say of an error."""
    is_broken = isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError)
    return f"the body is not valid JSON: {plain_error(str(error))}" if is_broken else str(error)


def code_of(error: Exception) -> Code:
    """The code of an error: of a bug, too."""
    if isinstance(error, KvpinError):
        return error.code
    if isinstance(error, msgspec.ValidationError):
        return Code.INVALID_VALUE
    return Code.INVALID_JSON if isinstance(error, msgspec.DecodeError) else Code.INTERNAL_ERROR


def status_of(error: Exception) -> int:
    """The HTTP status that an error is answered with. An engine's error that is passed on does not come here:
    see `Attempt._as_error`."""
    return error.status if isinstance(error, KvpinError) else code_of(error).status


def cause_of(error: BaseException) -> Cause:
    """The cause of a request's end with this error; `BUG` for an unexpected one."""
    if isinstance(error, KvpinError):
        return error.cause
    return Cause.INVALID if isinstance(error, msgspec.DecodeError) else Cause.BUG
