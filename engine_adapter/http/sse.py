"""Server-sent events: cuts a stream into whole events, from the chunks in which it arrives."""

from __future__ import annotations

import re

ENDS = (b"\n\n", b"\r\n\r\n")
"""The ends of an event. Engines use either; none ends lines with a carriage return alone."""
END = re.compile(rb"\n\r?\n")  # begins with a line feed: found fast
# Bytes of an end that may be there before its last one arrives.
_BEFORE_THE_LAST = 2


class WholeEvents:
    """Collects chunks, and gives each event when it is complete. Each byte is looked at once."""

    __slots__ = ("_rest", "_seen")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0  # bytes of it in which no end begins

    @property
    def rest(self) -> bytes:
        """The beginning of the next event."""
        return bytes(self._rest)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, in order, each with its end."""
        self._rest += chunk
        events, at = list[bytes](), 0
        for end in END.finditer(self._rest, self._seen):
            events.append(bytes(self._rest[at : end.end()]))
            at = end.end()
        if at:
            del self._rest[:at]
        self._seen = max(len(self._rest) - _BEFORE_THE_LAST, 0)
        return events

    def joined(self, chunk: bytes) -> bytes:
        """The same events as one piece: a chunk of whole events passes as it is."""
        if not self._rest and chunk.endswith(ENDS):
            return chunk
        return b"".join(self.feed(chunk))

    def take_rest(self) -> bytes:
        """The beginning of an event that has no end: the stream is over."""
        rest = self.rest
        self._rest.clear()
        self._seen = 0
        return rest
