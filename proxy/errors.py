"""What kvpin itself answers in place of an engine. `request/error_table.py` gives each class its status.

ProxyError
├── BadRequest           the client's fault; names the field
├── NotFound             no such model, route, engine, operation, request or table
├── Conflict             the same name with other content
├── Unauthorized         no key, or a wrong one
├── Forbidden            the admin API without a key, from elsewhere than this machine
├── BodyTooLarge         over the limit
├── NoEngine             no engine can take it now: retry in `retry_after_s`
└── EngineFailed         the engines that were asked went away
"""

from __future__ import annotations

from collections.abc import Mapping


class ProxyError(Exception):
    """Base of every error kvpin answers with.

    Attributes:
        param: the request field at fault, if any.
        code: OpenAI's machine-readable code; None takes the default of the class.
        headers: added to the answer.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.headers: Mapping[str, str] = {}


class BadRequest(ProxyError):
    """The request cannot be served as it stands."""


class NotFound(ProxyError):
    """What the request names does not exist."""


class Conflict(ProxyError):
    """What the request would create exists with other content."""


class Unauthorized(ProxyError):
    """The key is missing or wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {"www-authenticate": "Bearer"}


class Forbidden(ProxyError):
    """The caller may not do this from where it is."""


class BodyTooLarge(ProxyError):
    """The request body is over the limit."""


class NoEngine(ProxyError):
    """No engine can take the request now; its client is asked to retry in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after_s)}


class EngineFailed(ProxyError):
    """The engines that were asked went away before the answer began."""
