"""Asks the engine for usage and token ids that the client did not ask for, and removes them from the answer.

A stream reports usage only on request, in an extra chunk at the end. If kvpin asked for it, it removes that
chunk. With `return_token_ids`, the answer holds the prompt's token ids: each event with ids is read, and
written again without them. All other events pass unread, as the engine's own bytes.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody, RawFields, decode_object
from engine_adapter.hold import AnswerReader, Hold
from engine_adapter.http.answer_fields import (
    NULL,
    choices_of,
    is_usage_alone,
    read_streamed_error,
    read_usage,
)
from engine_adapter.http.sse import END, ENDS, is_silent
from engine_adapter.types import TokenIds

# --- tells whether what an engine answered is an answer of its API, and whether that says anything ------
# A whole answer is judged once. Of a stream, only the first events are read, until one says something.

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
    """Reads the first events of a stream. `waits`: the beginning may still turn out to be no answer."""

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


# --- openai answer --------------------------------------------------------------------------------------

_ROUTES = ("/v1/chat/completions", "/v1/completions")
Marks = Mapping[bytes, re.Pattern[bytes]]
"""Marks of events that are read: how each begins, and the whole of it. Text cannot contain one: quotes in
JSON strings have a backslash. Some engines put `"usage": null` into every event."""
USAGE: Marks = {b'"usage"': re.compile(rb'"usage"\s*:\s*\{')}
_IDS = b'"token_ids"', b'"prompt_token_ids"'
_USAGE_OR_IDS: Marks = {**USAGE, **{name: re.compile(name) for name in _IDS}}
_DETAILS = "prompt_tokens_details"
# Cached tokens in a usage of the Responses API. Text cannot contain it, likewise.
_CACHED_INPUT = re.compile(rb'("input_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)\d+')
# Fields that `return_token_ids` fills, in an answer and in each choice. Without it they are null.
_IN_ANSWER, _IN_CHOICE = ("prompt_token_ids",), ("prompt_token_ids", "token_ids")
_decode_ids = msgspec.json.Decoder(list[int] | None).decode


def hold_openai(
    path: str,
    body: JsonBody,
    *,
    changes: Mapping[str, object] | None = None,
    drop: Collection[str] = (),
    ask_usage: bool = False,
    ask_tokens: bool = False,
    note: str = "",
) -> Hold:
    """The hold of a request for an engine that places requests itself.

    Sets the fields `changes` and removes the fields `drop`. `ask_usage` asks a stream for usage, `ask_tokens`
    for the prompt's token ids (`Hold.answer.prompt_tokens()`). The client sees neither unless it asked too.
    """
    fields: dict[str, object] = {**dict.fromkeys(drop), **(changes or {})}
    streams = body.get("stream") is True
    answers = path in _ROUTES
    options = _usage_options(body) if ask_usage and answers and streams else None
    if options is not None:
        fields["stream_options"] = options
    # With `echo`, an engine that returns ids leaves out the prompt's text.
    reads_tokens = ask_tokens and answers and not body.get("echo")
    hides_tokens = reads_tokens and body.get("return_token_ids") is not True
    if hides_tokens:
        fields["return_token_ids"] = True
    answer = None
    if options is not None or reads_tokens:
        answer = OpenAIAnswer(
            streams=streams,
            hides_usage=options is not None,
            reads_tokens=reads_tokens,
            hides_tokens=hides_tokens,
        )
    return Hold(body.replace(**fields) if fields else body, answer=answer, note=note)


def tell_cached(hold: Hold, route: str, cached: int) -> None:
    """Lets the answer tell its client `cached` reused tokens in place of those that the engine reports:
    another engine computed the prompt."""
    hold.told_cached = cached
    if hold.answer is None and isinstance(hold.body, JsonBody):
        streams = hold.body.get("stream") is True
        hold.answer = OpenAIAnswer(streams=streams) if route in _ROUTES else ResponseTold(cached)
    if isinstance(hold.answer, OpenAIAnswer):
        hold.answer.told_cached = cached


class OpenAIAnswer(AnswerReader):
    """Reads chats and completions: a JSON answer, or the events of a stream that have a mark. `told_cached`:
    reused tokens that the client is told; None for those that the engine reports."""

    marks: tuple[bytes, ...] | None

    def __init__(
        self,
        *,
        streams: bool,
        hides_usage: bool = False,
        reads_tokens: bool = False,
        hides_tokens: bool = False,
    ) -> None:
        """`streams`: the client asked for a stream."""
        self._streams = streams
        self._hides_usage = hides_usage
        self._reads_tokens = reads_tokens
        self._hides_tokens = hides_tokens
        self.marks = (b'"usage"', b'token_ids"') if reads_tokens else (b'"usage"',)
        self._cached: int | None = None
        self._prompt: TokenIds[int] | None = None
        self.told_cached: int | None = None

    @override
    def feed(self, chunk: bytes) -> bytes:
        return self._pass_events(chunk) if self._streams else self._pass(chunk)

    @override
    def finish(self, rest: bytes = b"") -> bytes:
        return self._pass_events(rest)

    @override
    def cached_tokens(self) -> int | None:
        return self._cached

    @override
    def prompt_tokens(self) -> TokenIds[int] | None:
        return self._prompt

    def _pass_events(self, events: bytes) -> bytes:
        """The client's part of whole events."""
        wants_tokens = self._hides_tokens or (self._reads_tokens and self._prompt is None)
        return pass_marked(events, _USAGE_OR_IDS if wants_tokens else USAGE, self._pass)

    def _pass(self, event: bytes) -> bytes:
        """The client's part of a marked event, or of a JSON answer."""
        start, end = event.find(b"{"), event.rfind(b"}") + 1
        try:
            fields = decode_object(event[start:end])
            changed = self._read(fields)
        except (*UNREADABLE, KeyError):
            return event
        if changed is None:
            return b""
        return event[:start] + msgspec.json.encode(fields) + event[end:] if changed else event

    def _read(self, fields: RawFields) -> bool | None:
        """Reads an event, and takes out of its fields what the client did not ask for. Returns whether they
        have changed; None if nothing is left. Raises one of `UNREADABLE`."""
        choices = choices_of(fields)
        usage = bytes(fields.get("usage", NULL))
        if usage.startswith(b"{"):
            cached = read_usage(usage).cached_tokens
            self._cached = cached if cached is not None else self._cached
            if self._hides_usage and is_usage_alone(fields, choices):
                return None
            if self.told_cached is not None:
                fields["usage"] = _with_cached(usage, self.told_cached)
        if self._reads_tokens and self._prompt is None:
            found = (each["prompt_token_ids"] for each in (fields, *choices) if "prompt_token_ids" in each)
            self._prompt = next((ids for ids in map(_token_ids, found) if ids is not None), None)
        if not self._hides_tokens or not choices:
            return self.told_cached is not None
        if all(map(_says_nothing, choices)) and not usage.startswith(b"{"):
            return None
        for names, each in ((_IN_ANSWER, fields), *((_IN_CHOICE, choice) for choice in choices)):
            each.update(dict.fromkeys(each.keys() & names, NULL))
        fields["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return True


class ResponseTold(AnswerReader):
    """Reads an answer of the Responses API, and tells other cached tokens in its usage."""

    marks = (b'"input_tokens_details"',)

    def __init__(self, cached: int) -> None:
        self._told = rb"\g<1>%d" % cached

    @override
    def feed(self, chunk: bytes) -> bytes:
        return _CACHED_INPUT.sub(self._told, chunk)


def _usage_options(body: JsonBody) -> dict[str, object] | None:
    """The request's stream options with usage added; None if its client asked for usage itself."""
    options = body.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return None
    # Without usage this option has no effect; with usage it would add it to every chunk.
    return {name: options[name] for name in options if name != "continuous_usage_stats"} | {
        "include_usage": True
    }


def pass_marked(events: bytes, marks: Marks, pass_event: Callable[[bytes], bytes]) -> bytes:
    """The client's part of whole events: that of an event with one of the marks comes from `pass_event`, all
    other events pass as they are."""
    marked: list[tuple[int, int]] = []  # where those events begin and end, the last first
    before = len(events)
    ends = ENDS if events.find(b"\r") >= 0 else ENDS[:1]
    places = dict.fromkeys((*marks, *ends), before)  # where each was found last

    def last(what: bytes) -> int:
        """Where it is found last before `before`. What was found there, or nowhere, is not searched again: of
        many events, each byte is looked at once."""
        if places[what] + len(what) > before:
            places[what] = events.rfind(what, 0, before)
        return places[what]

    # From the end: that takes a third of the time, and usage is in the last events.
    while (at := max(map(last, marks))) >= 0:
        before = at
        if any(pattern.match(events, at) is not None for pattern in marks.values()):
            after = END.search(events, at)
            before = max([found + len(end) for end in ends if (found := last(end)) >= 0], default=0)
            marked.append((before, len(events) if after is None else after.end()))
    if not marked:
        return events
    parts: list[bytes] = []
    done = 0
    for begin, end in reversed(marked):
        parts += events[done:begin], pass_event(events[begin:end])
        done = end
    return b"".join([*parts, events[done:]])


def _token_ids(raw: msgspec.Raw) -> TokenIds[int] | None:
    try:
        ids = _decode_ids(raw)
        return None if ids is None else array("i", ids)
    except (*UNREADABLE, OverflowError):
        return None


def _with_cached(usage: bytes, cached: int) -> msgspec.Raw:
    """A usage with that number of cached tokens; its other fields keep their bytes."""
    fields = decode_object(usage)
    details = bytes(fields.get(_DETAILS, NULL))
    counts = decode_object(details) if details.startswith(b"{") else {}
    counts["cached_tokens"] = msgspec.Raw(b"%d" % cached)
    fields[_DETAILS] = msgspec.Raw(msgspec.json.encode(counts))
    return msgspec.Raw(msgspec.json.encode(fields))


def _says_nothing(choice: RawFields) -> bool:
    """True if a chunk of a chat holds nothing but token ids."""
    silent = all(choice.get(name, NULL) == NULL for name in ("finish_reason", "logprobs"))
    return silent and choice.get("delta") == msgspec.Raw(b"{}")
