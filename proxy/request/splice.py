"""Joins the stream of an engine that goes on with an answer to what the client has already.

Two ways. An engine that takes the answer's tokens sends only what follows them. Any other runs the request
again: what the client has is compared and left out, and the first difference ends the answer.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import msgspec

from engine_adapter import UNREADABLE, EngineDiverged, RawFields, WholeEvents, decode_object
from proxy.request.transcript import NULL, Event, SentStream, read_event

_NAMES = ("id", "object", "created", "model", "system_fingerprint")


class Splice:
    """The rest of an answer, as chunks of the stream that the client reads."""

    def __init__(self, told: SentStream) -> None:
        """`told`: what the client has."""
        head = told.head or {}
        self._head = {name: head[name] for name in _NAMES if name in head}
        self._has_role = told.has_role
        self._known = deque(told.texts if told.resumption is None else ())
        self._same = 0  # characters that both engines wrote
        self._cached = told.cached_tokens
        self._events = WholeEvents()

    def feed(self, chunk: bytes) -> bytes:
        """Takes the stream's next bytes; returns those for the client.

        Raises:
            EngineDiverged: this engine's answer is another one.
        """
        return b"".join(map(self._pass, self._events.feed(chunk)))

    def finish(self) -> bytes:
        """The bytes still held back, of a stream that is over."""
        return self._events.rest

    def _pass(self, part: bytes) -> bytes:
        event = read_event(part)
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

    def _skip(self, event: Event) -> None:
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
