"""Anthropic's Messages API, `/v1/messages` and `/v1/messages/count_tokens`: the answers, from those of chats.

    reasoning                  a `thinking` block
    content                    a `text` block
    tool_calls                 a `tool_use` block each
    finish_reason              stop_reason
    usage                      input_tokens counts what was neither read from the cache nor written to it

A stream tells usage twice: in its first event what kvpin predicts, in its last what the engine reports.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter import JsonBody, read_error
from engine_adapter.causes import Code
from proxy.request.stages import Event
from proxy.request.translate.fates import STOPS
from proxy.request.translate.messages_request import MessageRequest, text_part
from proxy.request.translate.translation import (
    BROKEN_OFF,
    Chat,
    ChatUsage,
    Choice,
    Json,
    named_event,
    read_chat,
)
from proxy.request.translate.wording import ANTHROPIC

# Clients send a thinking block back only if it is signed. kvpin does not check it.
_SIGNATURE = "kvpin"
# The status of each error of kvpin: it decides the type of the error.
_STATUSES = {str(code): code.status for code in Code}


class MessageTranslation(MessageRequest):
    """`Translation` of `/v1/messages`, or with `counts` of `/v1/messages/count_tokens`."""

    def __init__(self, body: JsonBody, *, counts: bool = False) -> None:
        """Raises BadRequest for a request that cannot be served."""
        super().__init__(body, counts=counts)
        self._id = f"msg_{os.urandom(12).hex()}"
        self._kind = ""  # of the open block
        self._call: int | None = None  # index of the open block's call
        self._index = -1  # of the open block, or of the last one
        self._uses_tool = False
        self._sequence: str | None = None  # that ended it

    @override
    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    @override
    def whole(self, choice: Choice) -> bytes:
        said = self.said(choice)
        blocks = [_thinking(said.thoughts, _SIGNATURE)] if said.thoughts else []
        blocks += [text_part(said.content)] if said.content else []
        calls, self._sequence = said.tool_calls or (), choice.stop_sequence
        blocks += [_tool_use(call.id, call.name, _arguments(call.arguments)) for call in calls]
        self._uses_tool = bool(calls)
        return msgspec.json.encode(
            self._message(blocks, self._stop(), self._counted(self.usage or ChatUsage()))
        )

    @override
    def first(self) -> Iterable[Event]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, self._foreseen())
        return _told({"type": "message_start", "message": message}, {"type": "ping"})

    @override
    def more(self, chunk: Chat, choice: Choice) -> Iterable[Event]:
        if choice.finish_reason:
            self._sequence = choice.stop_sequence
        said = self.said(choice)
        events: list[Json] = []
        if said.thoughts:
            events += self._open(_thinking("", ""))
            events.append(self._delta("thinking_delta", thinking=said.thoughts))
        if said.content:
            events += self._open(text_part(""))
            events.append(self._delta("text_delta", text=said.content))
        for call in said.tool_calls or ():
            if call.name and (index := call.index or 0) != self._call:
                self._uses_tool = True
                events += self._open(_tool_use(call.id, call.name, {}), index)
            if call.arguments and self._call is not None:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return _told(*events)

    @override
    def failure(self, event: Event | None) -> Iterable[Event]:
        status, message, request_id = 500, BROKEN_OFF, None
        if event is not None:
            error = read_error(event.data)
            status, message = _STATUSES.get(str(error.code), status), error.message
            request_id = event.read(read_chat).request_id
        error_of = ANTHROPIC.error(status, message, kind="server_error", request_id=request_id)
        return (Event(ANTHROPIC.error_event(error_of)),)

    @override
    def last(self) -> Iterable[Event]:
        usage = self._foreseen() if self.usage is None else self._counted(self.usage)
        delta = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        return _told(*self._close(), delta, {"type": "message_stop"})

    def _message(self, blocks: list[Json], stop: Json, usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model or ""}
        return {**head, "content": blocks, **stop, "usage": usage}

    def _open(self, block: Json, call: int | None = None) -> list[Json]:
        """The events before a delta of such a block: none if one is open."""
        if block["type"] == self._kind and call == self._call:
            return []
        events = self._close()
        self._kind, self._call, self._index = block["type"], call, self._index + 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, **added: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **added}}

    def _close(self) -> list[Json]:
        if not self._kind:
            return []
        signed = [self._delta("signature_delta", signature=_SIGNATURE)] if self._kind == "thinking" else []
        self._kind, self._call = "", None
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _stop(self) -> Json:
        """Why the answer ended. Some engines end a call that was asked for with `stop`."""
        if self.finish == "stop" and self._sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._sequence}
        finish = "tool_calls" if self.finish == "stop" and self._uses_tool else self.finish or "stop"
        return {"stop_reason": STOPS.get(finish, STOPS["stop"]).of_message, "stop_sequence": None}

    def _foreseen(self) -> Json:
        """The usage before the engine reports it."""
        cached = self.predicted.cached_tokens
        return _counts(max((self.predicted.prompt_tokens or 0) - cached, 0), 0, cached, 0)

    def _counted(self, usage: ChatUsage) -> Json:
        read = usage.cached
        # Without a mark of what is to be cached, Anthropic counts nothing as written.
        written = usage.written(self.predicted.tokens_per_block) if self.marks_cache else 0
        fresh = max(usage.prompt_tokens - read - written, 0)
        return _counts(fresh, written, read, 0 if self.prewarms else usage.completion_tokens or 0)


def _counts(fresh: int, written: int, read: int, output: int) -> Json:
    """A usage: its first three counts together are the prompt's."""
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": output,
    }


def _told(*events: Json) -> Iterable[Event]:
    return map(named_event, events)


def _thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call_id: str | None, name: str, arguments: dict[str, Any]) -> Json:
    """A call. One that the engine gave no id gets one."""
    ident = call_id or f"toolu_{os.urandom(12).hex()}"
    return {"type": "tool_use", "id": ident, "name": name, "input": arguments}


def _arguments(text: str) -> dict[str, msgspec.Raw]:
    """The arguments of a tool call; {} if the text is no JSON object, for example because it was cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
