"""The errors that kvpin answers with: their classes, and their codes.

exceptions.py  the classes; `from proxy.errors import …`
codes.py       the codes, their HTTP statuses, and what they mean
"""

from proxy.errors.exceptions import (
    BadRequest,
    BodyTooLarge,
    Conflict,
    EncodedBody,
    EngineFailed,
    Forbidden,
    MethodNotAllowed,
    ModelRefused,
    NoEngine,
    NoMemory,
    NotFound,
    Overloaded,
    ProxyError,
    RateLimited,
    SlowBody,
    TimeLimit,
    TooLong,
    Unauthorized,
)
