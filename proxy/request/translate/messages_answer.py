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
from typing import Any

import msgspec

from engine_adapter import read_error
from engine_adapter.codes import Code
from proxy.errors import EngineFailed
from proxy.request.dialects import ANTHROPIC
from proxy.request.translate.chats import ChatMessage, ChatUsage, read_chat
from proxy.request.translate.translation import Predicted

_Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# Clients send a thinking block back only if it is signed. kvpin does not check it.
_SIGNATURE = "kvpin"
_BROKEN_OFF = "the engine broke off its answer"
# The status of each error of kvpin: it decides the type of the error.
_STATUSES = {str(code): code.status for code in Code}


class MessageAnswer:
    """The answer to one request, whole or as the events of a stream."""

    def __init__(self, model: str | None, *, prewarms: bool, marks: bool = False) -> None:
        """Args:
        model: the model's name, as it was asked; None: the engine's answer names it.
        prewarms: no answer is wanted, only the prompt's usage.
        marks: the request marks what is to be cached; without a mark, Anthropic counts nothing as written.
        """
        self._id = f"msg_{os.urandom(12).hex()}"
        self._model, self._prewarms, self._marks = model, prewarms, marks
        self.predicted = Predicted()
        self._started = self._failed = self._garbled = self._uses_tool = False
        self._kind = ""  # of the open block
        self._call: int | None = None  # index of the open block's call
        self._index = -1  # of the open block, or of the last one
        self._finish: str | None = None
        self._sequence: str | None = None
        self._usage = _counts(0, 0, 0, 0)

    def answer(self, content: bytes) -> bytes:
        """The message of a whole chat. Raises EngineFailed if the content is not that of a chat."""
        chat = read_chat(content)
        choice = next(iter(chat.choices), None)
        if choice is None or choice.message is None:
            raise EngineFailed("the engine's answer is not that of a chat")
        self._usage = self._counted(chat.usage or ChatUsage())
        self._finish, self._sequence = choice.finish_reason, choice.stop_sequence
        self._uses_tool = bool(choice.message.tool_calls)
        blocks = [] if self._prewarms else _blocks(choice.message)
        return _encode(self._message(chat.model, blocks, self._stop()))

    def event(self, payload: bytes) -> bytes:
        """The events that a chunk makes.

        Nothing follows what is no chunk, such as half an event of an engine that died, but an error.
        """
        try:
            chunk = read_chat(payload)
        except EngineFailed:
            self._garbled = True
            return b""
        if chunk.error:
            self._failed = True
            error = read_error(payload)
            return _error(error.message, chunk.request_id, status=_STATUSES.get(str(error.code), 500))
        if self._garbled:
            return b""
        events = [] if self._started else self._start(chunk.model)
        if chunk.usage is not None:
            self._usage = self._counted(chunk.usage)
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
        last = {"type": "message_delta", "delta": self._stop(), "usage": self._usage}
        return b"".join(map(_sent, [*self._close(), last, {"type": "message_stop"}]))

    def _start(self, model: str | None) -> list[_Json]:
        self._started = True
        cached = self.predicted.cached_tokens
        self._usage = _counts(max((self.predicted.prompt_tokens or 0) - cached, 0), 0, cached, 0)
        message = self._message(model, [], {"stop_reason": None, "stop_sequence": None})
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _message(self, model: str | None, blocks: list[_Json], stop: _Json) -> _Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model or model or "",
            "content": blocks,
            **stop,
            "usage": self._usage,
        }

    def _said(self, delta: ChatMessage) -> list[_Json]:
        events: list[_Json] = []
        if delta.thoughts:
            events += self._open(_thinking("", ""))
            events.append(self._delta("thinking_delta", thinking=delta.thoughts))
        if delta.content:
            events += self._open(_text(""))
            events.append(self._delta("text_delta", text=delta.content))
        for call in delta.tool_calls or ():
            if call.name and (index := call.index or 0) != self._call:
                self._uses_tool = True
                events += self._open(_tool_use(call.id, call.name, {}), index)
            if call.arguments and self._call is not None:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def _open(self, block: _Json, call: int | None = None) -> list[_Json]:
        """The events before a delta of such a block: none if one is open."""
        if block["type"] == self._kind and call == self._call:
            return []
        events = self._close()
        self._kind, self._call, self._index = block["type"], call, self._index + 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, **added: str) -> _Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **added}}

    def _close(self) -> list[_Json]:
        if not self._kind:
            return []
        signed = [self._delta("signature_delta", signature=_SIGNATURE)] if self._kind == "thinking" else []
        self._kind, self._call = "", None
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _stop(self) -> _Json:
        """Why the answer ended. Some engines end a call that was asked for with `stop`."""
        if self._finish == "stop" and self._sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._sequence}
        ended_by_call = self._finish == "stop" and self._uses_tool
        reason = "tool_use" if ended_by_call else _REASONS.get(self._finish or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _counted(self, usage: ChatUsage) -> _Json:
        read = usage.cached
        written = usage.written(self.predicted.tokens_per_block) if self._marks else 0
        fresh = max(usage.prompt_tokens - read - written, 0)
        return _counts(fresh, written, read, 0 if self._prewarms else usage.completion_tokens or 0)


def _counts(fresh: int, written: int, read: int, output: int) -> _Json:
    """A usage: its first three counts together are the prompt's."""
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": output,
    }


def _blocks(said: ChatMessage) -> list[_Json]:
    blocks = [_thinking(said.thoughts, _SIGNATURE)] if said.thoughts else []
    blocks += [_text(said.content)] if said.content else []
    calls = said.tool_calls or ()
    return blocks + [_tool_use(call.id, call.name, _arguments(call.arguments)) for call in calls]


def _thinking(text: str, signature: str) -> _Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _text(text: str) -> _Json:
    return {"type": "text", "text": text}


def _tool_use(call_id: str | None, name: str, arguments: dict[str, msgspec.Raw]) -> _Json:
    """A call. One that the engine gave no id gets one."""
    ident = call_id or f"toolu_{os.urandom(12).hex()}"
    return {"type": "tool_use", "id": ident, "name": name, "input": arguments}


def _arguments(text: str) -> dict[str, msgspec.Raw]:
    """The arguments of a tool call; {} if the text is no JSON object, for example because it was cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _error(message: str, request_id: str | None = None, *, status: int = 500) -> bytes:
    return ANTHROPIC.error_event(ANTHROPIC.error(status, message, kind="server_error", request_id=request_id))


def _sent(event: _Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
