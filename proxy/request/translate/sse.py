"""The data of a server-sent event stream, from the chunks in which it arrives."""

from __future__ import annotations

from engine_adapter import WholeEvents

_DATA = b"data:"
DONE = b"[DONE]"


class Events:
    """Collects chunks, and gives the data of each event that is complete."""

    __slots__ = ("_whole",)

    def __init__(self) -> None:
        self._whole = WholeEvents()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, in order; events without data are left out."""
        return [data for data in map(_data_of, self._whole.feed(chunk)) if data]


def _data_of(event: bytes) -> bytes:
    lines = (line[len(_DATA) :].strip() for line in event.splitlines() if line.startswith(_DATA))
    return b"\n".join(lines)
