"""Assembles a streamed answer into the one JSON answer a client asked for, with the server's own fields.

Every request goes to the server as a stream, because the server finishes any other request even after its
client has left. A stream lacks three things. It has no half character and no start of a tool call that
`max_tokens` cut off. In a chat it has no `logprobs` of tokens without text, such as the end of a turn. And it
does not tell which `logprobs` belong to a stop string: all are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineDied, EngineGarbled, EngineRejected, EngineUnavailable
from engine_adapter.http.error_bodies import read_error
from engine_adapter.llama_server.answer import DONE, ChoiceChunk, StreamChunk, decode_chunk, stream_payloads

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CLIENTS_FAULT = range(400, 500)
_T = TypeVar("_T")
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


def streaming_body(path: str, body: JsonBody) -> JsonBody | None:
    """The same request as a stream with usage; None if it streams already, or cannot."""
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
        EngineRejected: the stream has an error that is the client's fault.
        EngineUnavailable: it has another error, ended too early, or is no stream.
    """
    kind, render = _KINDS[path]
    choices: dict[int, _Choice] = {}
    answer: dict[str, Any] = {}
    index = 0
    for chunk, payload in _chunks(raw):
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
    """The chunks of a stream; raises for an error event, and if the stream ends too early."""
    for payload in stream_payloads(raw):
        if payload == DONE:
            return
        chunk = _decoded(decode_chunk, payload)
        if chunk.error is not None:
            code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
            message = read_error(payload).message
            if isinstance(code, int) and code in _CLIENTS_FAULT:
                raise EngineRejected(message, status=code)
            raise EngineUnavailable(message)
        yield chunk, payload
    raise _broken_off()


def _decoded(decode: Callable[[bytes], _T], payload: bytes) -> _T:
    try:
        return decode(payload)
    except UNREADABLE as error:
        raise EngineGarbled(f"llama-server sent an unreadable chunk: {error}") from error


def _broken_off() -> EngineDied:
    return EngineDied("llama-server ended its answer too early")
