"""Streams that another engine continues after their engine died, and how kvpin prepares for that.

the engine tells its tokens  → another engine of its kind takes them, and computes only what follows
greedy decoding              → another engine of its kind runs the request again; what was sent is left out
anything else                → the stream ends with an error event

The second way takes longer, but needs no support by the engine. kvpin compares the text: a difference ends
the attempt, and the next engine is tried. Each attempt gets a new Passage, made from the client's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from engine_adapter import (
    UNREADABLE,
    EngineDiverged,
    Hold,
    JsonBody,
    RawFields,
    Resumption,
    decode_object,
)
from engine_adapter.http.sse import events_in
from engine_adapter.http.usage import NULL
from proxy.request.calls import Call
from proxy.request.transcript import Chunk, SentStream, Transcript, read_chunk

_NAMES = ("id", "object", "created", "model", "system_fingerprint")


class Splice:
    """The rest of an answer, as chunks of the stream that the client reads.

    An engine that takes the answer's tokens sends only what follows them. Any other runs the request again:
    what the client has is compared and left out, and the first difference ends the answer.
    """

    def __init__(self, told: SentStream) -> None:
        """`told`: what the client has."""
        head = told.head or {}
        self._head = {name: head[name] for name in _NAMES if name in head}
        self._has_role = told.has_role
        self._known = deque(told.texts if told.resumption is None else ())
        self._same = 0  # characters that both engines wrote
        self._cached = told.cached_tokens

    def feed(self, events: bytes) -> bytes:
        """Takes the stream's next events; returns those for the client.

        Raises:
            EngineDiverged: this engine's answer is another one.
        """
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
                length = min(len(rest), len(known))
                self._check(field == name)
                self._same += _common(known[:length], rest[:length])
                self._check(known[:length] == rest[:length])
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


def _common(one: str, other: str) -> int:
    """Characters before the first difference of texts of one length."""
    if one == other:
        return len(one)
    return next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)


ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_BODIES = 256 << 20
"""Bytes of bodies that running streams keep together. Beyond it, streams end with their engines."""


class Passage:
    """Reads one attempt's stream on its way to the client, so that another engine can go on with it.

    Attributes:
        reads_text: all events must pass the stages.
    """

    def __init__(self, kind: str, resume: Callable[[], Resumption] | None, before: SentStream | None) -> None:
        """A passage.

        Args:
            kind: the engine's.
            resume: tells the answer's tokens; None to keep its text.
            before: what the client has already.
        """
        self._kind, self._resume, self._before = kind, resume, before
        # After tokens, only tokens tell the whole answer.
        self._is_known = resume is not None or before is None or before.resumption is None
        self._splice = Splice(before) if before is not None else None
        self._sent = Transcript(before, keeps_text=resume is None)
        self.reads_text = resume is None or before is not None

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

        `cached_tokens`: prompt tokens that this engine reused, if it told.
        """
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
    """The passage of a stream that another engine could go on with; None if it ends with its engine.

    Args:
        call: the request.
        hold: its hold on an engine.
        kind: the engine's kind.
        before: what the client has already; the stream goes on with that.
    """
    if before is not None:
        # An engine that ran the request again also reports the tokens that the client got from the first.
        return Passage(kind, None if before.texts else hold.resume, before)
    if not (call.streams and call.route in ROUTES and isinstance(call.body, JsonBody)):
        return None
    if hold.resume is None and call.body.hint("temperature") != 0:  # the same prompt may give another answer
        return None
    return Passage(kind, hold.resume, None)
