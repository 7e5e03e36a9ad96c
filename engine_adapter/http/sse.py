"""Server-sent events: cuts a stream into whole events, from the chunks in which it arrives."""

from __future__ import annotations

import re
from itertools import pairwise

from engine_adapter.errors import EngineGarbled

ENDS = (b"\n\n", b"\r\n\r\n")
"""The ends of an event. Engines use either; none ends lines with a carriage return alone."""
END = re.compile(rb"\n\r?\n")  # begins with a line feed: found fast
MAX_EVENT_BYTES = 8 << 20
"""The longest event that is collected. The ids of a prompt of a million tokens fit in it."""
# Bytes of an end that may be there before its last one arrives.
_BEFORE_THE_LAST = 2


def is_silent(chunk: bytes) -> bool:
    """True if a chunk of a stream says nothing: it holds comments alone, or their ends. Servers send comments
    to keep a connection open while they compute a long prompt."""
    return all(line[:1] in (b":", b"\r", b"") for line in chunk.split(b"\n"))


class Speech:
    """Finds where a stream begins to say something, in the chunks in which it arrives. A comment may be cut
    into several."""

    __slots__ = ("_in_comment",)

    def __init__(self) -> None:
        self._in_comment = False

    def begins_in(self, chunk: bytes) -> bool:
        """True if the stream's next bytes say something, see `is_silent`."""
        lines = b":" + chunk if self._in_comment else chunk
        self._in_comment = lines[lines.rfind(b"\n") + 1 :].startswith(b":")
        return not is_silent(lines)


def events_in(whole: bytes) -> list[bytes]:
    """The events, of bytes that hold whole ones, each with its end."""
    ends = [end.end() for end in END.finditer(whole)]
    return [whole[begin:end] for begin, end in pairwise((0, *ends))]


class WholeEvents:
    """Collects chunks, and gives each event when it is complete. Each byte is looked at once. A method that
    takes a chunk raises EngineGarbled for an event longer than `MAX_EVENT_BYTES`. `is_between`: no event has
    begun."""

    __slots__ = ("_rest", "_seen", "is_between")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0  # bytes of it in which no end begins
        self.is_between = True

    @property
    def rest(self) -> bytes:
        """The beginning of the next event."""
        return bytes(self._rest)

    def may_hold(self, chunk: bytes) -> bool:
        """True if an event that the chunk goes on with is not too long, wherever it ends."""
        return len(self._rest) + len(chunk) <= MAX_EVENT_BYTES

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, in order, each with its end."""
        return events_in(self.joined(chunk))

    def joined(self, chunk: bytes) -> bytes:
        """The same events as one piece: a chunk of whole events passes as it is."""
        if self.is_between and chunk.endswith(ENDS):
            return chunk
        self._rest += chunk
        lf, crlf = self._rest.rfind(b"\n\n", self._seen), self._rest.rfind(b"\n\r\n", self._seen)
        end = max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
        with memoryview(self._rest) as rest:
            events = bytes(rest[:end])
        self._keep_from(end)
        return events

    def take_rest(self) -> bytes:
        """The beginning of an event that has no end: the stream is over."""
        rest = self.rest
        self._rest.clear()
        self._seen, self.is_between = 0, True
        return rest

    def _keep_from(self, end: int) -> None:
        """Keeps what follows the last whole event."""
        if end:
            del self._rest[:end]
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rest.clear()
            raise EngineGarbled(f"an event of the engine's stream is longer than {MAX_EVENT_BYTES >> 20} MiB")
        self._seen = max(len(self._rest) - _BEFORE_THE_LAST, 0)
        self.is_between = not self._rest
