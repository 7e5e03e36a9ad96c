"""The dialect of each API for errors and request ids: OpenAI's, and Anthropic's on `/v1/messages`.

The route that the client asked decides, even if an engine serves the request on another route.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from engine_adapter.codes import Code
from proxy.headers import ANTHROPICS_ID_HEADER, REQUEST_ID_HEADER

NO_MORE: Mapping[str, object] = MappingProxyType({})
_MESSAGES = b"/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    424: "api_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


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


# kvpin's own error, and vLLM's: the limit, then the prompt's tokens.
_CONTEXT = re.compile(
    r"context (?:is|length is) (\d+) tokens[;.] .*?(?:prompt has (?:at least )?|requested )(\d+)"
)


class Dialect(NamedTuple):
    """One API's way.

    Attributes:
        id_headers: the headers of an answer that name its request.
        event: the beginning of an event of a stream that holds an error.
        is_anthropics: the status alone decides an error's type, as it decides the SDK's class of error.
    """

    id_headers: tuple[str, ...]
    event: bytes
    is_anthropics: bool

    def error(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        more: Mapping[str, object] = NO_MORE,
    ) -> bytes:
        """The body of an error. `kind`, `param`, `code` and `more` fields are OpenAI's, or an engine's."""
        if not self.is_anthropics:
            return error_body(message, kind=kind, param=param, code=code, more=more)
        other = "invalid_request_error" if status < 500 else "api_error"  # noqa: PLR2004 - HTTP
        if code == Code.CONTEXT_LENGTH_EXCEEDED:  # with Anthropic's words, agents shorten their chats
            numbers = _CONTEXT.search(message)
            said = f"{numbers[2]} tokens > {numbers[1]} maximum" if numbers is not None else message
            message = f"prompt is too long: {said}"
        error = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def error_event(self, error: bytes) -> bytes:
        """An event of a stream that holds an error."""
        return b"%bdata: %b\n\n" % (self.event, error)


OPENAI = Dialect((REQUEST_ID_HEADER,), b"", is_anthropics=False)
"""The way of every route but Anthropic's."""
ANTHROPIC = Dialect((REQUEST_ID_HEADER, ANTHROPICS_ID_HEADER), b"event: error\n", is_anthropics=True)


def dialect_of(target: bytes) -> Dialect:
    """The dialect of a route, from a path as clients send it."""
    return ANTHROPIC if target.startswith(_MESSAGES) else OPENAI
