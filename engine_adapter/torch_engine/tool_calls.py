"""Reads tool calls out of an answer's text, as it arrives.

A model writes calls in the format that its chat template shows it. `format_of` finds the format. A call is
given out when it is complete. What looks like a call and is none stays text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

_BETWEEN = r"[ \t\r\n,;\[\]]"  # what stands between calls, and around a list of them
_NAME_FIRST = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_NOWHERE = -1
_MOST_NAME = 256  # characters before the arguments, where the name stands there
_OUTSIDE, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class CallPart(msgspec.Struct, frozen=True):
    """A new part of a call. Its first part has its id and name."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None

    def as_delta(self) -> dict[str, Any]:
        """OpenAI's entry of `delta.tool_calls`."""
        if self.call_id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.call_id, "type": "function", "function": function}


class Found(NamedTuple):
    """Text and calls that new text completed."""

    text: str = ""
    calls: tuple[CallPart, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format in which a family of models writes calls."""

    name: str
    opens: str  # the text before a call
    closes: str = ""  # the text after it; "" when calls go on to the end of the answer
    names_first: bool = False  # the function's name may stand before its arguments: `name[ARGS]{…}`
    bare: bool = False  # an answer that begins with `{` is a call, too
    short_ids: bool = False  # a call's id has nine characters, as its chat templates insist on that


HERMES = CallFormat("Hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallFormat("Mistral", "[TOOL_CALLS]", names_first=True, short_ids=True)
LLAMA = CallFormat("Llama 3", "<|python_tag|>", bare=True)


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template shows its model; None for one that is not known here."""
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM use the same tags around XML.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or '{"name": function name, "parameters"' in template:
        return LLAMA
    return None


class MarkedCalls:
    """Reads a choice of a model that decides by itself between text and calls. `ends_as` is the finish reason
    of an answer that made calls and ended by itself; None while it made none."""

    def __init__(
        self, format_: CallFormat, *, names: Container[str] | None = None, most: int | None = None
    ) -> None:
        """`names`: the functions that were offered: a call of another one is text; None for any. `most`:
        calls that are given out; None for all."""
        self.ends_as: str | None = None
        self._format = format_
        self._names = names
        self._most = most
        self._made = 0
        self._held = ""  # text that may be the beginning of a call, or is
        self._inside = False  # `_held` begins after a call's mark
        self._mark = ""  # the mark, until a call came after it
        mark = f"{re.escape(format_.opens)}|" if format_.opens else ""
        self._between = re.compile(f"(?:{mark}{_BETWEEN})*")
        self._object = _JsonObject()
        self._is_start = True

    def push(self, text: str) -> Found:
        """Takes `text`; returns the text and calls that are certain now."""
        self._held += text
        return self._read(is_end=False)

    def finish(self) -> Found:
        """Returns the text that was held back."""
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> Found:
        texts: list[str] = []
        calls: list[CallPart] = []
        while self._body(texts, calls, is_end=is_end) if self._inside else self._plain(texts, is_end=is_end):
            pass
        return Found("".join(texts), tuple(calls))

    def _plain(self, texts: list[str], *, is_end: bool) -> bool:
        """Gives out the text before a call. Returns whether one begins."""
        held, mark = self._held, self._format.opens
        if self._is_start and self._format.bare and held.lstrip().startswith("{"):
            at = held.index("{")
            self._enter(held[:at], held[at:])
            return True
        at = held.find(mark) if mark else -1
        if at >= 0:
            texts.append(held[:at].rstrip())
            self._enter(held[len(held[:at].rstrip()) : at] + mark, held[at + len(mark) :])
            return True
        keep = 0 if is_end else held_back(held, mark)
        sure = held[: len(held) - keep]
        if not is_end or self._made:
            sure = sure.rstrip()  # it may be the space before a call
        texts.append(sure)
        self._held = "" if is_end else held[len(sure) :]
        self._is_start &= not sure
        return False

    def _enter(self, mark: str, rest: str) -> None:
        self._inside, self._is_start = True, False
        self._mark, self._held, self._object = mark, rest, _JsonObject()

    def _body(self, texts: list[str], calls: list[CallPart], *, is_end: bool) -> bool:
        """Reads the next call after a mark. Returns whether there is more to read. Each decision falls at the
        first character that allows it, so it is the same however the text arrives."""
        held, closes = self._held, self._format.closes
        after = self._between.match(held)
        begin = after.end() if after is not None else 0
        if closes and self._between_calls and held.startswith(closes, begin):
            self._inside, self._held = False, held[begin + len(closes) :]
            return True
        at = self._arguments_at(begin)
        if at == _NOWHERE:
            return self._leave(texts, begin)
        end = None if at is None else self._object.end(held)
        if at is None or end is None:
            # At the end it is text, unless nothing or half of an end mark follows the last call.
            if is_end and not (self._between_calls and closes.startswith(held[begin:])):
                self._leave(texts, len(held))
            return False
        call = self._call(begin, at, end)
        if call is None or (self._names is not None and call.name not in self._names):
            return self._leave(texts, end)
        if self._most is None or self._made < self._most:
            call_id = secrets.token_hex(5)[:9] if self._format.short_ids else _call_id()
            calls.append(CallPart(self._made, call.text, call_id, call.name))
        self._made += 1
        self.ends_as = "tool_calls"
        self._enter("", held[end:])
        return True

    @property
    def _between_calls(self) -> bool:
        return self._made > 0 and not self._mark

    def _arguments_at(self, begin: int) -> int | None:
        """Where a call's object begins, in what is held from `begin` on; None while more text must tell;
        `_NOWHERE` if there is no call."""
        held, marks = self._held, (self._format.opens, self._format.closes)
        if held.startswith("{", begin):
            return begin
        if not self._format.names_first:
            may_be_mark = any(mark.startswith(held[begin:]) for mark in marks[: 1 + self._between_calls])
            return None if may_be_mark else _NOWHERE
        name, brace, _ = held[begin : begin + _MOST_NAME + 1].partition("{")
        if len(name) > _MOST_NAME or self._format.opens in name:
            return _NOWHERE
        return begin + len(name) if brace else None

    def _leave(self, texts: list[str], end: int) -> bool:
        """There is no call: what is held before `end` is text, and the rest is read anew."""
        texts.append(self._mark + self._held[:end])
        self._inside, self._mark, self._held = False, "", self._held[end:]
        return True

    def _call(self, begin: int, at: int, end: int) -> _Call | None:
        """The call whose name is at `begin`, or in the object, and whose object is at `at` to `end`."""
        text = self._held[at:end]
        try:
            if at == begin:
                return _decode_call(text)
            named = _NAME_FIRST.fullmatch(self._held[begin:at].strip())
            if named is None:
                return None
            msgspec.json.decode(text)
            return _Call(named[1], msgspec.Raw(text.encode()))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None


class NamedCall:
    """Reads a choice that is nothing but the arguments of one function. `ends_as`: see `MarkedCalls`."""

    def __init__(self, name: str) -> None:
        self.ends_as: str | None = None
        self._name: str | None = name

    def push(self, text: str) -> Found:
        """Takes `text`; returns the text and calls that are certain now."""
        if not text:
            return Found()
        if self._name is None:
            return Found(calls=(CallPart(0, text),))
        first = CallPart(0, text, _call_id(), self._name)
        self._name, self.ends_as = None, "stop"
        return Found(calls=(first,))

    def finish(self) -> Found:
        """Returns the text that was held back."""
        return Found()


class ListedCalls(MarkedCalls):
    """Reads a choice that is a JSON list of calls."""

    def __init__(self) -> None:
        super().__init__(CallFormat("list", ""))
        self._enter("", "")

    def finish(self) -> Found:
        """Returns the calls that were held back. One that the token limit cut off is no text for people."""
        return Found(calls=super().finish().calls)


CallReader = MarkedCalls | NamedCall


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def text(self) -> str:
        """The arguments, as the model wrote them."""
        text = (bytes(self.arguments) or bytes(self.parameters)).decode()
        if text.startswith('"'):  # JSON inside JSON
            text = msgspec.json.decode(text, type=str)
        return "{}" if text == "null" else text


_decode_call = msgspec.json.Decoder(_Call).decode


class _JsonObject:
    """Finds the end of the first JSON object of a text that grows. Each character is read once."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._is_string = False

    def end(self, text: str) -> int | None:
        """Where the object ends; None while it is not complete, or has not begun."""
        if not self._depth:
            self._at = text.find("{", self._at)
            if self._at < 0:
                self._at = len(text)
                return None
        while (mark := (_IN_STRING if self._is_string else _OUTSIDE).search(text, self._at)) is not None:
            character = mark[0]
            if character == "\\" and mark.end() == len(text):
                self._at = mark.start()  # what it escapes is still to come
                return None
            self._at = mark.end() + (character == "\\")
            if character == '"':
                self._is_string = not self._is_string
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return self._at
        self._at = len(text)
        return None


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` may begin: 0 to `len(mark) - 1`."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
