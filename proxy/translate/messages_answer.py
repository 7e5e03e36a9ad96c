"""Anthropic's answers, whole and streamed, from those of chats.

    reasoning                  a `thinking` block
    content                    a `text` block
    tool_calls                 a `tool_use` block each
    finish_reason              stop_reason
    usage                      input_tokens counts what was neither read from the cache nor written to it

A stream tells usage twice: in its first event what kvpin predicts, in its last what the engine reports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from engine_adapter import read_error
from proxy.errors import EngineFailed
from proxy.request.dialects import ANTHROPIC
from proxy.translate.chats import Said, read_chat
from proxy.translate.translation import Predicted
from proxy.translate.usage import ChatUsage


class Usage(Struct):
    """Token counts; together the first three are the prompt's."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class _Text(Struct, tag="text"):
    text: str


class _Thinking(Struct, tag="thinking"):
    thinking: str
    signature: str = ""


class _ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Mapping[str, object]


_Block = _Text | _Thinking | _ToolUse


class _Message(Struct):
    id: str
    type: str
    role: str
    model: str
    content: list[_Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class _TextDelta(Struct, tag="text_delta"):
    text: str


class _ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class _SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class _InputDelta(Struct, tag="input_json_delta"):
    partial_json: str


class _MessageStart(Struct, tag="message_start"):
    message: dict[str, object]


class _Ping(Struct, tag="ping"):
    pass


class _BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: _Block


class _BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: _TextDelta | _ThinkingDelta | _SignatureDelta | _InputDelta


class _BlockStop(Struct, tag="content_block_stop"):
    index: int


class _Stop(Struct):
    stop_reason: str
    stop_sequence: str | None


class _MessageDelta(Struct, tag="message_delta"):
    delta: _Stop
    usage: Usage


class _MessageStop(Struct, tag="message_stop"):
    pass


_Event = _MessageStart | _Ping | _BlockStart | _BlockDelta | _BlockStop | _MessageDelta | _MessageStop
_encode = msgspec.json.Encoder().encode
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# Clients send a thinking block back only if it is signed. kvpin does not check it.
_SIGNATURE = "kvpin"
_BROKEN_OFF = "the engine broke off its answer"


def message_of(
    content: bytes,
    ident: str,
    model: str | None,
    *,
    prewarms: bool,
    marks: bool = False,
    tokens_per_block: int | None = None,
) -> dict[str, object]:
    """The message of a whole chat.

    Args:
        content: the chat's answer.
        ident: the message's id.
        model: the model's name, as it was asked; None: the engine's answer names it.
        prewarms: no answer is wanted, only the prompt's usage.
        marks: the request marks what is to be cached; without a mark, Anthropic counts nothing as written.
        tokens_per_block: the engine keeps full blocks; None where it does not tell.

    Raises:
        EngineFailed: the content is not that of a chat.
    """
    chat = read_chat(content)
    choice = next(iter(chat.choices), None)
    if choice is None or choice.message is None:
        raise EngineFailed("the engine's answer is not that of a chat")
    usage = _usage(chat.usage or ChatUsage(), tokens_per_block, marks=marks)
    blocks = _blocks(choice.message)
    if prewarms:
        blocks, usage.output_tokens = [], 0
    uses_tool = bool(choice.message.tool_calls)
    reason, sequence = _reason(choice.finish_reason, choice.stop_sequence, uses_tool=uses_tool)
    name = model or chat.model or ""
    return _fields(_Message(ident, "message", "assistant", name, blocks, reason, sequence, usage))


class MessageStream:
    """The events of one streamed message, from the chunks of a chat's stream."""

    def __init__(self, ident: str, model: str | None, *, prewarms: bool, marks: bool = False) -> None:
        """See `message_of`."""
        self._ident, self._model, self._prewarms, self._marks = ident, model, prewarms, marks
        self._started = self._failed = self._garbled = False
        self._kind = ""  # of the open block
        self._call: int | None = None  # index of the open block's call
        self._index = -1  # of the open block, or of the last one
        self._finish: str | None = None
        self._sequence: str | None = None
        self._usage = Usage()
        self._uses_tool = False

    def event(self, payload: bytes, predicted: Predicted) -> bytes:
        """The events that a chunk makes; `predicted`: for the first one, see Translation.

        Nothing follows what is no chunk, such as half an event of an engine that died, but an error.
        """
        try:
            chunk = read_chat(payload)
        except EngineFailed:
            self._garbled = True
            return b""
        if chunk.error:
            self._failed = True
            return _error(read_error(payload).message)
        if self._garbled:
            return b""
        events = [] if self._started else self._start(predicted, self._model or chunk.model or "")
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage, predicted.tokens_per_block, marks=self._marks)
        for choice in chunk.choices[:1]:
            if choice.delta is not None and not self._prewarms:
                events += self._said(choice.delta)
            if choice.finish_reason is not None:
                self._finish, self._sequence = choice.finish_reason, choice.stop_sequence
        return b"".join(map(_sent, events))

    def end(self) -> bytes:
        """The last events; an error if the stream broke off before its end."""
        if self._failed:
            return b""
        if self._finish is None or self._garbled:
            return _error(_BROKEN_OFF)
        if self._prewarms:
            self._usage.output_tokens = 0
        stop = _Stop(*_reason(self._finish, self._sequence, uses_tool=self._uses_tool))
        return b"".join(map(_sent, [*self._close(), _MessageDelta(stop, self._usage), _MessageStop()]))

    def _start(self, predicted: Predicted, model: str) -> list[_Event]:
        self._started = True
        cached = predicted.cached_tokens
        fresh = max((predicted.prompt_tokens or 0) - cached, 0)
        self._usage = Usage(fresh, cache_read_input_tokens=cached)
        message = _Message(self._ident, "message", "assistant", model, [], None, None, self._usage)
        return [_MessageStart(_fields(message)), _Ping()]

    def _said(self, delta: Said) -> list[_Event]:
        events: list[_Event] = []
        if delta.thoughts:
            events += self._open("thinking", _Thinking(""))
            events.append(_BlockDelta(self._index, _ThinkingDelta(delta.thoughts)))
        if delta.content:
            events += self._open("text", _Text(""))
            events.append(_BlockDelta(self._index, _TextDelta(delta.content)))
        for call in delta.tool_calls or ():
            if call.name and (index := call.index or 0) != self._call:
                self._uses_tool = True
                events += self._open("tool_use", _ToolUse(call.id or _call_id(), call.name, {}), index)
            if call.arguments and self._call is not None:
                events.append(_BlockDelta(self._index, _InputDelta(call.arguments)))
        return events

    def _open(self, kind: str, block: _Block, call: int | None = None) -> list[_Event]:
        """The events before a delta of this kind: none if such a block is open."""
        if kind == self._kind and call == self._call:
            return []
        events = self._close()
        self._kind, self._call, self._index = kind, call, self._index + 1
        return [*events, _BlockStart(self._index, block)]

    def _close(self) -> list[_Event]:
        if not self._kind:
            return []
        signed: Sequence[_Event] = ()
        if self._kind == "thinking":
            signed = (_BlockDelta(self._index, _SignatureDelta(_SIGNATURE)),)
        self._kind, self._call = "", None
        return [*signed, _BlockStop(self._index)]


