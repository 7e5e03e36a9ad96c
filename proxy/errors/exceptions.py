"""Errors that kvpin itself answers with. `request/error_table.py` gives each class its code.

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

from proxy.errors.codes import Code
from proxy.headers import RETRY_AFTER_HEADER, SHOULD_RETRY_HEADER


class ProxyError(Exception):
    """Base of every error kvpin answers with.

    Attributes:
        param: the request field at fault, if any.
        code: its code; None takes that of the class.
        more: further fields of the error, in OpenAI's shape.
        headers: added to the answer; `retry_after_s` becomes one.
    """

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
        self.param = param
        self.code = code
        self.more = more or {}
        self.headers: Mapping[str, str] = (
            {} if retry_after_s is None else {RETRY_AFTER_HEADER: str(retry_after_s)}
        )


class BadRequest(ProxyError):
    """The request is wrong."""


class TooLong(BadRequest):
    """The prompt is longer than the model's context. Its tenant pays for what was counted of it.

    Attributes:
        tokens: those that were counted.
    """

    def __init__(self, message: str, tokens: int, **more: Any) -> None:  # noqa: ANN401 - as ProxyError takes it
        super().__init__(message, **more)
        self.tokens = tokens


class NotFound(ProxyError):
    """The request names something that does not exist."""


class ModelRefused(NotFound):
    """The request names no model that its key may use, whether there is such a model or not."""


class MethodNotAllowed(ProxyError):
    """The route takes other methods, which the answer names."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.headers = {"allow": allow}


class Conflict(ProxyError):
    """The request would create something that exists with other content."""


class Unauthorized(ProxyError):
    """The key is missing, wrong or expired."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {"www-authenticate": "Bearer"}


class Forbidden(ProxyError):
    """The caller may not do this from where it is, or as one of several tenants."""


class BodyTooLarge(ProxyError):
    """The request body is over the limit."""


class SlowBody(ProxyError):
    """The request body did not arrive in time."""


class EncodedBody(ProxyError):
    """The request body is compressed in a way that kvpin does not read."""


class RateLimited(ProxyError):
    """The tenant is over one of its limits."""


class Overloaded(ProxyError):
    """Engines are ready, but too busy."""


class NoMemory(Overloaded):
    """The bodies of requests take all the memory that they may."""


class TimeLimit(ProxyError):
    """The request took longer than kvpin allows. Repeating it would take as long again."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {SHOULD_RETRY_HEADER: "false"}


class NoEngine(ProxyError):
    """No engine can take the request now. The client should retry in a second, unless an operator has to act
    first (`lasts`)."""

    def __init__(self, message: str, *, lasts: bool = False) -> None:
        super().__init__(message, retry_after_s=None if lasts else 1)


class EngineFailed(ProxyError):
    """The engines that were asked went away before the answer began."""
