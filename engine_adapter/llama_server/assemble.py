"""A streamed answer as the one JSON answer a client asked for, field by field as the server's own.

Every request goes to a server as a stream: it goes on with one that is none after its client has left.
A stream lacks two things: in a chat, `logprobs` of tokens without text, the end of a turn above all; and
with a stop string, which `logprobs` the server would have dropped as being its own. They are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.error_bodies import read_error
from engine_adapter.errors import EngineError
from engine_adapter.llama_server.answer import DONE, stream_payloads

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_BAD_GATEWAY, _SERVER_ERROR = 502, 500
_ERROR_STATUS = range(400, 600)
_T = TypeVar("_T")


class StreamError(EngineError):
    """A stream that brought an error, or broke off, instead of a whole answer.

    Attributes:
        status: the HTTP status the client is to see.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def streaming_body(path: str, body: JsonBody) -> JsonBody | None:
    """The same request as a stream with usage; None when it is one, or the route has none to assemble."""
    if path not in _ASSEMBLERS or body.get("stream") is True:
        return None
    if path == _RESPONSES:
        return body.replace(stream=True)
    return body.replace(stream=True, stream_options={"include_usage": True})


def assemble(path: str, raw: bytes) -> bytes:
    """The JSON answer of a route that `streaming_body` gave a body for.

    Raises:
        StreamError: the stream has an error, broke off, or is none.
    """
    return _ASSEMBLERS[path](raw)


def assemble_chat(raw: bytes) -> bytes:
    """`chat.completion` from `chat.completion.chunk`s; raises StreamError."""
    return _assemble(raw, "chat.completion", _chat_choice)


def assemble_completion(raw: bytes) -> bytes:
    """`text_completion` from its chunks; raises StreamError."""
    return _assemble(raw, "text_completion", _completion_choice)


def assemble_response(raw: bytes) -> bytes:
    """The `response` from its last event; raises StreamError."""
    for event in _events(raw):
        if event.get("type") == "response.completed":
            response = _convert(event.get("response"), dict[str, Any])
            items = _convert(response.get("output"), list[dict[str, Any]])
            output = [{"status": "completed", **item} for item in items]
            whole = {**response, "completed_at": response.get("created_at"), "output": output}
            return msgspec.json.encode(whole)
    raise _broken_off()


_ASSEMBLERS: dict[str, Callable[[bytes], bytes]] = {
    _CHAT: assemble_chat,
    _COMPLETIONS: assemble_completion,
    _RESPONSES: assemble_response,
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] = []


class _Logprobs(msgspec.Struct):
    content: list[Any] = []


class _ChoiceChunk(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class _ToolCall:
    name: str = ""
    id: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    """What has come of one choice."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _ToolCall] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, chunk: _ChoiceChunk) -> None:
        self.text.append(chunk.text or chunk.delta.content or "")
        self.reasoning.append(chunk.delta.reasoning_content or "")
        for delta in chunk.delta.tool_calls:
            call = self.calls.setdefault(delta.index, _ToolCall())
            # Arguments come in parts. A name that grew comes whole once more.
            call.name = delta.function.name or call.name
            call.id = delta.id or call.id
            call.arguments.append(delta.function.arguments or "")
        if chunk.logprobs is not None:
            self.logprobs.extend(chunk.logprobs.content)
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


def _assemble(raw: bytes, kind: str, render: Callable[[int, _Choice], dict[str, Any]]) -> bytes:
    choices: dict[int, _Choice] = {}
    answer: dict[str, Any] = {}
    index = 0
    for event in _events(raw):
        for chunk in _convert(event.pop("choices", []), list[_ChoiceChunk]):
            index = chunk.index
            choices.setdefault(index, _Choice()).add(chunk)
        # Each choice ends with counts, maybe in a chunk without choices. The first one's stand for all.
        if index == 0 and 0 in choices and choices[0].finish_reason is not None:
            answer |= event
    if any(choice.finish_reason is None for choice in choices.values()) or not answer:
        raise _broken_off()
    rendered = [render(index, choice) for index, choice in sorted(choices.items())]
    return msgspec.json.encode({"choices": rendered, **answer, "object": kind})


def _events(raw: bytes) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end; raises StreamError for an error and for an end too early."""
    for payload in stream_payloads(raw):
        if payload == DONE:
            return
        try:
            event = msgspec.json.decode(payload, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _unreadable(error) from error
        if event.get("error") is not None:
            raise _failed(payload, event["error"])
        yield event
    raise _broken_off()


def _convert(value: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _unreadable(error) from error


def _failed(payload: bytes, error: object) -> StreamError:
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and code in _ERROR_STATUS else _SERVER_ERROR
    return StreamError(read_error(payload).message, status)


def _broken_off() -> StreamError:
    return StreamError("llama-server ended its answer before it was whole", _BAD_GATEWAY)


def _unreadable(error: Exception) -> StreamError:
    return StreamError(f"llama-server sent a chunk that cannot be read: {error}", _BAD_GATEWAY)
