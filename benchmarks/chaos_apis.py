"""The APIs that the clients of `chaos.py` speak: their requests, answers and streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

_Fields = dict[str, Any]


@dataclass(slots=True)
class Read:
    """An answer as it came.

    Attributes:
        whole: the body of an answer that is no stream.
        texts: the text of a stream, piece by piece.
        finishes: the reason of each end that was told.
        tokens: each count of generated tokens that was told.
        ids: ids and models that its events named.
        events: number of events.
        told_text: the whole text, where an end repeats it.
        is_done: its end mark came.
        has_left: the client left.
        problem: the error of the connection, if it broke.
        odd: an event that is no JSON.
        error: the message of its error event.
    """

    whole: bytes | None = None
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ids: set[tuple[str, str]] = field(default_factory=set)
    events: int = 0
    told_text: str | None = None
    is_done: bool = False
    has_left: bool = False
    problem: str = ""
    odd: bytes = b""
    error: str = ""

    @property
    def text(self) -> str:
        """The text of the stream."""
        return "".join(self.texts)

    @property
    def flaw(self) -> str:
        """The fault in the form of a complete stream, "" if there is none."""
        if self.odd:
            return f"an event that is no JSON: {self.odd[:80]!r}"
        counts = (len(self.finishes), len(self.tokens), len(self.ids))
        if counts != (1, 1, 1):
            return "{} ends, {} usages, {} ids".format(*counts)
        if self.told_text not in (None, self.text):
            return "its end repeats another text"
        return f"an error event: {self.error}" if self.error else ""

    def take(self, event: bytes, api: Api) -> None:
        """Notes one event of a stream."""
        data = [line.removeprefix(b"data:") for line in event.split(b"\n") if line.startswith(b"data:")]
        if not data:
            return
        if self.is_done:
            self.odd = self.odd or b"after the end: " + event
        if data == [b" [DONE]"]:
            self.is_done = True
            return
        try:
            fields = msgspec.json.decode(b"\n".join(data))
        except msgspec.DecodeError:
            self.odd = self.odd or event
            return
        self.events += 1
        if fields.get("error") is not None:
            self.error = fields["error"]["message"]
        elif fields.get("type") == "error":  # of /v1/responses
            self.error = fields["message"]
        else:
            api.note(fields, self)


@dataclass(frozen=True, slots=True)
class Api:
    """An API.

    Attributes:
        path: its route.
        body: makes a request from a chat's messages and the longest answer.
        note: reads an event of a stream.
        said: text, reason of the end, and generated tokens of a whole answer.
    """

    path: str
    body: Callable[[list[dict[str, str]], int], _Fields]
    note: Callable[[_Fields, Read], None]
    said: Callable[[_Fields], tuple[str, str, int]]


# --- /v1/chat/completions ---------------------------------------------------------------------------------


def _chat_body(messages: list[dict[str, str]], count: int) -> _Fields:
    return {"messages": messages, "max_tokens": count, "ignore_eos": True}


def _chat_event(chunk: _Fields, read: Read) -> None:
    read.ids.add((chunk["id"], chunk["model"]))
    if chunk.get("usage"):
        read.tokens.append(chunk["usage"]["completion_tokens"])
    for choice in chunk["choices"]:
        read.texts.append(choice["delta"].get("content") or "")
        if choice.get("finish_reason"):
            read.finishes.append(choice["finish_reason"])


def _chat_answer(answer: _Fields) -> tuple[str, str, int]:
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


# --- /v1/messages -----------------------------------------------------------------------------------------

_STOP_REASONS = {"end_turn": "stop", "max_tokens": "length"}


def _messages_body(messages: list[dict[str, str]], count: int) -> _Fields:
    system, *rest = messages
    return {"system": system["content"], "messages": rest, "max_tokens": count}


def _messages_event(event: _Fields, read: Read) -> None:
    match event["type"]:
        case "message_start":
            read.ids.add((event["message"]["id"], event["message"]["model"]))
        case "content_block_delta":
            read.texts.append(event["delta"]["text"])
        case "message_delta":
            read.finishes.append(_STOP_REASONS[event["delta"]["stop_reason"]])
            read.tokens.append(event["usage"]["output_tokens"])
        case "message_stop":
            read.is_done = True


def _messages_answer(answer: _Fields) -> tuple[str, str, int]:
    text = "".join(block["text"] for block in answer["content"])
    return text, _STOP_REASONS[answer["stop_reason"]], answer["usage"]["output_tokens"]


# --- /v1/responses ----------------------------------------------------------------------------------------

_STATUSES = {"completed": "stop", "incomplete": "length"}


def _responses_body(messages: list[dict[str, str]], count: int) -> _Fields:
    system, *rest = messages
    return {"instructions": system["content"], "input": rest, "max_output_tokens": count, "store": False}


def _responses_event(event: _Fields, read: Read) -> None:
    match event["type"]:
        case "response.output_text.delta":
            read.texts.append(event["delta"])
        case "response.created":
            read.ids.add((event["response"]["id"], event["response"]["model"]))
        case "response.completed" | "response.incomplete":
            read.told_text, finish, tokens = _responses_answer(event["response"])
            read.finishes.append(finish)
            read.tokens.append(tokens)
            read.ids.add((event["response"]["id"], event["response"]["model"]))
            read.is_done = True


def _responses_answer(answer: _Fields) -> tuple[str, str, int]:
    parts = [part for item in answer["output"] for part in item["content"]]
    text = "".join(part["text"] for part in parts)
    return text, _STATUSES[answer["status"]], answer["usage"]["output_tokens"]


CHAT = Api("/v1/chat/completions", _chat_body, _chat_event, _chat_answer)
APIS: Mapping[str, Api] = {
    "chat": CHAT,
    "messages": Api("/v1/messages", _messages_body, _messages_event, _messages_answer),
    "responses": Api("/v1/responses", _responses_body, _responses_event, _responses_answer),
}
