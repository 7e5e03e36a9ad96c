"""Rules that change a prompt so that more of it equals an earlier one. Each changes only what its name says.

They work on the fields of chats, of Anthropic's messages and of OpenAI's responses, in the client's own form.
The model reads another prompt than the client sent, so all but the first are chosen by the operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine_adapter.body import BILLING, SCHEMA_DATA, SCHEMAS_BY_NAME
from proxy.core.prompt_values import (
    DATES,
    HEAD,
    IDS,
    ISO_TIME,
    VOLATILE,
    WORDY_TIME,
    Kinds,
    Paths,
    References,
)

Fields = Mapping[str, Any]
Step = Callable[[Fields], dict[str, Any]]
"""Gives the fields that it changes."""
_Name = TypeVar("_Name")


class Rule(StrEnum):
    """The name of a rule."""

    # Drops the line x-anthropic-billing-header, with which Claude Code begins its system prompt.
    BILLING_LINE = "billing_line"
    DATE_TO_DAY = "date_to_day"  # cuts dates with a time of day to the day, in the system prompt
    TOOLS_SORTED = "tools_sorted"  # sorts the tools by name
    VOLATILE_LAST = "volatile_last"  # tells times, counts and git's status behind the last message, as PATHS
    # Tells such values of the system prompt and of tools before the first turn, and leaves references in
    # their places (`prompt_values.py`). So do DATES and IDS.
    PATHS = "paths"
    REASONING_KEPT = "reasoning_kept"  # puts back that of earlier answers: `proxy/request/normalising.py`
    SCHEMAS_SORTED = "schemas_sorted"  # sorts the fields of each tool's schema
    DATES = "dates"
    IDS = "ids"


class Normalised(NamedTuple):
    """What rules made of a prompt."""

    changes: dict[str, Any]  # the fields that they changed, in their new form
    applied: tuple[Rule, ...]  # the rules that changed something
    told: dict[str, str]  # reference → value, of the values that the prompt tells in another place now


FINDS_VALUES = frozenset({Rule.PATHS, Rule.DATES, Rule.IDS, Rule.VOLATILE_LAST})
"""The rules that leave references to values."""
AGENTS = frozenset(Rule) - {Rule.DATE_TO_DAY, Rule.REASONING_KEPT}
"""The rules for coding agents: what they say of each session stands behind what is the same in all."""
FIELDS = ("system", "instructions", "tools", "messages", "input")
"""The fields that rules read and change."""
_BILLING = re.compile(BILLING + r":(?: *\w+=[^;\n]*;)*\s*")
_SYSTEM_ROLES = ("system", "developer")
_SCHEMAS = ("parameters", "input_schema")
_VALUES = "Values in the instructions above:"
# Items that can hold a further text, and their field with text.
_ENDS = {"user": "content", "tool": "content", "function_call_output": "output"}


def normalised(fields: Fields, rules: Iterable[Rule]) -> Normalised:
    """The fields that these rules change."""
    chosen = frozenset(rules)
    told: dict[str, str] = {}
    changes, applied = changed_by(fields, {rule: step for rule, step in _STEPS.items() if rule in chosen})
    for place in _PLACES:
        found = {rule: place.finders[rule]() for rule in place.finders if rule in chosen}
        if found and (moved := _told({**fields, **changes}, found, place)) is not None:
            changes, applied = changes | moved.changes, applied + moved.applied
            told |= moved.told
    return Normalised(changes, applied, told)


def changed_by(fields: Fields, steps: Mapping[_Name, Step]) -> tuple[dict[str, Any], tuple[_Name, ...]]:
    """The fields that these steps change one after the other, in their new form, None for one that is
    dropped; and the names of those that changed something."""
    now = dict(fields)
    applied: list[_Name] = []
    for name, step in steps.items():
        if changes := step(now):
            now |= changes
            applied.append(name)
    return {field: value for field, value in now.items() if value is not fields.get(field)}, tuple(applied)


# --- the system prompt ---------------------------------------------------------------------------------


def _without_billing(text: str) -> str:
    found = _BILLING.match(text, 0, HEAD)
    return text[found.end() :] if found is not None else text


def _to_days(text: str) -> str:
    return "\n".join(_to_day(line) if ":" in line else line for line in text.split("\n"))


def _to_day(line: str) -> str:
    head, rest = line[:HEAD], line[HEAD:]
    end = len(head) if rest else len(head) + 1  # a time at the end of the head may go on behind it

    def to_day(found: re.Match[str]) -> str:
        return found[1] if found.end() < end else found[0]

    return WORDY_TIME.sub(to_day, ISO_TIME.sub(to_day, head)) + rest


def _with_system(fields: Fields, change: Callable[[str], str]) -> dict[str, Any]:
    """The fields whose part of the system prompt `change` changes."""
    changes: dict[str, Any] = {}
    for name in ("system", "instructions"):
        given = fields.get(name)
        if (content := _with_texts(given, change)) != given:
            changes[name] = content
    for name in ("messages", "input"):
        items = fields.get(name)
        if isinstance(items, list):
            head = list(takewhile(is_system, items))
            new = [{**each, "content": _with_texts(each.get("content"), change)} for each in head]
            if new != head:
                changes[name] = [*new, *items[len(head) :]]
    return changes


def is_system(item: object) -> bool:
    """True for a message that belongs to the system prompt where it stands first."""
    return isinstance(item, dict) and item.get("role") in _SYSTEM_ROLES


def _with_texts(content: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    """A text, or parts of which some are texts, each of them changed."""
    match content:
        case str():
            return change(content)
        case list():
            return [
                {**part, "text": change(text)}
                if isinstance(part, dict) and isinstance(text := part.get("text"), str)
                else part
                for part in content
            ]
        case _:
            return content


# --- values that are told in another place -------------------------------------------------------------


class _Place(NamedTuple):
    """Where a prompt tells values."""

    is_first: bool  # at the beginning of the first turn; else at the end of the last one
    finders: Mapping[Rule, Callable[[], Kinds]]  # rule → makes what finds its values, anew for each prompt
    order: Sequence[str]  # how values of these kinds stand there: what changes least comes first


def _told(fields: Fields, found: Mapping[Rule, Kinds], place: _Place) -> Normalised | None:
    """The prompt with references in the place of these values, which it tells there; None if it cannot."""
    references = References()
    changes: dict[str, Any] = {}
    applied: list[Rule] = []
    for rule, kinds in found.items():
        known, now = len(references.told), {**fields, **changes}

        def replaced(text: str, kinds: Kinds = kinds) -> str:
            return references.replaced(text, kinds)

        more = _with_system(now, replaced)
        if isinstance(tools := now.get("tools"), list):
            more["tools"] = [_with_descriptions(each, replaced) for each in tools]
        if len(references.told) > known:
            changes |= more
            applied.append(rule)
    text = "\n".join((_VALUES, *references.lines(place.order)))
    for name in ("messages", "input") if applied else ():
        given = changes.get(name, fields.get(name))
        if (items := _with_told(given, text, is_first=place.is_first)) is not None:
            return Normalised({**changes, name: items}, tuple(applied), references.told)
    return None


def _with_descriptions(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    """A tool, or a part of one, with each description changed."""
    match value:
        case dict():
            return {
                name: change(inner)
                if name == "description" and isinstance(inner, str)
                else _with_descriptions(inner, change)
                for name, inner in value.items()
            }
        case list():
            return [_with_descriptions(each, change) for each in value]
        case _:
            return value


def _with_told(items: Any, text: str, *, is_first: bool) -> Any:  # noqa: ANN401 - JSON
    """The conversation with a text at the beginning of the first turn that can hold it, or at the end of the
    last one, behind which late system messages may stand; None if none can hold it."""
    if isinstance(items, str):
        return with_text(items, text, is_first=is_first)
    turns = [at for at, item in enumerate(items) if not is_system(item)] if isinstance(items, list) else []
    for at in turns if is_first else turns[-1:]:
        if (turn := with_turn_text(items[at], text, is_first=is_first)) is not None:
            return [*items[:at], turn, *items[at + 1 :]]
    return None


_PLACES = (
    # Before the first turn, all prompts of a session are equal up to their last message.
    _Place(
        True,
        # A date or an id in a path belongs to the path.
        {Rule.PATHS: lambda: {"path": (Paths(),)}, Rule.DATES: lambda: DATES, Rule.IDS: lambda: IDS},
        ("date", "path", "id"),
    ),
    # What changes within a session stands behind all that does not.
    _Place(False, {Rule.VOLATILE_LAST: lambda: VOLATILE}, ("time", "count", "git")),
)


def with_turn_text(item: Any, text: str, *, is_first: bool = False) -> Any:  # noqa: ANN401 - JSON
    """A turn of the user's or a tool's with a further text, at its end or at its beginning; None if it can
    hold none."""
    kind = (item.get("role") or item.get("type")) if isinstance(item, dict) else None
    name = _ENDS.get(kind) if isinstance(kind, str) else None
    content = None if name is None else with_text(item.get(name), text, is_first=is_first)
    return None if content is None else {**item, name: content}


def with_text(content: Any, text: str, *, is_first: bool = False) -> Any:  # noqa: ANN401 - JSON
    """A text, or parts, with a further text; None for anything else."""
    match content:
        case str():
            return f"{text}\n\n{content}" if is_first else f"{content}\n\n{text}"
        case [*parts]:
            kinds = [part.get("type") for part in parts if isinstance(part, dict)]
            is_response = any(isinstance(kind, str) and kind.startswith("input_") for kind in kinds)
            # Some templates write parts one right after the other.
            apart = f"{text}\n\n" if is_first else f"\n\n{text}"
            part = {"type": "input_text" if is_response else "text", "text": apart}
            # Anthropic's results of tools must stand before texts.
            return [part, *parts] if is_first and "tool_result" not in kinds else [*parts, part]
        case _:
            return None


# --- tools ---------------------------------------------------------------------------------------------


def _with_tools(fields: Fields, change: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    """The tools, if `change` changes them, or only their order."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return {}
    changed = change(tools)
    # Equal objects may have another order.
    return {"tools": changed} if msgspec.json.encode(changed) != msgspec.json.encode(tools) else {}


