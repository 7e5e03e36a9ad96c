"""Items of OpenAI's Responses API: messages of a chat are made of them, and they of the chunks of a chat.

The same item always becomes the same bytes, so that a next turn finds the KV of the turn before it, whether
it sends the conversation again or names the response. The assistant's items of one turn (reasoning, text,
calls) become one message.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from proxy.errors import BadRequest
from proxy.request.translate.fates import RESPONSE_ITEMS, TOLD, Fate, text_of
from proxy.request.translate.translation import ChatMessage, Json, ToolCall
from proxy.request.translate.wording import Place

# Prefix of reasoning that kvpin wrote as `encrypted_content`. It is the client's own answer and no secret.
_REASONING = "kvpin."
_ENCRYPTED = "gAAAA"  # what OpenAI encrypts begins so
# The argument of the function that stands for a custom tool.
CUSTOM_ARGUMENT = "input"
_ROLES = ("user", "assistant", "system", "developer")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_AUDIO = re.compile(r"data:audio/(?:x-)?(\w+)(?:;[^,;]*)*;base64,")  # Codex's audio_url
_AUDIO_HEAD = 256  # the most characters that are searched for it: each repetition takes memory
_SAID = frozenset({"output_text", "input_text", "text"})


class Messages:
    """A chat that grows item by item.

    Attributes:
        all: its messages.
        places: of the items that they are made of; the assistant's several items have that of the first.
    """

    def __init__(self, instructions: str | None) -> None:
        """`instructions` become the system message, which comes first."""
        self.all: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
        self.places = [Place("instructions", "instructions")] * len(self.all)
        self._told: Json | None = None  # the assistant's message that begins with what a service did
        # The number of a message of the assistant's → its text, which may have thousands of pieces.
        self._texts: dict[int, list[str]] = {}
        # Images of tools' results, and their places: tools' messages have only text.
        self._shown: list[Json] = []
        self._shown_at: list[str] = []

    def add(self, item: Json, param: str) -> None:
        """Adds an item; `param` is its place in the request. Raises BadRequest: it cannot be served."""
        if item.get("type") not in _RESULTS:
            self._show()
        row = RESPONSE_ITEMS.get(str(item.get("type")))
        if row is None or row.fate not in TOLD:
            self._add(item, param)
        elif row.fate is Fate.TEXT and (text := text_of(item)):
            self._told = self._turn()
            self._write(f"\n{text}\n")
        if len(self.places) < len(self.all):
            self.places.append(_place(item, self.all[-1].get("content"), param))

    def finish(self) -> None:
        """No item follows."""
        self._show()
        for number, pieces in self._texts.items():
            self.all[number]["content"] = "".join(pieces)

    def _write(self, text: str) -> None:
        """Adds to the text of the last message."""
        self._texts.setdefault(len(self.all) - 1, []).append(text)
        self.all[-1]["content"] = self.all[-1]["content"] or text

    def _show(self) -> None:
        """No result follows: the images of tools' results become a message of the user. The user's next item
        stays apart, so that this message is the same in the next turn."""
        if self._shown:
            self.all.append({"role": "user", "content": self._shown})
            at = self._shown_at
            self.places.append(Place(at[0], at[0], at))
            self._shown, self._shown_at = [], []

    def _add(self, item: Json, param: str) -> None:
        match item:
            case {"role": "user" | "system" | "developer" as role, "content": str() | list() as content}:
                self.all.append({"role": role, "content": _asked(content, f"{param}.content")})
            case {"role": "assistant", "content": str() | list() as content}:
                text = _said(content, f"{param}.content")
                joins = self._told is not None and self._told is self.all[-1]
                self._turn(*(() if joins else ("content",)))
                self._write(text)
                self._told = None
            case {"type": "function_call", "call_id": str(call_id), "name": str(), "arguments": str(given)}:
                self._call(call_id, flat_name(item), given)
            case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(), "input": str(given)}:
                self._call(call_id, flat_name(item), msgspec.json.encode({CUSTOM_ARGUMENT: given}).decode())
            case {
                "type": "function_call_output" | "custom_tool_call_output",
                "call_id": str(call_id),
                "output": str() | list() as output,
            }:
                text = self._result(output, f"{param}.output")
                self.all.append({"role": "tool", "content": text, "tool_call_id": call_id})
            case {"type": "agent_message", "content": list() as content}:
                if text := "\n".join(filter(None, map(_of_agent, content))):
                    self.all.append({"role": "user", "content": text})
            case {"type": "reasoning"}:
                if text := thought(item):
                    self._turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case _:
                raise _unknown(item, param)

    def _result(self, output: str | list[Any], param: str) -> str:
        """The text of a tool's result; its images follow in a message of the user."""
        content = _asked(output, param)
        if isinstance(content, str):
            return content
        for index, part in enumerate(content):
            if part["type"] != "text":
                self._shown.append(part)
                self._shown_at.append(f"{param}[{index}]")
        return "\n".join(part["text"] for part in content if part["type"] == "text")

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *taken: str) -> Json:
        """The assistant's message that is being made; a new one if it has one of these fields already."""
        last = self.all[-1] if self.all else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in taken):
            self.all.append({"role": "assistant", "content": None})
        return self.all[-1]


def _unknown(item: Json, param: str) -> BadRequest:
    match item:
        case {"role": str(role), "content": str() | list()} if role not in _ROLES:
            return BadRequest(
                f"{param}.role is {role!r}; it can be {', '.join(_ROLES)}", param=f"{param}.role"
            )
        case {"type": str(kind)}:
            why = f"an item of type {kind!r} with these fields cannot be served"
            why = why if kind in RESPONSE_ITEMS else f"items of type {kind!r} are unknown"
        case _:
            why = "this is no item: it has neither a role with a content nor a type"
    return BadRequest(f"{param}: {why}", param=param)


