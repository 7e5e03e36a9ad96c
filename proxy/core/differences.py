"""The first difference between the prompt fields of two requests, in the words of their client's API.

A longer list with the same beginning is no difference: a chat's next turn adds messages. Cache marks
(`cache_control`) are not part of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec

from engine_adapter.types import common_prefix

# Fields of chats, completions, responses and messages, in the order of the prompt.
_TOOLS = ("tools", "functions")
_SYSTEM = ("system", "instructions")
_INPUT = ("messages", "input", "prompt")
# Fields beside them that change what engines make of a prompt.
OPTIONS = (
    "tool_choice", "parallel_tool_calls", "response_format", "text", "reasoning", "reasoning_effort",
    "thinking", "verbosity", "chat_template", "chat_template_kwargs", "documents", "add_generation_prompt",
    "add_special_tokens", "continue_final_message", "extra_ids", "prompt_table",
)  # fmt: skip
CONTINUED = "previous_response_id"
"""The field of a response whose `input` goes on after another one: it does not begin the prompt."""
PROMPT_FIELDS = (*_TOOLS, *_SYSTEM, CONTINUED, *_INPUT, *OPTIONS)
"""All fields that `difference` looks at."""
_SYSTEM_ROLES = ("system", "developer")
# Fields of an item that are compared elsewhere, or that no prompt contains.
_NOT_OF_A_PROMPT = dict.fromkeys(("content", "id", "status"))
_CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
# A content part with one of these fields is no text.
_MEDIA = frozenset((
    "image_url", "source", "input_audio", "audio_url", "video_url", "file", "file_id", "file_url",
    "file_data",
))  # fmt: skip


class Kind(StrEnum):
    """The kind of part that differs."""

    TOOLS = "tools"
    ORDER = "order"  # a tool has the same fields, in another order
    SYSTEM = "system"
    INPUT = "input"
    MEDIA = "media"
    OPTION = "option"


# Where such a part stands in a prompt.
_RANKS = {Kind.TOOLS: 0, Kind.SYSTEM: 1, Kind.INPUT: 2, Kind.MEDIA: 2, Kind.OPTION: 3, Kind.ORDER: 3}


class Difference(msgspec.Struct, frozen=True):
    """The first difference.

    Attributes:
        item: the message, tool or item in it.
        part: the content part of the message.
        offset: leading characters of the text that are equal.
    """

    kind: Kind
    field: str
    item: int | None = None
    part: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        """For people: `messages[1].content[0], character 17`."""
        item = "" if self.item is None else f"[{self.item}]"
        part = "" if self.part is None else f".content[{self.part}]"
        offset = "" if self.offset is None else f", character {self.offset}"
        order = ", the order of its fields" if self.kind is Kind.ORDER else ""
        return f"{self.field}{item}{part}{offset}{order}"


def difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> Difference | None:
    """The first difference between the fields of two requests. None if one only continues the other, or if
    their inputs continue different responses, so that their positions cannot be compared."""
    return next(_differences(now, before), None)


def cause_as_sent(
    changed: Difference, now: Mapping[str, Any], before: Mapping[str, Any]
) -> Difference | None:
    """The clients' part in `changed`, the first difference of two requests as kvpin changed them. The fields
    are as their clients sent them. It is `changed` itself if they also differ in such a part as sent; else
    the first difference as sent, unless it stands behind. None: kvpin's changes alone made the difference."""
    found = list(_differences(now, before))
    if any(each.kind is changed.kind for each in found):
        return changed
    return next((each for each in found if _RANKS[each.kind] <= _RANKS[changed.kind]), None)


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Difference]:
    """The differences, one of each field, and one of each message."""
    tools = {name: tuple(_unmarked(_listed(fields.get(name))) for fields in (now, before)) for name in _TOOLS}
    for name, (one, other) in tools.items():
        if one != other:
            yield Difference(Kind.TOOLS, name, common_prefix(one, other))
    for name in _SYSTEM:
        yield from islice(_of_content(Kind.SYSTEM, name, None, now.get(name), before.get(name)), 1)
    if now.get(CONTINUED) != before.get(CONTINUED):
        return
    for name in _INPUT:
        yield from _of_items(name, now.get(name), before.get(name))
    yield from (Difference(Kind.OPTION, name) for name in OPTIONS if now.get(name) != before.get(name))
    # Some templates write fields in an order of their own: the order counts only if nothing else differs.
    for name, both in tools.items():
        one, other = (list(map(msgspec.json.encode, each)) for each in both)
        if (at := common_prefix(one, other)) < min(len(one), len(other)):
            yield Difference(Kind.ORDER, name, at)


