"""OpenAI's Responses API, `/v1/responses` and `/v1/responses/input_tokens`: answers, from those of chats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any

import msgspec
from msgspec import UNSET, Raw
from typing_extensions import override

from engine_adapter import JsonBody
from proxy.request.stages import Event
from proxy.request.translate.fates import STOPS
from proxy.request.translate.responses_items import custom_input, sealed
from proxy.request.translate.responses_request import ResponseRequest
from proxy.request.translate.responses_store import ResponseStore
from proxy.request.translate.translation import (
    BROKEN_OFF,
    Chat,
    ChatMessage,
    ChatUsage,
    Choice,
    Error,
    Json,
    ToolCall,
    named_event,
    read_chat,
)

# --- the items and events of a response -----------------------------------------------------------------

Item = dict[str, Any]
# The type of an event, and its fields beside its number in the stream.
ItemEvent = tuple[str, dict[str, Any]]


class _Part:
    """The one part of a message or of reasoning, while it is written."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.id = f"{'rs' if kind == 'reasoning_text' else 'msg'}_{secrets.token_hex(16)}"
        self.pieces: list[str] = []
        self.logprobs: list[Raw] = []

    def item(self, status: str, *, seals: bool = False) -> Item:
        known = {"id": self.id, "status": status, "content": [self._part()] if self.pieces else []}
        if self.kind != "reasoning_text":
            return {"type": "message", **known, "role": "assistant"}
        secret = sealed("".join(self.pieces)) if seals else None
        return {"type": "reasoning", **known, "summary": [], "encrypted_content": secret}

    def _part(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind == "output_text":
            return {"type": self.kind, "text": text, "annotations": [], "logprobs": self.logprobs}
        return {"type": self.kind, "refusal" if self.kind == "refusal" else "text": text}

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {"item": self.item("in_progress")}
        yield "response.content_part.added", {"item_id": self.id, "content_index": 0, "part": self._part()}

    def add(self, text: str, logprobs: list[Raw]) -> Iterator[ItemEvent]:
        self.pieces.append(text)
        self.logprobs += logprobs
        known = {"logprobs": logprobs} if self.kind == "output_text" else {}
        yield (
            f"response.{self.kind}.delta",
            {"item_id": self.id, "content_index": 0, "delta": text, **known},
        )

    def end(self, item: Item) -> Iterator[ItemEvent]:
        at, part = {"item_id": self.id, "content_index": 0}, self._part()
        whole = {name: value for name, value in part.items() if name not in ("type", "annotations")}
        yield f"response.{self.kind}.done", {**at, **whole}
        yield "response.content_part.done", {**at, "part": part}
        yield "response.output_item.done", {"item": item}


class _CallItem:
    """A call, while it is written."""

    def __init__(self, call: ToolCall, tools: Mapping[str, Any]) -> None:
        self.name = call.name
        self.call_id = call.id or f"call_{secrets.token_hex(12)}"
        self._tools = tools
        self.is_custom = tools.get(self.name, {}).get("type") == "custom"
        self.id = f"{'ctc' if self.is_custom else 'fc'}_{secrets.token_hex(16)}"
        self.pieces: list[str] = []

    @property
    def _named(self) -> dict[str, str]:
        """The tool's own name, and its namespace if it is in one."""
        tool = self._tools.get(self.name, {})
        space = {"namespace": tool["namespace"]} if "namespace" in tool else {}
        return {"name": tool.get("name", self.name), **space}

    def item(self, status: str, *, seals: bool = False) -> Item:  # noqa: ARG002 - reasoning is
        given = "".join(self.pieces)
        known = {"id": self.id, "status": status, "call_id": self.call_id, **self._named}
        if self.is_custom:
            return {"type": "custom_tool_call", **known, "input": custom_input(given) if given else ""}
        return {"type": "function_call", **known, "arguments": given}

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {"item": self.item("in_progress")}

    def add(self, text: str, logprobs: list[Raw]) -> Iterator[ItemEvent]:  # noqa: ARG002 - text has them
        self.pieces.append(text)
        if not self.is_custom:  # its input is known when it is complete
            yield "response.function_call_arguments.delta", {"item_id": self.id, "delta": text}

    def end(self, item: Item) -> Iterator[ItemEvent]:
        if self.is_custom:
            yield "response.custom_tool_call_input.delta", {"item_id": self.id, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {"item_id": self.id, "input": item["input"]}
        else:
            done = {"item_id": self.id, "name": self._named["name"], "arguments": "".join(self.pieces)}
            yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"item": item}


class Output:
    """The items of a response, which grow chunk by chunk. `items`: those that are complete, in order."""

    def __init__(self, tools: Mapping[str, Any], *, seals: bool) -> None:
        """`tools`: the client's tools, by the names of their functions. `seals`: reasoning is also given
        as `encrypted_content`."""
        self._tools, self._seals = tools, seals
        self._open: dict[str | int, tuple[int, _Part | _CallItem]] = {}
        self._done: dict[int, Item] = {}
        self._n_thought = self._n_written = 0  # characters

    @property
    def thoughts(self) -> float:
        """The share of reasoning in its text."""
        return self._n_thought / (self._n_thought + self._n_written or 1)

    @property
    def items(self) -> list[Item]:
        """The items that are complete, in order."""
        return [item for _, item in sorted(self._done.items(), key=lambda pair: pair[0])]

    def add(self, delta: ChatMessage, logprobs: list[Raw]) -> Iterator[ItemEvent]:
        """Takes what a chunk adds, and gives the events that say so."""
        if thought := delta.thoughts:
            yield from self._write("reasoning_text", thought, [])
        if delta.content:
            yield from self._write("output_text", delta.content, logprobs)
        if delta.refusal:
            yield from self._write("refusal", delta.refusal, [])
        for at, call in enumerate(delta.tool_calls or ()):
            yield from self._call(at if call.index is None else call.index, call)

    def end(self, status: str) -> Iterator[ItemEvent]:
        """No chunk follows: completes the items that are not complete."""
        for key in list(self._open):
            yield from self._end(key, status)

    def _write(self, kind: str, text: str, logprobs: list[Raw]) -> Iterator[ItemEvent]:
        if kind == "reasoning_text":
            self._n_thought += len(text)
        else:
            self._n_written += len(text)
        if kind not in self._open:
            yield from self._end_text()
            yield from self._begin(kind, _Part(kind))
        yield from self._at(kind, self._open[kind][1].add(text, logprobs))

    def _call(self, index: int, call: ToolCall) -> Iterator[ItemEvent]:
        if index not in self._open:
            yield from self._end_text()
            yield from self._begin(index, _CallItem(call, self._tools))
        item = self._open[index][1]
        if isinstance(item, _CallItem):
            item.name = call.name or item.name  # it may grow
        self._n_written += len(call.name) + len(call.arguments)
        if call.arguments:
            yield from self._at(index, item.add(call.arguments, []))

    def _begin(self, key: str | int, item: _Part | _CallItem) -> Iterator[ItemEvent]:
        self._open[key] = len(self._open) + len(self._done), item
        yield from self._at(key, item.begin())

    def _end_text(self) -> Iterator[ItemEvent]:
        """Something else begins: a message or reasoning is complete. Calls may be written side by side."""
        for key in [key for key in self._open if isinstance(key, str)]:
            yield from self._end(key, "completed")

    def _end(self, key: str | int, status: str) -> Iterator[ItemEvent]:
        index, made = self._open[key]
        item = self._done[index] = made.item(status, seals=self._seals)
        yield from self._at(key, made.end(item))
        del self._open[key]

    def _at(self, key: str | int, events: Iterator[ItemEvent]) -> Iterator[ItemEvent]:
        index = self._open[key][0]
        for kind, fields in events:
            yield kind, {"output_index": index, **fields}


# --- responses ------------------------------------------------------------------------------------------

RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"


class ResponseTranslation(ResponseRequest):
    """`Translation` of one request for a response."""

    def __init__(
        self, body: JsonBody, tenant: str | None, *, store: ResponseStore, counts: bool = False
    ) -> None:
        """Raises BadRequest or NotFound for a request that cannot be served."""
        self._id = f"resp_{secrets.token_hex(24)}"
        super().__init__(body, store.of(tenant), self._id)
        self.counts, self._created_at = counts, int(time.time())
        self._store, self._tenant = store, tenant
        self._output = Output(self.tools, seals=self.seals)
        self._number = 0  # of the next event
        self._timings: dict[str, msgspec.Raw] = {}  # llama-server's, which its own events have, too

    @override
    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    @override
    def whole(self, choice: Choice) -> bytes:
        list(self._items_of(choice))  # the items are all that is wanted
        list(self._output.end(self._status))
        return self._final()

    @override
    def first(self) -> Iterable[Event]:
        begun = {"response": self._response("in_progress", [])}
        return self._told((f"response.{kind}", begun) for kind in ("created", "in_progress"))

    @override
    def more(self, chunk: Chat, choice: Choice) -> Iterable[Event]:
        events: list[Event] = []
        if chunk.prompt_progress is not UNSET:
            fields = {"response": self._response("in_progress", []), "prompt_progress": chunk.prompt_progress}
            events += self._told([("response.in_progress", fields)])
        if chunk.timings is not UNSET:
            self._timings = {"timings": chunk.timings}
        events += self._told(self._items_of(choice), self._timings)
        return events

    @override
    def failure(self, event: Event | None) -> Iterable[Event]:
        error = event.read(read_chat).error if event is not None else None
        if not isinstance(error, Error):
            error = Error(error or BROKEN_OFF)
        code = error.code if isinstance(error.code, str) else "server_error"
        told = ("error", {"code": code, "message": error.message, "param": error.param})
        return [*(self._first() if event is not None else ()), *self._told([told])]

    @override
    def last(self) -> Iterable[Event]:
        status = self._status
        yield from self._told(self._output.end(status))
        final = {"response": msgspec.Raw(self._final())}
        yield from self._told([(f"response.{status}", final)], self._timings)

    @property
    def _incomplete(self) -> str | None:
        """Why it is not complete."""
        stop = STOPS.get(self.finish or "")
        return stop.of_response if stop is not None and not self.prewarms else None

    @property
    def _status(self) -> str:
        return "completed" if self._incomplete is None else "incomplete"

    def _items_of(self, choice: Choice) -> Iterable[ItemEvent]:
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        return self._output.add(self.said(choice), logprobs or [])

    def _told(self, events: Iterable[ItemEvent], beside: Json = {}) -> Iterable[Event]:  # noqa: B006 - read
        """These events, numbered. `beside`: fields of each."""
        for kind, fields in events:
            yield named_event({"type": kind, "sequence_number": self._number, **fields, **beside})
            self._number += 1

    def _final(self) -> bytes:
        """The response, which is kept if the client wants that."""
        items, turn = self._output.items, self.turn
        content = msgspec.json.encode(self._response(self._status, items))
        if turn is not None:
            turn.answered = {item["id"]: msgspec.json.encode(item) for item in items}
            self._store.of(self._tenant).put(self._id, content, turn)
        return content

    def _response(self, status: str, items: list[Item]) -> Json:
        is_over = status != "in_progress"
        reason = self._incomplete if is_over else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if is_over else None,
            "status": status,
            "model": self.model,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self.repeated,
            "output": items,
            "usage": self._counted(self.usage or ChatUsage()) if is_over else None,
        }

    def _counted(self, usage: ChatUsage) -> Json:
        """The usage of an engine that keeps full blocks. Where it counts no reasoning, the share of reasoning
        in the text is that of the tokens."""
        written, is_long = usage.written(self.predicted.tokens_per_block), self.ttl == "12h"
        generated = 0 if self.prewarms else usage.completion_tokens or 0
        reasoning = min(usage.reasoning or ceil(self._output.thoughts * generated), generated)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": written,
                "cache_write_tokens_details": {
                    "ttl_30m_tokens": 0 if is_long else written,
                    "ttl_12h_tokens": written if is_long else 0,
                },
            },
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + generated,
        }
