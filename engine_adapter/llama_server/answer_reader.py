"""Passes an answer on, and reads it once when it is over."""

from __future__ import annotations

from engine_adapter.hold import AnswerReader
from engine_adapter.llama_server.answer import read_answer
from engine_adapter.llama_server.assemble import assemble
from engine_adapter.llama_server.lease import SlotLease

# Longer answers are passed on unread: the server is asked what they left in the slot.
MAX_BYTES = 64 * 2**20


class SlotAnswer(AnswerReader):
    """`AnswerReader` of a request on a leased slot."""

    def __init__(self, path: str, lease: SlotLease, *, assembles: bool) -> None:
        self.assembles = assembles
        self._path = path
        self._lease = lease
        self._chunks: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> bytes:
        """See `AnswerReader.feed`."""
        self._lease.has_begun = True
        self._size += len(chunk)
        if self._size <= MAX_BYTES or self.assembles:
            self._chunks.append(chunk)
        return b"" if self.assembles else chunk

    def finish(self) -> bytes:
        """See `AnswerReader.finish`."""
        raw = b"".join(self._chunks)
        self._chunks.clear()
        if self._size <= MAX_BYTES:
            self._lease.answer = read_answer(raw)
        return assemble(self._path, raw) if self.assembles else b""

    def cached_tokens(self) -> int | None:
        """See `AnswerReader.cached_tokens`."""
        return self._lease.answer.cached_tokens if self._lease.answer is not None else None