def are_alike(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """True if two requests seem to be versions of one: the first texts agree for the most part, counted from
    the front and from the back."""
    one, other = _beginning(now), _beginning(before)
    shortest = min(len(one), len(other))
    front = common_prefix(one, other)
    back = common_prefix(one[front:][::-1], other[front:][::-1])
    return shortest > 0 and front + back > shortest // 2


def _beginning(fields: Mapping[str, Any]) -> str:
    """The text that a prompt begins with."""
    for name in (*_SYSTEM, *_INPUT):
        for item in _listed(fields.get(name)):
            content = item.get("content", [item]) if isinstance(item, dict) else item
            if text := "".join(_text(part) or "" for part in _parts(content)):
                return text
    return ""


def _of_items(name: str, now: Any, before: Any) -> Iterator[Difference]:  # noqa: ANN401 - JSON
    """The differences of messages, of a response's input, or of a completion's prompt."""
    if name == "prompt" and isinstance(now, str) and isinstance(before, str):
        at = common_prefix(now, before)
        if at < min(len(now), len(before)):
            yield Difference(Kind.INPUT, name, offset=at)
        return
    for at, (one, other) in enumerate(zip(_listed(now), _listed(before), strict=False)):
        if one != other:
            yield from islice(_of_message(name, at, one, other), 1)


def _of_message(field: str, at: int, now: Any, before: Any) -> Iterator[Difference]:  # noqa: ANN401 - JSON
    kind = Kind.INPUT
    if isinstance(now, dict) and isinstance(before, dict):
        role = now.get("role")
        kind = Kind.SYSTEM if role in _SYSTEM_ROLES else Kind.INPUT
        if role == before.get("role"):
            yield from _of_content(kind, field, at, now.get("content"), before.get("content"))
        now, before = ({"type": "message", **each, **_NOT_OF_A_PROMPT} for each in (now, before))
    if _unmarked(now) != _unmarked(before):
        yield Difference(kind, field, at)


def _of_content(kind: Kind, field: str, item: int | None, now: Any, before: Any) -> Iterator[Difference]:  # noqa: ANN401 - JSON
    """The differences of two contents: texts, or lists of parts."""
    one, other = _parts(now), _parts(before)
    for at, (part, old) in enumerate(zip(one, other, strict=False)):
        where = at if isinstance(now, list) else None
        text, old_text = _text(part), _text(old)
        if text is None or old_text is None:
            if _unmarked(part) != _unmarked(old):
                yield Difference(_kind(kind, part, old), field, item, where)
        elif text != old_text:
            yield Difference(kind, field, item, where, common_prefix(text, old_text))
    if len(one) != len(other):
        at = min(len(one), len(other))
        where = at if isinstance(now, list) or isinstance(before, list) else None
        yield Difference(_kind(kind, *one[at:], *other[at:]), field, item, where)


def _kind(of_text: Kind, *parts: Any) -> Kind:  # noqa: ANN401 - JSON
    """The kind of a difference in these parts: MEDIA if one of them holds media, else `of_text`."""
    return Kind.MEDIA if any(isinstance(part, dict) and _MEDIA & part.keys() for part in parts) else of_text


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 - JSON
    """A field's items. A text is one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value if isinstance(value, list) else []


def _parts(content: Any) -> list[Any]:  # noqa: ANN401 - JSON
    """The parts of a content. A text is one part."""
    if isinstance(content, str):
        return [{"text": content}]
    return content if isinstance(content, list) else []


def _text(part: Any) -> str | None:  # noqa: ANN401 - JSON
    """The text of a part; None for images and the like."""
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None


def _unmarked(value: Any) -> Any:  # noqa: ANN401 - JSON
    """A value without the marks for the cache."""
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if isinstance(value, dict):
        return {name: _unmarked(item) for name, item in value.items() if name not in _CACHE_MARKS}
    return value