def _name(tool: object) -> str:
    """The name of a tool, in whatever API's form; nameless tools come first."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            return ""


def _with_sorted_schema(tool: Any) -> Any:  # noqa: ANN401 - JSON
    match tool:
        case {"function": dict(function)}:
            return {**tool, "function": _with_sorted_schema(function)}
        case dict():
            return {name: _in_order(value) if name in _SCHEMAS else value for name, value in tool.items()}
        case _:
            return tool


def _in_order(value: Any, *, is_named: bool = False) -> Any:  # noqa: ANN401 - JSON
    """A schema with its fields, and the names that it requires, in the order of the alphabet. `is_named`: its
    keys are names, each of a schema."""
    match value:
        case dict():
            ordered = {
                name: value[name]
                if name in SCHEMA_DATA and not is_named
                else _in_order(value[name], is_named=name in SCHEMAS_BY_NAME and not is_named)
                for name in sorted(value)
            }
            required = ordered.get("required")
            if (
                not is_named
                and isinstance(required, list)
                and all(isinstance(each, str) for each in required)
            ):
                ordered["required"] = sorted(required)
            return ordered
        case list():
            return [_in_order(each) for each in value]
        case _:
            return value


_STEPS: Mapping[Rule, Step] = {
    Rule.BILLING_LINE: lambda fields: _with_system(fields, _without_billing),
    Rule.DATE_TO_DAY: lambda fields: _with_system(fields, _to_days),
    Rule.TOOLS_SORTED: lambda fields: _with_tools(fields, lambda tools: sorted(tools, key=_name)),
    Rule.SCHEMAS_SORTED: lambda fields: _with_tools(fields, lambda tools: [*map(_with_sorted_schema, tools)]),
}


def prompt_parts(fields: Fields) -> Sequence[Sequence[Any]]:
    """What a prompt is made of, in its order: the tools, the system prompt, the rest of the conversation."""
    tools = fields.get("tools")
    system = [value for name in ("system", "instructions") if (value := fields.get(name))]
    rest: list[Any] = []
    for name in ("messages", "input"):
        items = fields.get(name)
        rest += items if isinstance(items, list) else [items] if items else []
    head = list(takewhile(is_system, rest))
    return tools if isinstance(tools, list) else (), [*system, *head], rest[len(head) :]
