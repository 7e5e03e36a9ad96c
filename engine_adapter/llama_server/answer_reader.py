"""The readers of answers on their way to the client: what each asks for, and what the client gets.

The server's own completions are not sent as streams: the server notices within about a second that their
client has left, and their JSON answer has more than their stream. It can tell the ids of all sampled tokens:
kvpin asks for them, and removes them from the answer if the client did not ask.
"""

from __future__ import annotations

from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.hold import AnswerReader
from engine_adapter.llama_server.answer import CHAT, COMPLETIONS, CompletionOutput, read_answer
from engine_adapter.llama_server.options import INFILL, NATIVE_COMPLETIONS
from engine_adapter.llama_server.turns import SlotLease

_UNPARSED = "llama-server could not parse the whole answer: its end is missing"
# Longer answers are passed on unread: the server is asked what they left in the slot.
MAX_BYTES = 64 * 2**20
# Of a stream, so many are read in about 1 ms.
_BYTES_PER_MS = 8192
# The fields of `GET /slots` that show the last request on a slot.
_OF_A_REQUEST = ("prompt", "generated", "params")


def streaming_body(path: str, body: JsonBody) -> JsonBody | None:
    """The request as a stream with usage; None if it streams already, or cannot."""
    if path not in (CHAT, COMPLETIONS) or body.get("stream") is True:
        return None
    if path == CHAT and body.get("logprobs") and body.get("tools"):
        return None  # the server refuses this as a stream, and answers it otherwise
    return body.replace(stream=True, stream_options={"include_usage": True})


def read_by(path: str, body: JsonBody, lease: SlotLease) -> tuple[JsonBody, AnswerReader]:
    """The body for the server, and the reader of its answer."""
    if path in (*NATIVE_COMPLETIONS, INFILL) and body.get("stream") is not True:
        # A client that chooses the fields of its answer gets no other.
        hides_tokens = body.get("return_tokens") is not True and not body.get("response_fields")
        asked = body.replace(return_tokens=True) if hides_tokens else body
        return asked, NativeAnswer(lease, hides_tokens=hides_tokens)
    streamed = streaming_body(path, body)
    return streamed or body, SlotAnswer(path, lease, assembles=streamed is not None)


class SlotAnswer(AnswerReader):
    """`AnswerReader` of a request on a leased slot. Reads the answer once, when it is over."""

    takes_pieces = True

    def __init__(self, path: str, lease: SlotLease, *, assembles: bool) -> None:
        self.assembles = assembles
        self._path = path
        self._lease = lease
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    @override
    def finish_ms(self) -> float:
        return self._size / _BYTES_PER_MS

    @override
    def feed(self, chunk: bytes) -> bytes:
        self._lease.has_begun = True
        self._size += len(chunk)
        if self._size <= MAX_BYTES or self.assembles:
            self._chunks.append(chunk)
        return b"" if self.assembles else chunk

    @override
    def finish(self, rest: bytes = b"") -> bytes:
        if self._size > MAX_BYTES and not self.assembles:
            self._chunks.clear()
            return rest
        answer = self._lease.answer = read_answer(b"".join(self._chunks))
        self._chunks.clear()
        if not self.assembles:
            return rest
        whole = answer.assembled(self._path)
        if answer.failure is not None:
            self.note = _UNPARSED  # any other error is raised
        return whole

    @override
    def cached_tokens(self) -> int | None:
        return self._lease.answer.cached_tokens if self._lease.answer is not None else None


class NativeAnswer(SlotAnswer):
    """`AnswerReader` of a completion that the server answers with one JSON object."""

    def __init__(self, lease: SlotLease, *, hides_tokens: bool) -> None:
        """`hides_tokens`: the client did not ask for token ids."""
        super().__init__("", lease, assembles=False)
        self._hides_tokens = hides_tokens

    @override
    def feed(self, chunk: bytes) -> bytes:
        self._lease.has_begun = True
        answer = self._lease.answer = CompletionOutput()
        answer.read(chunk)
        return _without_token_ids(chunk) if self._hides_tokens else chunk

    @override
    def finish(self, rest: bytes = b"") -> bytes:
        return rest


class SlotsAnswer(AnswerReader):
    """`AnswerReader` of `GET /slots`. Removes prompts, answers and parameters: the last request on a slot may
    be anybody's, or kvpin's own."""

    @override
    def feed(self, chunk: bytes) -> bytes:
        try:
            slots = msgspec.json.decode(chunk, type=list[dict[str, Any]])
        except UNREADABLE as error:
            raise EngineUnavailable(f"GET /slots: not a list of slots: {error}") from error
        for slot in slots:
            for name in _OF_A_REQUEST:
                slot.pop(name, None)
        return msgspec.json.encode(slots)


def _without_token_ids(content: bytes) -> bytes:
    """An answer as the server writes it when nobody asks for token ids. All other bytes stay."""
    try:
        answer = JsonBody(content)
    except UNREADABLE:
        return content
    return answer.replace(tokens=[]).raw if "tokens" in answer else content
