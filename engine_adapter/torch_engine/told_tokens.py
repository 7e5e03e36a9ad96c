"""Reads the token ids that the engine tells in comments of a stream, and removes the comments.

    : 1032 77
    data: {"id": "chatcmpl-…", "choices": […]}

The tokens are those of all text up to the end of the event. With them, another engine goes on where this one
ends.
"""

from __future__ import annotations

import re
from array import array

from typing_extensions import override

from engine_adapter.errors import EngineDied, EngineGarbled
from engine_adapter.hold import AnswerReader, Resumption
from engine_adapter.http.sse import WholeEvents

# In the error event of an engine that ends; a tool may have that name, too.
_ENDS = b'"engine_unavailable"'
_ENDED = re.compile(rb'^data: \{"error":.*"code":"engine_unavailable"', re.MULTILINE)
# Text cannot contain it: JSON strings have no line feed.
_TOLD = re.compile(rb"^: ([\d ]+)\n", re.MULTILINE)
_ODD = re.compile(rb"^:", re.MULTILINE)


class ToldTokens(AnswerReader):
    """Reads one stream. Raises EngineUnavailable where another engine can go on with it: the engine says
    that it ends, or tells what are no ids."""

    def __init__(self, answered: object = None) -> None:
        """`answered`: the tokens with which the request begins its answer, if it does."""
        self._answered = answered if isinstance(answered, list) else []
        self._told = bytearray()  # as text: five bytes per token
        self._events = WholeEvents()

    @override
    def feed(self, chunk: bytes) -> bytes:
        chunk = self._events.joined(chunk)
        if _ENDS in chunk and _ENDED.search(chunk) is not None:
            raise EngineDied("the engine ended in mid-answer")
        if b"\n: " not in chunk and (first := _TOLD.match(chunk)) is not None:  # one event, as nearly always
            self._told += b" " + first[1]
            return chunk[first.end() :]
        parts = _TOLD.split(chunk)
        events = b"".join(parts[::2])
        if _ODD.search(events) is not None:
            raise EngineGarbled("the engine told tokens that are no ids")
        self._told += b"".join(b" " + told for told in parts[1::2])
        return events

    @override
    def finish(self) -> bytes:
        return self._events.take_rest()

    def resume(self) -> Resumption:
        """The tokens that another engine needs to go on with the answer."""
        token_ids = [*self._answered, *map(int, self._told.split())]
        return Resumption(array("i", token_ids), {"answer_token_ids": token_ids})
