"""The readers of answers on their way to the client: what each asks for, and what the client gets.

Chats and completions that want one JSON answer are sent as streams, because the server finishes any other
request even after its client has left. `assemble` makes the answer, with the server's own fields. A stream
lacks three things. It has no half character and no start of a tool call that `max_tokens` cut off. In a chat
it has no `logprobs` of tokens without text, such as the end of a turn. And it does not tell which `logprobs`
belong to a stop string: all are kept.

The server parses a chat's whole answer at its end. If it cannot, it ends with an error, after all that was
generated. Another server would do the same: the client gets what was parsed before, as `stop`, with a note.

The server's own completions are not sent as streams: the server notices within about a second that their
client has left, and their JSON answer has more than their stream. It can tell the ids of all sampled tokens:
kvpin asks for them, and removes them from the answer if the client did not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineDied, EngineGarbled, EngineUnavailable
from engine_adapter.hold import AnswerReader
from engine_adapter.http.answer_fields import read_error
from engine_adapter.llama_server.answer import (
    DONE,
    ChoiceChunk,
    CompletionOutput,
    StreamChunk,
    decode_chunk,
    read_answer,
    stream_payloads,
)
from engine_adapter.llama_server.options import INFILL, NATIVE_COMPLETIONS
from engine_adapter.llama_server.turns import SlotLease

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_UNPARSED = "llama-server could not parse the whole answer: its end is missing"
_T = TypeVar("_T")
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


def streaming_body(path: str, body: JsonBody) -> JsonBody | None:
    """The request as a stream with usage; None if it streams already, or cannot."""
    if path not in (_CHAT, _COMPLETIONS) or body.get("stream") is True:
        return None
    if path == _CHAT and body.get("logprobs") and body.get("tools"):
        return None  # the server refuses this as a stream, and answers it otherwise
    return body.replace(stream=True, stream_options={"include_usage": True})


@dataclass(slots=True)
class _ToolCall:
    name: str = ""
    id: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    """The parts of one choice so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _ToolCall] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, chunk: ChoiceChunk) -> None:
        self.text.append(chunk.text or chunk.delta.content or "")
        self.reasoning.append(chunk.delta.reasoning_content or "")
        for delta in chunk.delta.tool_calls or ():
            call = self.calls.setdefault(delta.index, _ToolCall())
            # Arguments come in parts. A name that grew is sent again in whole.
            call.name = delta.function.name or call.name
            call.id = delta.id or call.id
            call.arguments.append(delta.function.arguments or "")
        if chunk.logprobs is not None:
            self.logprobs.extend(chunk.logprobs.content or ())
        self.finish_reason = chunk.finish_reason or self.finish_reason

    def says_something(self) -> bool:
        """True if there is a part with text or a call."""
        return bool(self.calls) or any(self.text) or any(self.reasoning)


def _chat_choice(index: int, choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.text)}
    if reasoning := "".join(choice.reasoning):
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["tool_calls"] = [_tool_call(call) for _, call in sorted(choice.calls.items())]
    answer = {"finish_reason": choice.finish_reason, "index": index, "message": message}
    return answer | ({"logprobs": {"content": choice.logprobs}} if choice.logprobs else {})


def _tool_call(call: _ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": "".join(call.arguments)}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _completion_choice(index: int, choice: _Choice) -> dict[str, Any]:
    logprobs = {"content": choice.logprobs} if choice.logprobs else None
    text = "".join(choice.text)
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}


_KINDS = {_CHAT: ("chat.completion", _chat_choice), _COMPLETIONS: ("text_completion", _completion_choice)}


def assemble(path: str, raw: bytes) -> bytes:
    """The JSON answer of a route that `streaming_body` gave a body for.

    Raises:
        EngineRejected: the stream has an error.
        EngineUnavailable: it ended too early, or is no stream.
    """
    kind, render = _KINDS[path]
    choices: dict[int, _Choice] = {}
    answer: dict[str, Any] = {}
    index, last = 0, b"{}"
    for chunk, payload in _chunks(raw):
        if chunk.error is not None:
            error = read_error(payload)
            if not (error.is_unparsed and any(map(_Choice.says_something, choices.values()))):
                raise error.rejection()
            for choice in choices.values():
                choice.finish_reason = choice.finish_reason or "stop"
            answer = answer or _decoded(_decode_fields, last)
            break
        last = payload
        for part in chunk.choices:
            index = part.index
            choices.setdefault(index, _Choice()).add(part)
        # Each choice ends with counts, maybe in a chunk without choices. Those of the first choice are used.
        if index == 0 and 0 in choices and choices[0].finish_reason is not None:
            answer |= _decoded(_decode_fields, payload)
    if any(choice.finish_reason is None for choice in choices.values()) or not answer:
        raise _broken_off()
    rendered = [render(index, choice) for index, choice in sorted(choices.items())]
    return msgspec.json.encode({**answer, "choices": rendered, "object": kind})


def _chunks(raw: bytes) -> Iterator[tuple[StreamChunk, bytes]]:
    """The chunks of a stream, to its error if it has one; raises if the stream ends too early."""
    for payload in stream_payloads(raw):
        if payload == DONE:
            return
        chunk = _decoded(decode_chunk, payload)
        yield chunk, payload
    raise _broken_off()


def _decoded(decode: Callable[[bytes], _T], payload: bytes) -> _T:
    try:
        return decode(payload)
    except UNREADABLE as error:
        raise EngineGarbled(f"llama-server sent an unreadable chunk: {error}") from error


def _broken_off() -> EngineDied:
    return EngineDied("llama-server ended its answer too early")


# Longer answers are passed on unread: the server is asked what they left in the slot.
MAX_BYTES = 64 * 2**20
# Of a stream, so many are read in about 1 ms.
_BYTES_PER_MS = 8192
# The fields of `GET /slots` that show the last request on a slot.
_OF_A_REQUEST = ("prompt", "generated", "params")


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
        raw = b"".join(self._chunks)
        self._chunks.clear()
        if self._size <= MAX_BYTES:
            self._lease.answer = read_answer(raw)
        if not self.assembles:
            return rest
        answer = assemble(self._path, raw)
        if self._lease.answer is not None and self._lease.answer.error is not None:
            self.note = _UNPARSED  # any other error is raised
        return answer

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
