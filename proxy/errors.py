"""What kvpin itself can answer instead of an engine's response. `api/errors.py` gives each its status.

ProxyError
├── BadRequest           the client's fault; names the field
├── NotFound             no such model, route, engine, operation, request or table
├── Conflict             the same name with other content
├── Unauthorized         no key, or a wrong one
├── Forbidden            the admin API without a key, from elsewhere than this machine
├── BodyTooLarge         over the limit
├── NoEngine             nobody can serve it now: come back in `retry_after_s`
└── EngineFailed         every engine that could be asked failed
"""

from __future__ import annotations


class ProxyError(Exception):
    """Base of every error kvpin answers with.

    Attributes:
        param: the request field at fault, if any.
        code: OpenAI's machine-readable code; None takes the default of the class.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(ProxyError):
    """The request cannot be served as it stands."""


class NotFound(ProxyError):
    """What the request names does not exist."""


class Conflict(ProxyError):
    """What the request would create exists with other content."""


class Unauthorized(ProxyError):
    """The key is missing or wrong."""


class Forbidden(ProxyError):
    """The caller may not do this from where it is."""


class BodyTooLarge(ProxyError):
    """The request body is over the limit."""


class NoEngine(ProxyError):
    """No engine can take the request now.

    Attributes:
        retry_after_s: when to try again.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFailed(ProxyError):
    """The engines that were asked went away before the first byte of an answer."""
