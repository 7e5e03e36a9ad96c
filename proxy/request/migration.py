"""Streams that another engine continues after their engine died, and how kvpin prepares for that.

the engine tells its tokens  → another engine of its kind takes them, and computes only what follows
greedy decoding              → another engine of its kind runs the request again; what was sent is left out
anything else                → the stream ends with an error event

The second way takes longer, but needs no support by the engine. kvpin compares the text: a difference ends
the attempt, and the next engine is tried. Each attempt gets a new Passage, made from the client's part.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_adapter import Hold, JsonBody, Resumption
from proxy.request.calls import Call
from proxy.request.splice import Splice
from proxy.request.transcript import SentStream, Transcript

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_BODIES = 256 << 20
"""Bytes of bodies that running streams keep together. Beyond it, streams end with their engines."""


class Passage:
    """Reads one attempt's stream on its way to the client, so that another engine can go on with it."""

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

    def feed(self, chunk: bytes) -> bytes:
        """Takes the stream's next bytes; returns those for the client.

        Raises:
            EngineDiverged: the engine's text differs from the beginning that the client has.
        """
        return self._sent.feed(self._splice.feed(chunk) if self._splice is not None else chunk)

    def finish(self) -> bytes:
        """The bytes still held back, of a stream that is over."""
        rest = self._splice.finish() if self._splice is not None else b""
        return (self._sent.feed(rest) if rest else b"") + self._sent.finish()

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
