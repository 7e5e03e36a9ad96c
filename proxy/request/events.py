"""Cuts a server-sent event stream into events, from the chunks in which it arrives."""

from __future__ import annotations

import re

# Engines end lines with either; none with a carriage return alone. It begins with a line feed: found fast.
_END = re.compile(rb"\n\r?\n")
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
        for end in _END.finditer(self._rest, self._seen):
            events.append(bytes(self._rest[at : end.end()]))
            at = end.end()
        if at:
            del self._rest[:at]
        self._seen = max(len(self._rest) - _BEFORE_THE_LAST, 0)
        return events