def flat_name(named: Json) -> str:
    """The function's name of a tool or a call that may be in a namespace."""
    name, space = str(named["name"]), named.get("namespace")
    return f"{space.removesuffix('__')}__{name}" if isinstance(space, str) and space else name


def _place(item: Json, content: str | Sequence[Json] | None, param: str) -> Place:
    """The place of an item that became a message with this content. Of what an earlier response holds, only
    that response has a place."""
    if "[" not in param:
        return Place(param, param)
    own = f"{param}.{'output' if 'output' in item else 'content'}"
    parts = [f"{own}[{index}]" for index in range(len(content))] if isinstance(content, list) else ()
    return Place(param, own, parts)


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments of the function that stands for it. A model may write
    other arguments: these are then the input."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])[CUSTOM_ARGUMENT]
    except (msgspec.DecodeError, KeyError):
        return arguments


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send back nothing else of it."""
    return _REASONING + base64.b64encode(text.encode()).decode()


def listed(item: Json, item_id: str) -> Json:
    """An item of a request as the API lists it: with its id, its status, and parts instead of a text."""
    full = {**item, "id": item_id, "status": item.get("status") or "completed"}
    if "role" in item and item.get("type") in (None, "message"):
        full["type"] = "message"
        if isinstance(content := item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            full["content"] = [{"type": kind, "text": content}]
            if kind == "output_text":
                full["content"][0]["annotations"] = []
    return full


def _asked(content: str | list[Any], param: str) -> str | list[Json]:
    """The content of a message that is not the assistant's. One text is a text, also as a part."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{param}[{index}]") for index, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _part(part: Any, param: str) -> Json:  # noqa: ANN401 - JSON
    match part:
        case {"type": "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            image = {"url": url}
            if (detail := part.get("detail")) not in (None, "auto"):
                image["detail"] = detail
            named = {"uuid": part["uuid"]} if "uuid" in part else {}
            return {"type": "image_url", "image_url": image, **named}
        case {"type": "input_audio", "input_audio": dict(audio)}:
            return {"type": "input_audio", "input_audio": audio}
        case {"type": "input_audio", "audio_url": str(url)} if found := _AUDIO.match(url, 0, _AUDIO_HEAD):
            form = {"mpeg": "mp3"}.get(found[1], found[1])
            return {"type": "input_audio", "input_audio": {"data": url[found.end() :], "format": form}}
        case {"type": "input_image"}:
            raise BadRequest(f"{param}: images are served by image_url, not by file_id", param=param)
        case {"type": "input_file"}:
            raise BadRequest(f"{param}: files are not served; send their text as input_text", param=param)
        case _:
            kinds = "input_text, input_image, or input_audio with data and format or a data URL"
            raise BadRequest(f"{param} is no part: it must be {kinds}", param=param)


def _said(content: str | Sequence[Any], param: str) -> str:
    """The assistant's words, as one text."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _SAID:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                at = f"{param}[{index}]"
                raise BadRequest(f"{at} is no part of an answer: it must be output_text or refusal", param=at)
    return "".join(texts)


def _of_agent(part: Any) -> str:  # noqa: ANN401 - JSON
    """What a part of an agent's message says. Codex names even a plain text encrypted."""
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return text
        case {"type": "encrypted_content", "encrypted_content": str(text)} if not text.startswith(_ENCRYPTED):
            return text
        case _:
            return ""


def hidden_parts(item: Json) -> list[str]:
    """The types of an agent's message's parts that cannot be read."""
    match item:
        case {"type": "agent_message", "content": list() as content}:
            hidden = [part for part in content if isinstance(part, dict) and not _of_agent(part)]
            return [str(part.get("type")) for part in hidden if part.get("text") != ""]
        case _:
            return []


def thought(item: Json) -> str:
    """The text of a reasoning item; empty for one of another server, or of which only a summary is left."""
    match item:
        case {"content": [*parts]} if parts:
            return "".join(
                part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        case {"encrypted_content": str(content)} if content.startswith(_REASONING):
            try:
                return base64.b64decode(content.removeprefix(_REASONING), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return ""
        case _:
            return ""


# --- the items and events of a response -----------------------------------------------------------------

# The type of an event, and its fields beside its number in the stream.
ItemEvent = tuple[str, dict[str, Any]]


class _Part:
    """The one part of a message or of reasoning, while it is written."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.id = f"{'rs' if kind == 'reasoning_text' else 'msg'}_{secrets.token_hex(16)}"
        self.pieces: list[str] = []
        self.logprobs: list[Raw] = []

    def item(self, status: str, *, seals: bool = False) -> Json:
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

    def end(self, item: Json) -> Iterator[ItemEvent]:
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

    def item(self, status: str, *, seals: bool = False) -> Json:  # noqa: ARG002 - reasoning is
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

    def end(self, item: Json) -> Iterator[ItemEvent]:
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
        self._done: dict[int, Json] = {}
        self._n_thought = self._n_written = 0  # characters

    @property
    def thoughts(self) -> float:
        """The share of reasoning in its text."""
        return self._n_thought / (self._n_thought + self._n_written or 1)

    @property
    def items(self) -> list[Json]:
        """The items that are complete, in order."""
        return [item for _, item in sorted(self._done.items(), key=lambda pair: pair[0])]

    def add(self, delta: ChatMessage, logprobs: list[Raw]) -> Iterator[ItemEvent]:
        """Takes what a chunk adds, and gives the events that say so."""
        if text := delta.thoughts:
            yield from self._write("reasoning_text", text, [])
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
