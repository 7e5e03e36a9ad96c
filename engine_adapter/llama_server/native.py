"""Answers of the server's own routes.

The server's own completions can tell the ids of all sampled tokens. kvpin asks for them, and removes them
from the answer if the client did not ask. Such a request is not sent as a stream: the server notices within
about a second that its client has left, and its JSON answer has more than its stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.llama_server.answer import Answer
from engine_adapter.llama_server.keeper import SlotLease
from engine_adapter.types import TokenIds

# The fields of `GET /slots` that show the last request on a slot.
_OF_A_REQUEST = ("prompt", "generated", "params")


def with_token_ids(body: JsonBody) -> JsonBody | None:
    """The same request, also asking for the ids of the sampled tokens.

    None for a stream, which has them anyway, and for a client that asks for them or chooses the fields of its
    answer.
    """
    if body.get("stream") is True or body.get("return_tokens") is True or body.get("response_fields"):
        return None
    return body.replace(return_tokens=True)


class NativeAnswer:
    """`AnswerReader` of a completion that the server answers with one JSON object."""

    assembles = False

    def __init__(self, lease: SlotLease, *, hides_tokens: bool) -> None:
        """`hides_tokens`: the client did not ask for token ids."""
        self._lease = lease
        self._hides_tokens = hides_tokens

    def feed(self, chunk: bytes) -> bytes:
        """See `AnswerReader.feed`."""
        self._lease.has_begun = True
        answer = self._lease.answer = Answer()
        answer.read(chunk)
        return _without_token_ids(chunk) if self._hides_tokens else chunk

    def finish(self) -> bytes:
        """See `AnswerReader.finish`."""
        return b""

    def cached_tokens(self) -> int | None:
        """See `AnswerReader.cached_tokens`."""
        return self._lease.answer.cached_tokens if self._lease.answer is not None else None

    def prompt_tokens(self) -> TokenIds[int] | None:
        """None: the slot mirror has the prompt's tokens already."""
        return None


class SlotsAnswer:
    """`AnswerReader` of `GET /slots`. Removes prompts, answers and parameters: the last request on a slot may
    be anybody's, or kvpin's own."""

    assembles = False

    def feed(self, chunk: bytes) -> bytes:
        """See `AnswerReader.feed`.

        Raises:
            EngineUnavailable: it is no list of slots.
        """
        try:
            slots = msgspec.json.decode(chunk, type=list[dict[str, Any]])
        except UNREADABLE as error:
            raise EngineUnavailable(f"GET /slots: not a list of slots: {error}") from error
        for slot in slots:
            for name in _OF_A_REQUEST:
                slot.pop(name, None)
        return msgspec.json.encode(slots)

    def finish(self) -> bytes:
        """See `AnswerReader.finish`."""
        return b""

    def cached_tokens(self) -> int | None:
        """See `AnswerReader.cached_tokens`."""
        return None

    def prompt_tokens(self) -> TokenIds[int] | None:
        """See `AnswerReader.prompt_tokens`."""
        return None


def _without_token_ids(content: bytes) -> bytes:
    """An answer as the server writes it when nobody asks for token ids. All other bytes stay."""
    try:
        answer = JsonBody(content)
    except UNREADABLE:
        return content
    return answer.replace(tokens=[]).raw if "tokens" in answer else content
