"""Streams that another engine continues after their engine died, and how kvpin prepares for that.

the engine tells its tokens  → another engine of its kind takes them, and computes only what follows
greedy decoding              → another engine of its kind runs the request again; what was sent is left out
anything else                → the stream ends with an error event

The second way takes longer, but needs no support by the engine. kvpin compares the text: a difference ends
the attempt, and the next engine is tried. Each attempt gets a new Passage, made from the client's part.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from os.path import commonprefix
from typing import Literal

import msgspec

from engine_adapter import (
    UNREADABLE,
    EngineDiverged,
    Hold,
    JsonBody,
    RawFields,
    Resumption,
    WholeEvents,
    decode_object,
    read_streamed_error,
)
from engine_adapter.http.answer_fields import NULL, SAYS_NOTHING, choices_of
from engine_adapter.http.sse import events_in
from proxy.request.calls import Call

_NAMES = ("id", "object", "created", "model", "system_fingerprint")


class Splice:
    """The rest of an answer, as chunks of the stream that the client reads. An engine that takes the answer's
    tokens sends only what follows them. Any other runs the request again: what the client has is compared and
    left out, and the first difference ends the answer."""

    def __init__(self, told: SentStream) -> None:
        """`told`: what the client has."""
        head = told.head or {}
        self._head = {name: head[name] for name in _NAMES if name in head}
        self._has_role = told.has_role
        self._known = deque(told.texts if told.resumption is None else ())
        self._same = 0  # characters that both engines wrote
        self._cached = told.cached_tokens

    def feed(self, events: bytes) -> bytes:
        """Takes the stream's next events; returns those for the client. Raises EngineDiverged if this
        engine's answer is another one."""
        return b"".join(map(self._pass, events_in(events)))

    def _pass(self, part: bytes) -> bytes:
        event = read_chunk(part)
        if event is None:
            self._check(not self._known or b"data:" not in part)
            return b"" if self._known else part
        if self._known:
            self._check(event.is_first)  # what the client has is of the first choice
            self._skip(event)
            if self._known or (event.is_plain and event.texts() == []):
                self._check(event.is_plain)
                return b""
        names_role = self._has_role and event.is_first and event.delta.pop("role", NULL) != NULL
        if names_role and event.is_plain and event.texts() == []:
            return b""
        event.fields |= {name: self._head[name] for name in self._head if name in event.fields}
        self._correct_usage(event.fields)
        return event.encode()

    def _skip(self, event: Chunk) -> None:
        """Removes from an event what the client has of it."""
        texts = event.texts()
        self._check(texts is not None)
        for name, text in texts or ():
            rest = text
            while rest and self._known:
                field, known = self._known.popleft()
                self._check(field == name)
                length = len(commonprefix((known, rest)))  # noqa: RUF071 - of texts
                self._same += length
                self._check(length in (len(known), len(rest)))
                rest = rest[length:]
                if known[length:]:
                    self._known.appendleft((field, known[length:]))
            event.delta[name] = msgspec.Raw(msgspec.json.encode(rest))

    def _correct_usage(self, fields: RawFields) -> None:
        """The tokens that the client's request reused are those of the first engine."""
        if self._cached is None or fields.get("usage", NULL) == NULL:
            return
        with suppress(*UNREADABLE):  # of another form: it stays as it is
            usage = decode_object(fields["usage"])
            if usage.get("prompt_tokens_details", NULL) != NULL:
                details = decode_object(usage["prompt_tokens_details"])
                details["cached_tokens"] = msgspec.Raw(b"%d" % self._cached)
                usage["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(details))
                fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise EngineDiverged(
                "the engine that was to go on with the answer gave another one: the first "
                f"{self._same} characters are the same"
            )


ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
# Bytes of bodies that running streams keep together. Beyond it, streams end with their engines.
MAX_BODIES = 256 << 20


class Passage:
    """Reads one attempt's stream on its way to the client, so that another engine can go on with it."""

    def __init__(self, kind: str, resume: Callable[[], Resumption] | None, before: SentStream | None) -> None:
        """`kind`: the engine's. `resume` tells the answer's tokens; None to keep its text. `before`: what the
        client has already."""
        self._kind, self._resume, self._before = kind, resume, before
        # After tokens, only tokens tell the whole answer.
        self._is_known = resume is not None or before is None or before.resumption is None
        self._splice = Splice(before) if before is not None else None
        self._sent = Transcript(before, keeps_text=resume is None)
        self.reads_text = resume is None or before is not None  # all events must pass the stages

    @property
    def marks(self) -> tuple[bytes, ...] | None:
        """From now on, events without these bytes need not pass the stages; None: all must."""
        return self._sent.marks if self._splice is None else None

    @property
    def stages(self) -> list[Callable[[bytes], bytes]]:
        """What whole events of the stream pass, in turn, on their way to the client. Raises EngineDiverged:
        the engine's text differs from the beginning that the client has."""
        return [self._sent.feed] if self._splice is None else [self._splice.feed, self._sent.feed]

    def told(self, cached_tokens: int | None) -> SentStream | None:
        """The client's part of the stream, for the next attempt; None if no engine can continue it.
        `cached_tokens`: prompt tokens that this engine reused, if it told."""
        self._sent.read()
        if not (self._sent.is_plain and self._is_known):
            return None
        if self._before is not None:
            cached_tokens = self._before.cached_tokens
        resumption = self._resume() if self._resume is not None else None
        if resumption is not None and not resumption.token_ids:
            resumption = None  # nothing of the answer has come: the request runs again
        sent = self._sent
        return SentStream(self._kind, sent.head, sent.has_role, sent.texts, resumption, cached_tokens)


def passage_for(call: Call, hold: Hold, kind: str, before: SentStream | None) -> Passage | None:
    """The passage of a stream that another engine could go on with; None if it ends with its engine. `kind`:
    the engine's. `before`: what the client has already; the stream goes on with that."""
    if before is not None:
        # An engine that ran the request again also reports the tokens that the client got from the first.
        return Passage(kind, None if before.texts else hold.resume, before)
    if not (call.streams and call.route in ROUTES and isinstance(call.body, JsonBody)):
        return None
    if hold.resume is None and call.body.hint("temperature") != 0:  # the same prompt may give another answer
        return None
    return Passage(kind, hold.resume, None)


# --- transcript -----------------------------------------------------------------------------------------
# The transcript of a stream: what the client was sent, as far as another engine needs it to go on.
# Events are only appended. They are read when 16 KiB of them have gathered, or when the engine has died.

TEXTS = ("content", "reasoning_content", "reasoning", "text")
"""The fields of a choice's delta, or of the choice itself, that hold generated text."""
_RAW_BYTES = 16 << 10
# Characters of text that are kept of one answer. A longer one ends with its engine.
_MAX_TEXT = 1 << 20
_ENDINGS = (b'"error"', b'"finish_reason":"')
# Fields of a chunk that are not those of all chunks of its stream.
_OF_A_CHUNK = frozenset({"choices", "usage", "timings"})
_REASON = b'"finish_reason"'
_FINISHED = re.compile(_REASON + rb'\s*:\s*"[^"]')  # some engines write "" before the end
_DONE = re.compile(rb"\ndata: ?\[DONE\]\s*$", re.MULTILINE)  # begins with text: ten times as fast as with ^
# Choices end in turn, and an event with the usage may follow the last end.
_LAST_REASONS = 8
_DATA = b"data: "
_END = b"\n\ndata: [DONE]\n\n"
_FIRST = msgspec.Raw(b"0")
_decode_text = msgspec.json.Decoder(str).decode


class Chunk(msgspec.Struct):
    """A chunk of a chat or a completion with at most one choice."""

    fields: RawFields
    choice: RawFields | None = None  # its choice; None for one without choices
    # What holds the choice's text: its delta in a chat, the choice itself in a completion.
    delta: RawFields = {}

    def texts(self) -> list[tuple[str, str]] | None:
        """Its text, by field; None if a field holds something else than text."""
        try:
            return [
                (name, _decode_text(self.delta[name]))
                for name in TEXTS
                if self.delta.get(name, NULL) not in SAYS_NOTHING
            ]
        except UNREADABLE:
            return None

    @property
    def is_first(self) -> bool:
        """True if it is about the first choice, or about none."""
        return self.choice is None or self.choice.get("index", _FIRST) == _FIRST

    @property
    def is_plain(self) -> bool:
        """True if it holds nothing but text and a role: no log probability, no tool call, no end."""
        if self.choice is None:
            return "error" not in self.fields
        beside = (*self.choice.items(), *self.delta.items())
        known = ("index", "delta", "role", *TEXTS)
        return self.is_first and all(name in known or value in SAYS_NOTHING for name, value in beside)

    def encode(self) -> bytes:
        """The event as it goes to the client."""
        if self.choice is not None:
            if self.delta is not self.choice:
                self.choice["delta"] = msgspec.Raw(msgspec.json.encode(self.delta))
            self.fields["choices"] = msgspec.Raw(msgspec.json.encode([self.choice]))
        return b"data: " + msgspec.json.encode(self.fields) + b"\n\n"


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _PlainChoice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _PlainDelta
    index: Literal[0] = 0
    logprobs: None = None
    finish_reason: None = None
    token_ids: None = None


class _PlainChunk(msgspec.Struct):
    choices: tuple[_PlainChoice]
    error: None = None


_decode_plain = msgspec.json.Decoder(_PlainChunk).decode


def read_chunk(event: bytes) -> Chunk | None:
    """The chunk that an event holds; None for any other event: a comment, the end mark."""
    start = event.find(b"data:")
    try:
        fields = decode_object(event[start + len(b"data:") :]) if start >= 0 else None
        if fields is None:
            return None
        choices = choices_of(fields)
        if len(choices) != 1:
            return Chunk(fields) if not choices else None
        choice = choices[0]
        return Chunk(fields, choice, decode_object(choice["delta"]) if "delta" in choice else choice)
    except UNREADABLE:
        return None


def is_whole(tail: bytes) -> bool:
    """True if a stream with this end has told the whole answer, or the error that ended it. Text cannot look
    so: in JSON, its line feeds and quotes are escaped."""
    if tail.endswith(_END):
        return True
    tail = b"\n" + without_half(tail)
    # A word that a pattern needs is found ten times as fast, from the end five times more.
    return (
        _has_finished(tail)
        or (tail.rfind(b"[DONE]") >= 0 and _DONE.search(tail) is not None)
        or read_streamed_error(tail) is not None
    )


def without_half(events: bytes) -> bytes:
    """The end of a stream without an event that broke off. The last event may lack its blank line."""
    cut = WholeEvents()
    whole = cut.joined(events)
    data = cut.rest.partition(b":")[2].strip()
    try:
        is_half = data != b"[DONE]" and decode_object(data) is None
    except UNREADABLE:
        is_half = True
    return whole if is_half else events


def _has_finished(tail: bytes) -> bool:
    """True if one of the last events ends a choice."""
    at = len(tail)
    for _ in range(_LAST_REASONS):
        at = tail.rfind(_REASON, 0, at)
        if at < 0:
            return False
        if _FINISHED.match(tail, at) is not None:
            return True
    return False


class SentStream(msgspec.Struct, frozen=True):
    """A stream as its client has it, all that the next attempt is built from."""

    kind: str  # the kind of engine that can go on with it
    head: RawFields | None  # the first chunk without what differs from chunk to chunk; None before it
    has_role: bool  # a chunk named the role
    # The generated text, in order, each piece with its field; without, if tokens tell it.
    texts: tuple[tuple[str, str], ...]
    # The answer's tokens, for an engine that goes on after them; None for one that runs the request again.
    resumption: Resumption | None
    cached_tokens: int | None  # prompt tokens that the first engine reused; None if it did not tell


class Transcript:
    """Keeps a stream as its client gets it."""

    def __init__(self, before: SentStream | None = None, *, keeps_text: bool) -> None:
        """`before`: what the client has already. `keeps_text`: False if the head is enough to go on."""
        self.head: RawFields | None = before.head if before is not None else None
        self.has_role = before is not None and before.has_role
        # All of it was read, and it is nothing but text; without the text: it has not ended.
        self.is_plain = True
        self._keeps_text = keeps_text
        self._texts: list[tuple[str, list[str]]] = []
        self._raw: list[bytes] = []
        self._raw_size = self._text_size = 0
        for name, text in before.texts if before is not None else ():
            self._say(name, text)

    @property
    def marks(self) -> tuple[bytes, ...] | None:
        """From now on, events without these bytes need not be fed; None: all must be."""
        return _ENDINGS if not self._keeps_text and self.head is not None else None

    def feed(self, chunk: bytes) -> bytes:
        """Takes the stream's next events, and returns them."""
        if not self._keeps_text and self.head is not None:
            if any(chunk.rfind(mark) >= 0 for mark in _ENDINGS):
                self.is_plain = False
            return chunk
        self._raw.append(chunk)
        self._raw_size += len(chunk)
        if self._raw_size > _RAW_BYTES or not self._keeps_text:
            self.read()
        return chunk

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """The generated text that was read, in order, each piece with its field."""
        return tuple((name, parts[0]) for name, parts in self._texts)

    def read(self) -> None:
        """Reads the chunks that were not read yet."""
        raw, self._raw, self._raw_size = b"".join(self._raw), [], 0
        for part in raw.replace(b"\r\n", b"\n").split(b"\n\n") if self.is_plain else ():
            if not part or self._is_plain_chunk(part):
                continue
            event = read_chunk(part)
            if event is None:
                self.is_plain &= b"data:" not in part
                continue
            if self.head is None:
                self.head = {name: event.fields[name] for name in event.fields if name not in _OF_A_CHUNK}
            self.has_role |= "role" in event.delta
            if self._keeps_text:
                self._note(event)
        for _, parts in self._texts:
            parts[:] = ["".join(parts)]  # a tenth of the memory

    def _is_plain_chunk(self, part: bytes) -> bool:
        """Notes a chunk's text if it has nothing else, as nearly every chunk: ten times as fast."""
        if self.head is None or not part.startswith(_DATA):
            return False
        try:
            delta = _decode_plain(part[len(_DATA) :]).choices[0].delta
        except UNREADABLE:
            return False
        for name, text in (
            ("content", delta.content),
            ("reasoning_content", delta.reasoning_content),
            ("reasoning", delta.reasoning),
        ):
            if text:
                self._say(name, text)
        return True

    def _note(self, event: Chunk) -> None:
        texts = event.texts() if self.is_plain and event.is_plain else None
        self.is_plain = texts is not None
        for name, text in texts or ():
            self._say(name, text)

    def _say(self, name: str, text: str) -> None:
        self._text_size += len(text)
        if self._text_size > _MAX_TEXT:
            self.is_plain = False
        elif self._texts and self._texts[-1][0] == name:
            self._texts[-1][1].append(text)
        else:
            self._texts.append((name, [text]))
