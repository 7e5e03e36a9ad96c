"""Errors that engine adapters raise.

EngineError
├── EngineSpecError        the operator's description of an engine is wrong (at start, or in POST engines)
├── EngineUnavailable      no good answer: another engine may give one. By phase of the request:
│   ├── EngineUnreachable  connect: nothing was sent
│   ├── EngineDied         write, read: the connection broke
│   ├── EngineGarbled      protocol: the answer cannot be understood
│   ├── EngineLate         too late: no first byte, or silence
│   ├── EngineLost         health checks lost the engine meanwhile
│   ├── EngineDiverged     it was to go on with an answer, and gave another one
│   ├── EngineUnhealthy    it answers, but not well, or not in time: it may soon be well again
│   └── EngineTaken        another kvpin uses it, and only one may
├── EngineRejected         refused: the engine answered with an error: status, message, field
├── NotSupported           the engine cannot do this; says what it can do instead
├── PromptTableError       a wrong prompt table or wrong extra ids: the client's fault
└── ChatError              messages that cannot be rendered: the client's fault
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class EngineError(Exception):
    """Base of every error an adapter raises."""


class EngineSpecError(EngineError):
    """An engine description is wrong. The text says which part and why."""


class EngineUnavailable(EngineError):
    """The engine gave no good answer: another one may."""


class EngineUnreachable(EngineUnavailable):
    """There is no connection to the engine. It has not got the request."""


class EngineDied(EngineUnavailable):
    """The connection broke after the request was sent. The request may be the cause."""


class EngineGarbled(EngineUnavailable):
    """The answer cannot be understood. The request may be the cause."""


class EngineLate(EngineUnavailable):
    """The answer, or the next piece of it, did not come in time."""


class EngineLost(EngineUnavailable):
    """The engine was lost or removed while the request ran."""


class EngineDiverged(EngineUnavailable):
    """The engine that was to go on with an answer gave another one."""


class EngineUnhealthy(EngineUnavailable):
    """The engine answered that it is not healthy, answered nonsense, or did not answer in time. The same
    process may soon be well again."""


class EngineTaken(EngineUnavailable):
    """Another kvpin uses the engine, and only one may.

    Attributes:
        holder: who that is, for people.
    """

    def __init__(self, message: str, *, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class EngineRejected(EngineError):
    """The engine answered with an error.

    Attributes:
        status: HTTP status of the answer.
        param: the request field the engine names, if any.
        type, code: the engine's type and code of the error, if any.
        more: the engine's further fields of the error.
        headers: the engine's headers about retries, and `allow`; lower-case names.
    """

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
        self.status = status
        self.param = param
        self.type = type
        self.code = code
        self.more = more
        self.headers = headers


class NotSupported(EngineError):
    """The engine lacks a capability.

    Attributes:
        capability: the missing capability, from `Capability`.
        instead: what to do instead, in one sentence.
    """

    def __init__(self, capability: str, *, engine: str, instead: str) -> None:
        super().__init__(f"engine {engine!r} has no {capability!r}: {instead}")
        self.capability = capability
        self.instead = instead


class PromptTableError(EngineError):
    """A wrong prompt table, prompt embedding or list of extra ids.

    Attributes:
        param: the request field at fault, with the index where there is one, e.g. `extra_ids[3]`.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class ChatError(EngineError):
    """Messages, tools or template options that cannot be rendered to a prompt.

    Attributes:
        param: the request field at fault, e.g. `messages[2].content`.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param
