"""Errors: one tree, whose classes say what follows from them. Here are those that engine adapters raise;
kvpin's own are in `proxy/errors.py`.

KvpinError
└── EngineError
├── EngineSpecError        the operator's description of an engine is wrong (at start, or in POST engines)
├── EngineUnavailable      no good answer: another engine may give one. By phase of the request:
│   ├── EngineUnreachable  connect: nothing was sent
│   ├── EngineDied         write, read: the connection broke
│   ├── EngineGarbled      protocol: the answer cannot be understood
│   ├── EngineLate         too late: no first byte, or silence
│   ├── EngineLost         health checks lost the engine meanwhile
│   ├── EngineChanged      another process may answer in its place; it got nothing
│   ├── EngineDiverged     it was to go on with an answer, and gave another one
│   ├── EngineUnhealthy    it answers, but not well, or not in time: it may soon be well again
│   │   └── ModelNotLoaded its model is not in memory, and this question must not load or wake it
│   └── EngineTaken        another kvpin uses it, and only one may
├── EngineRejected         refused: the engine answered with an error: status, message, field
│   └── ModelFailed        the engine cannot load the model: another engine may
├── NotSupported           the engine cannot do this; says what it can do instead
└── FieldError             a wrong field of a request: the client's fault
    ├── PromptTableError   a wrong prompt table or wrong extra ids
    └── ChatError          messages that cannot be rendered
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from engine_adapter.causes import Cause, Code

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class KvpinError(Exception):
    """Base of every error that has an answer of its own. Any other is a bug.

    Attributes:
        code: for programs. Its status is that of the answer.
        cause: why a request that ends with it ended, and so whether another engine is tried, and what it says
            about the engine.
        refusal: the reason of `kvpin_refused_total` for a request that it keeps out; None for others.
            scripts/reference/gate.py has all limits.
    """

    code: Code = Code.INTERNAL_ERROR
    cause: Cause = Cause.INVALID
    refusal: str | None = None

    @property
    def status(self) -> int:
        """The HTTP status of its answer."""
        return self.code.status


class EngineError(KvpinError):
    """Base of every error an adapter raises."""

    code = Code.ENGINE_ERROR
    own_words: str | None = None
    """Text for the log, where the message is the engine's: such a message may repeat a prompt."""


def log_text(error: Exception) -> str:
    """An error for a log line, in kvpin's own words."""
    return getattr(error, "own_words", None) or str(error)


class EngineSpecError(EngineError):
    """An engine description is wrong. The text says which part and why."""

    code = Code.INVALID_ENGINE


class EngineUnavailable(EngineError):
    """The engine gave no good answer: another one may."""

    code = Code.ENGINE_UNAVAILABLE
    cause = Cause.ENGINE_UNREACHABLE

    def __init__(self, message: str = "", *, own_words: str | None = None) -> None:
        super().__init__(message)
        self.own_words = own_words


class EngineUnreachable(EngineUnavailable):
    """There is no connection to the engine. It has not got the request."""


class EngineDied(EngineUnavailable):
    """The connection broke after the request was sent. The request may be the cause."""

    cause = Cause.ENGINE_DIED


class EngineGarbled(EngineUnavailable):
    """The answer cannot be understood. The request may be the cause."""

    cause = Cause.ENGINE_GARBLED


class EngineLate(EngineUnavailable):
    """The answer, or the next piece of it, did not come in time."""

    cause = Cause.ENGINE_LATE


class EngineLost(EngineUnavailable):
    """The engine was lost or removed while the request ran."""

    cause = Cause.ENGINE_LOST


class EngineChanged(EngineUnavailable):
    """Another process may answer for the engine than when the request was placed. The engine got nothing."""

    cause = Cause.ENGINE_CHANGED


class EngineDiverged(EngineUnavailable):
    """The engine that was to go on with an answer gave another one."""

    cause = Cause.DIVERGED


class EngineUnhealthy(EngineUnavailable):
    """The engine answered that it is not healthy, answered nonsense, or did not answer in time. The same
    process may soon be well again."""


class ModelNotLoaded(EngineUnhealthy):
    """The model is not in memory, and the question may neither load nor wake it."""


class EngineTaken(EngineUnavailable):
    """Another kvpin uses the engine, and only one may."""

    code = Code.ENGINE_TAKEN

    def __init__(self, message: str, *, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class EngineRejected(EngineError):
    """The engine answered with an error.

    Attributes:
        status: HTTP status of the answer.
        param: the request field the engine names, if any.
        type, engine_code: the engine's type and code of the error, if any.
        more: the engine's further fields of the error.
        headers: the engine's headers about retries, and `allow`; lower-case names.
    """

    code = Code.ENGINE_REJECTED

    def __init__(
        self,
        message: str,
        *,
        status: int,
        param: str | None = None,
        type: str | None = None,  # noqa: A002 - OpenAI's name of the field
        code: str | None = None,
        more: Mapping[str, Any] = NO_HEADERS,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.own_words = f"the engine answered {status}"
        self._status = status
        self.param = param
        self.type = type
        self.engine_code = code
        self.more = more
        self.headers = headers

    @property
    @override
    def status(self) -> int:
        return self._status


class ModelFailed(EngineRejected):
    """The engine cannot load the model. No client should repeat the request at once: each try loads it again.
    Its status, 424 (Failed Dependency), is one that stock clients do not retry."""

    code = Code.MODEL_FAILED
    cause = Cause.ENGINE_MODEL_FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message, status=HTTPStatus.FAILED_DEPENDENCY)
        self.own_words = message


class NotSupported(EngineError):
    """The engine lacks a capability."""

    code = Code.NOT_SUPPORTED

    def __init__(self, capability: str, *, engine: str, instead: str) -> None:
        super().__init__(f"engine {engine!r} has no {capability!r}: {instead}")
        self.capability = capability
        self.instead = instead


class FieldError(EngineError):
    """A field of a request is wrong: the client's fault. `param`: the field, with the index where there is
    one, e.g. `messages[2].content`."""

    code = Code.INVALID_VALUE

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptTableError(FieldError):
    """A wrong prompt table, prompt embedding or list of extra ids."""

    code = Code.INVALID_EMBEDDINGS


class ChatError(FieldError):
    """Messages, tools or template options that cannot be rendered to a prompt."""

    code = Code.INVALID_MESSAGES
