"""What a client was sent of a stream, kept as far as another engine needs it to go on.

Only whole events pass, so that no client is left with half of one when its engine dies. Chunks are read when
16 KiB of them have gathered, or when the engine has died: a chunk costs an append.
"""

from __future__ import annotations

import re

import msgspec

from proxy.request.events import WholeEvents

TEXTS = ("content", "reasoning_content", "reasoning", "text")
"""The fields of a choice's delta, or of the choice itself, that hold generated text."""
_ENDS = (b"\n\n", b"\r\n\r\n")
_RAW_BYTES = 16 << 10
# Characters of text that are kept of one answer. A longer one ends with its engine.
_MAX_TEXT = 1 << 20
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
_DONE = b"[DONE]"
Fields = dict[str, msgspec.Raw]
NULL, _FIRST = msgspec.Raw(b"null"), msgspec.Raw(b"0")
_SAYS_NOTHING = (NULL, msgspec.Raw(b'""'), msgspec.Raw(b"[]"), msgspec.Raw(b"{}"))
_decode = msgspec.json.Decoder(Fields).decode
_decode_choices = msgspec.json.Decoder(list[Fields]).decode
_decode_text = msgspec.json.Decoder(str).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Event(msgspec.Struct):
    """A chunk of a chat or a completion with at most one choice.

    Attributes:
        fields: all of it.
        choice: its choice; None for one without choices.
        delta: what holds the choice's text: its delta in a chat, the choice itself in a completion.
    """

    fields: Fields
    choice: Fields | None = None
    delta: Fields = {}

    def texts(self) -> list[tuple[str, str]]:
        """Its text, by field."""
        return [
            (name, _decode_text(self.delta[name]))
            for name in TEXTS
            if self.delta.get(name, NULL) not in _SAYS_NOTHING
        ]

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing but text and a role: no log probability, no tool call, no end."""
        if self.choice is None:
            return "error" not in self.fields
        beside = (*self.choice.items(), *self.delta.items())
        known = ("index", "delta", "role", *TEXTS)
        return self.choice.get("index", _FIRST) == _FIRST and all(
            name in known or value in _SAYS_NOTHING for name, value in beside
        )

    def encode(self) -> bytes:
        """The event as it goes to the client."""
        if self.choice is not None:
            if self.delta is not self.choice:
                self.choice["delta"] = msgspec.Raw(msgspec.json.encode(self.delta))
            self.fields["choices"] = msgspec.Raw(msgspec.json.encode([self.choice]))
        return b"data: " + msgspec.json.encode(self.fields) + b"\n\n"


def read_event(event: bytes) -> Event | None:
    """The chunk that an event holds; None for any other event: a comment, the end mark."""
    start = event.find(b"data:")
    try:
        fields = _decode(event[start + len(b"data:") :]) if start >= 0 else None
        if fields is None:
            return None
        choices = _decode_choices(fields.get("choices", b"[]"))
        if len(choices) != 1:
            return Event(fields) if not choices else None
        choice = choices[0]
        return Event(fields, choice, _decode(choice["delta"]) if "delta" in choice else choice)
    except _UNREADABLE:
        return None


def is_whole(tail: bytes) -> bool:
    """Whether a stream with this end has told the whole answer."""
    return _DONE in tail or _FINISHED.search(tail) is not None


class Transcript:
    """A stream as its client got it.

    Attributes:
        head: the first chunk; None before it.
        texts: the generated text, in order, each with its field.
        has_role: a chunk named the role.
        is_plain: all of it was read, and it is nothing but text; without the text: it has not ended.
    """

    def __init__(self, *, keeps_text: bool) -> None:
        """`keeps_text`: False if the head is enough to go on."""
        self.head: Fields | None = None
        self.texts: list[tuple[str, str]] = []
        self.has_role = False
        self.is_plain = True
        self._keeps_text = keeps_text
        self._events = WholeEvents()
        self._holds_back = False
        self._raw: list[bytes] = []
        self._raw_size = self._text_size = 0

    def feed(self, chunk: bytes) -> bytes:
        """Takes the stream's next bytes; returns those for the client."""
        if self._holds_back or not chunk.endswith(_ENDS):
            chunk = b"".join(self._events.feed(chunk))
            self._holds_back = bool(self._events.rest)
        if not self._keeps_text and self.head is not None:
            if b'"error"' in chunk or b'"finish_reason":"' in chunk:
                self.is_plain = False
            return chunk
        self._raw.append(chunk)
        self._raw_size += len(chunk)
        if self._raw_size > _RAW_BYTES or not self._keeps_text:
            self.read()
        return chunk

    def finish(self) -> bytes:
        """The bytes still held back, of a stream that is over."""
        return self._events.rest

    def read(self) -> None:
        """Reads the chunks that were not read yet."""
        raw, self._raw, self._raw_size = b"".join(self._raw), [], 0
        for part in WholeEvents().feed(raw) if self.is_plain else ():
            event = read_event(part)
            if event is None:
                self.is_plain &= b"data:" not in part
                continue
            if self.head is None:
                self.head = {name: event.fields[name] for name in event.fields if name not in _OF_A_CHUNK}
            self.has_role |= "role" in event.delta
            if self._keeps_text:
                self._note(event)

    def _note(self, event: Event) -> None:
        self.is_plain &= event.is_plain and self._text_size <= _MAX_TEXT
        for name, text in event.texts() if self.is_plain else ():
            self._text_size += len(text)
            if self.texts and self.texts[-1][0] == name:
                self.texts[-1] = (name, self.texts[-1][1] + text)
            else:
                self.texts.append((name, text))


# Fields of a chunk that are not those of all chunks of its stream.
_OF_A_CHUNK = frozenset({"choices", "usage", "timings"})
