"""Converts messages from the client's form to the form that chat templates expect.

Checks shapes, so that an error names the field and does not come from inside a template. Joins text parts,
parses tool-call arguments, and replaces each prompt embedding by a marker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.errors import ChatError
from engine_adapter.prompt.extra_ids import Embeddings
from engine_adapter.prompt.media import read_embeds
from engine_adapter.prompt.template_input import ContentFormat, is_text


@dataclass(frozen=True, slots=True)
class EmbeddingSlot:
    """Prompt embeddings, the marker that replaces them in the text, and the field they came in."""

    marker: str
    param: str
    embeddings: Embeddings = field(repr=False)


class NormalMessages(msgspec.Struct, frozen=True):
    """Messages ready for a template, and the embeddings taken out of them, in order.

    Attributes:
        word: begins every marker, and occurs nowhere else in the chat.
    """

    messages: list[dict[str, Any]]
    embeddings: list[EmbeddingSlot]
    word: str = ""

    @property
    def marker_pattern(self) -> str:
        """Matches the markers, in time linear in the text however many there are."""
        return f"({self.word}x[0-9]+x)"


def normalize_messages(
    messages: object,
    wanted: ContentFormat,
    *,
    joint: str = "\n",
    make_word: Callable[[], str] | None = None,
    hidden_size: int | None = None,
) -> NormalMessages:
    """Checks and converts `messages`, decoded from JSON; the originals are not changed.

    `wanted` is the form in which the template reads a list of parts, and `joint` joins texts that become one.
    `make_word` gives a word that occurs nowhere in the chat. Without it or the `hidden_size` of the model,
    embeddings are refused.

    Raises:
        ChatError: naming the field at fault.
        PromptTableError: embeddings that cannot be read.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a list of at least one message", param="messages")
    if all(type(each) is dict and is_text(each) and each["role"] for each in messages):
        return NormalMessages(messages, [])
    reader = _Reader(wanted, joint, make_word, hidden_size)
    normal = [reader.message(message, i) for i, message in enumerate(messages)]
    return NormalMessages(normal, reader.embeddings, reader.word)


@dataclass(slots=True)
class _Reader:
    """Converts the messages of one chat and collects its embeddings."""

    _wanted: ContentFormat
    _joint: str
    _make_word: Callable[[], str] | None
    _hidden_size: int | None
    embeddings: list[EmbeddingSlot] = field(default_factory=list)
    word: str = ""

    def message(self, message: object, index: int) -> dict[str, Any]:
        name = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatError(f"{name} must be an object", param=name)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{name}.role must be a non-empty string", param=f"{name}.role")
        content = message.get("content")
        changes: dict[str, Any] = {}
        if isinstance(content, list):
            changes["content"] = self._parts(content, f"{name}.content")
        elif content is not None and not isinstance(content, str):
            raise ChatError(f"{name}.content must be a string or a list of parts", param=f"{name}.content")
        if message.get("tool_calls") is not None:
            changes["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls")
        return message | changes if changes else message

    def _parts(self, parts: list[Any], name: str) -> str | list[dict[str, Any]]:
        texts = [self._part(part, f"{name}[{j}]") for j, part in enumerate(parts)]
        if self._wanted is ContentFormat.PARTS:
            return [{"type": "text", "text": text} for text, _ in texts]
        joined = ""
        after_text = False
        for text, is_embedding in texts:
            # Embeddings join their neighbours directly.
            joined += self._joint + text if after_text and not is_embedding else text
            after_text = not is_embedding
        return joined

    def _part(self, part: object, name: str) -> tuple[str, bool]:
        """The text of a part, and whether it is a marker."""
        if not isinstance(part, dict):
            raise ChatError(f"{name} must be an object with a type", param=name)
        kind = part.get("type")
        if kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise ChatError(f"{name}.text must be a string", param=f"{name}.text")
            return text, False
        if kind == "prompt_embeds":
            return self._embedding(part.get("data"), f"{name}.data"), True
        raise ChatError(
            f"{name} has type {kind!r}: this engine takes text and prompt_embeds", param=f"{name}.type"
        )

    def _embedding(self, data: object, name: str) -> str:
        if self._make_word is None or self._hidden_size is None:
            raise ChatError(f"{name}: prompt embeddings cannot be used here", param=name)
        embeddings = read_embeds(data, param=name, hidden_size=self._hidden_size)
        self.word = self.word or self._make_word()
        marker = f"{self.word}x{len(self.embeddings)}x"
        self.embeddings.append(EmbeddingSlot(marker, name, embeddings))
        return marker


def _tool_calls(calls: object, name: str) -> list[dict[str, Any]]:
    """Tool calls with `arguments` as objects, which templates expect; OpenAI clients send JSON text."""
    if not isinstance(calls, list):
        raise ChatError(f"{name} must be a list", param=name)
    normal = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ChatError(f"{name}[{index}].function must be an object", param=f"{name}[{index}].function")
        if isinstance(function.get("arguments"), str):
            function = function | {"arguments": _arguments(function["arguments"])}
        normal.append(call | {"function": function})
    return normal


def _arguments(text: str) -> Any:  # noqa: ANN401 - JSON
    """A call's arguments; broken JSON from a model counts as none, as it does in vLLM."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}
