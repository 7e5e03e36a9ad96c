"""The `cache_write_tokens` of a chat's usage, for clients that use OpenAI's fields of the cache.

Engines report what they read from their cache, and few what they wrote to it. kvpin adds it as
`prompt_tokens_details.cache_write_tokens`: as the engine says, else the tokens of new full blocks. Answers to
all other chats keep their bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from typing_extensions import override

from engine_adapter import UNREADABLE, HeaderPairs, JsonBody, WholeEvents, decode_object
from proxy.request.calls import Client, Through
from proxy.request.translate.chats import ChatUsage

# `prompt_cache_options`, `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_breakpoint`.
_FIELDS = b'"prompt_cache_'
_ERROR = 400
_DETAILS = "prompt_tokens_details"


def names_the_cache(body: JsonBody) -> bool:
    """True if a chat has one of OpenAI's fields of the cache."""
    return _FIELDS in body.raw


class WritesCounted(Through):
    """Adds `cache_write_tokens` to the usage of an answer on its way to the client."""

    def __init__(self, client: Client, tokens_per_block: Callable[[], int | None]) -> None:
        """`tokens_per_block`: of the engine that answers, asked when its usage comes."""
        super().__init__(client)
        self._block = tokens_per_block
        self._is_stream = self._is_error = False
        self._events = WholeEvents()

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        self._is_error = status >= _ERROR
        self._client.start(status, [pair for pair in headers if pair[0] != b"content-length"])

    @override
    def write(self, chunk: bytes) -> None:
        self._is_stream = True
        if whole := b"".join(map(self._event, self._events.feed(chunk))):
            self._client.write(whole)

    @override
    def finish(self, chunk: bytes) -> None:
        if self._is_stream:
            last = b"".join(map(self._event, self._events.feed(chunk)))
            self._client.finish(last + self._events.rest)
        else:
            self._client.finish(chunk if self._is_error else self._counted(chunk))

    def _event(self, event: bytes) -> bytes:
        """An event of a stream, with the count if it has the usage."""
        start = event.find(b"data:")
        if start < 0 or b'"prompt_tokens"' not in event:
            return event
        line = event[start + len(b"data:") :]
        return event[:start] + b"data: " + self._counted(line.strip()) + line[len(line.rstrip()) :]

    def _counted(self, answer: bytes) -> bytes:
        """A whole answer, or a chunk of one, with the count in its usage."""
        try:
            fields = decode_object(answer)
            usage = msgspec.json.decode(fields["usage"], type=dict[str, msgspec.Raw])
            counts = msgspec.json.decode(fields["usage"], type=ChatUsage)
            details = decode_object(usage.get(_DETAILS, b"null")) if counts.prompt_tokens_details else {}
        except (KeyError, *UNREADABLE):
            return answer
        details["cache_write_tokens"] = msgspec.Raw(b"%d" % counts.written(self._block()))
        usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return msgspec.json.encode(fields)
