"""The items and events of a response, from the chunks of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Raw

from proxy.request.translate.chats import ChatMessage, ToolCall
from proxy.request.translate.responses_items import custom_input, sealed

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
    """The items of a response, which grow chunk by chunk.

    Attributes:
        items: those that are complete, in order.
    """

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
