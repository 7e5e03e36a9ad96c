"""Tells whether what an engine answered is an answer of its API, and whether that says anything.

A whole answer is judged once. Of a stream, only the first events are read, until one says something.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE
from engine_adapter.http.error_bodies import read_streamed_error
from engine_adapter.http.sse import END, is_silent

# The list that an answer of each API holds, `choices` in those of others; and such answers that surely say
# something: they are not decoded. Text cannot look like a field: its quotes have a backslash.
_LISTS = {"/v1/responses": "output", "/v1/messages": "content"}
_SURELY = re.compile(rb'"choices"\s*:\s*\[.*?"(?:content|text|reasoning_content)"\s*:\s*"[^"]', re.DOTALL)
_TEXT = b'"content":"'
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})
# A first event longer than this is not judged.
_MAX_BYTES = 64 << 10


class Says(Enum):
    """What an answer, or the beginning of one, says."""

    SOMETHING = "something"
    """Text, reasoning, a tool call, or anything else that kvpin does not judge."""
    NOTHING = "nothing"
    """It has the form of an answer, and none of these."""
    ERROR = "error"
    """Only that the engine failed."""
    NO_ANSWER = "no answer"
    """It has another form than the API's answers."""


def what_is_said(route: str, content: bytes, *, is_json: bool) -> Says:
    """What a whole answer of a route says. One that did not end by itself, but at its limit of tokens for
    example, says something. `is_json`: it is known to be JSON."""
    if is_json and route not in _LISTS:
        # Most answers are found by a search for bytes, which costs far less.
        choices = content.find(b'"choices":[')
        at = content.find(_TEXT, choices) + len(_TEXT) if choices >= 0 else 0
        is_plain = at >= len(_TEXT) and content[at : at + 1] != b'"'
        if is_plain or _SURELY.search(content) is not None:
            return Says.SOMETHING
    try:
        answer = json.loads(content)  # it takes Python's NaN and Infinity, which engines write
    except (ValueError, RecursionError):
        return Says.NO_ANSWER
    said = answer.get(_LISTS.get(route, "choices")) if isinstance(answer, dict) else None
    if not said and isinstance(answer, dict) and answer.get("error"):
        return Says.ERROR
    if not isinstance(said, list) or not (said or route in _LISTS):
        return Says.NO_ANSWER
    if not all(isinstance(each, dict) for each in said):
        return Says.NO_ANSWER
    if route in _LISTS:
        is_empty = not said and answer.get("status") in (None, "completed")
    else:
        is_empty = all(each.get("finish_reason") == "stop" and _is_silent(each) for each in said)
    return Says.NOTHING if is_empty and not answer.get("prompt_logprobs") else Says.SOMETHING


class Opening:
    """Reads the first events of a stream.

    Attributes:
        waits: the beginning may still turn out to be no answer.
    """

    __slots__ = ("_has_begun", "_rest", "waits")

    def __init__(self) -> None:
        self._rest = b""
        self._has_begun = self.waits = False

    def read(self, chunk: bytes) -> Says:
        """What the stream says with its next bytes: an error only if nothing came before it."""
        rest, begin = self._rest + chunk, 0
        while (end := END.search(rest, begin)) is not None:
            event, begin = rest[begin : end.end()], end.end()
            says = _said_in(event)
            if says is Says.SOMETHING or (says is Says.ERROR and not self._has_begun):
                return says
            self._has_begun |= says is Says.NOTHING
            self.waits |= says is Says.NO_ANSWER
        self._rest = rest[begin:]
        if len(self._rest) > _MAX_BYTES:
            return Says.SOMETHING
        self.waits = not self._has_begun and (self.waits or bool(self._rest and not is_silent(self._rest)))
        return Says.NOTHING


class _Chunk(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk | None).decode


def _said_in(event: bytes) -> Says | None:
    """What one event says; None for a comment or the end mark. A chunk without choices, as engines may send
    it first, is no answer yet."""
    if not event.startswith(b"data:") and is_silent(event):
        return None
    if event.rfind(b"error") >= 0 and read_streamed_error(event) is not None:
        return Says.ERROR
    data = event.partition(b"data:")[2].strip()
    try:
        chunk = _decode_chunk(data)
    except UNREADABLE:
        return None if data == b"[DONE]" else Says.SOMETHING
    if chunk is None or chunk.choices == []:
        return Says.NO_ANSWER
    is_empty = chunk.choices is not None and all(map(_is_silent, chunk.choices))
    return Says.NOTHING if is_empty else Says.SOMETHING


def _is_silent(choice: dict[str, Any]) -> bool:
    """True if a choice, of an answer or of a chunk, holds no text, no reasoning and no tool call."""
    said = choice.get("message", choice.get("delta"))
    if choice.get("text") not in _SAYS_NOTHING or choice.get("prompt_logprobs") not in _SAYS_NOTHING:
        return False
    for name, value in said.items() if isinstance(said, dict) else ():
        if value not in _SAYS_NOTHING and name != "role":
            return False
    return True
