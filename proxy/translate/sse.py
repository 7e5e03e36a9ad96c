"""The events of a server-sent event stream, from the chunks in which it arrives."""

from __future__ import annotations

import re

# Engines use either; none ends lines with a carriage return alone.
_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_DATA = b"data:"
DONE = b"[DONE]"


class Events:
    """Collects chunks, and gives the data of each event that is complete."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, in order; events without data are left out."""
        *events, self._rest = _END_OF_EVENT.split(self._rest + chunk)
        return [data for data in map(_data_of, events) if data]


def _data_of(event: bytes) -> bytes:
    """The data lines of an event, joined."""
    lines = (line[len(_DATA) :].strip() for line in event.splitlines() if line.startswith(_DATA))
    return b"\n".join(lines)