def _fields(message: _Message) -> dict[str, Any]:
    return msgspec.structs.asdict(message)


def _blocks(said: Said) -> list[_Block]:
    blocks: list[_Block] = []
    if said.thoughts:
        blocks.append(_Thinking(said.thoughts, _SIGNATURE))
    if said.content:
        blocks.append(_Text(said.content))
    calls = said.tool_calls or ()
    blocks += [_ToolUse(call.id or _call_id(), call.name, _arguments(call.arguments)) for call in calls]
    return blocks


def _arguments(text: str) -> Mapping[str, object]:
    """The arguments of a tool call; {} if the text is no JSON object, for example because it was cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _call_id() -> str:
    """The id of a call that the engine gave none."""
    return f"toolu_{os.urandom(12).hex()}"


def _reason(finish: str | None, sequence: str | None, *, uses_tool: bool) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. Some engines end a call that was asked for with `stop`."""
    if finish == "stop" and sequence is not None:
        return "stop_sequence", sequence
    if finish == "stop" and uses_tool:
        return "tool_use", None
    return _REASONS.get(finish or "", "end_turn"), None


def _usage(usage: ChatUsage, tokens_per_block: int | None, *, marks: bool) -> Usage:
    read, created = usage.cached, usage.written(tokens_per_block) if marks else 0
    fresh = max(usage.prompt_tokens - read - created, 0)
    return Usage(fresh, created, read, usage.completion_tokens or 0)


def _error(message: str) -> bytes:
    return ANTHROPIC.error_event(ANTHROPIC.error(500, message, kind="server_error"))


def _sent(event: _Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encode(event))
