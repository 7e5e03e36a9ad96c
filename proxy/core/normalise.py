"""Rules that change a prompt so that more of it equals an earlier one. Each changes only what its name says.

    billing_line    drops the line x-anthropic-billing-header, with which Claude Code begins its system prompt
    date_to_day     cuts dates with a time of day to the day, in the system prompt
    tools_sorted    sorts the tools by name
    volatile_last   moves lines with times, counters and git's status from the system prompt to the end
    paths           moves lines that name the working directory from the system prompt to the end

They work on the fields of chats, of Anthropic's messages and of OpenAI's responses, in the client's own form.
The model reads another prompt than the client sent, so all but the first are chosen by the operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

Fields = Mapping[str, Any]


class Rule(StrEnum):
    """The name of a rule."""

    BILLING_LINE = "billing_line"
    DATE_TO_DAY = "date_to_day"
    TOOLS_SORTED = "tools_sorted"
    VOLATILE_LAST = "volatile_last"
    PATHS = "paths"


FIELDS = ("system", "instructions", "tools", "messages", "input")
"""The fields that rules read and change."""
BILLING = "x-anthropic-billing-header"
_BILLING = re.compile(BILLING + r":(?: *\w+=[^;\n]*;)*\s*")
_TIME = r"\d{2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?(?:[AP]M))?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})(?!\w))?"
# 2026-11-25T23:05:44.1Z, and 2026-11-25 23:05.
_ISO = re.compile(rf"(?<!\d)(\d{{4}}-\d{{2}}-\d{{2}})(?:T|, | at | ){_TIME}(?![\d:])")
# Wed, 25 Nov 2026 23:05:44 GMT, and Wed Nov 25 23:05:44 UTC 2026.
_WORDS = re.compile(
    r"\b((?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w{0,6},? (?:\w{3,9} +\d{1,2}|\d{1,2} \w{3,9})(?:,? \d{4})?)"
    rf",? {_TIME}(?![\d:])"
)
_VOLATILE = re.compile(
    r"^\W*(?:the )?(?:current|today'?s|local)[ _-]*(?:date|time|day|datetime|timestamp)\b"
    r"|^\W*(?:date|time|timestamp|now|today)\b[^\n:=]{0,20}[:=]"
    r"|\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}|\b\d{2}:\d{2}:\d{2}\b"
    r"|\b(?:tokens?|context|usage|budget)\b[^\n]{0,60}\d[^\n]{0,20}\b(?:left|remaining|used)\b"
    r"|^\W*(?:git status|current branch)\b[^\n:]{0,20}:",
    re.IGNORECASE,
)
# Claude Code ends its system prompt with it.
_GIT = re.compile(r"^gitStatus:")
_PATHS = re.compile(
    r"^\W*(?:primary |current |additional )?(?:working director(?:y|ies)|workspace|cwd|worktree|project root"
    r"|repository root|repo root)\b[^\n:=]{0,20}[:=]\s*\S*[/\\]",
    re.IGNORECASE,
)
# Rules look at the first characters of a line only. Lines that people write are shorter, and one call of a
# pattern keeps the interpreter's lock: a chat of 8 MB in one line took 10.8 s.
HEAD = 512
"""Characters of each line that rules look at."""
_SYSTEM_ROLES = ("system", "developer")
# What the end of a prompt may be, and its field with text.
_ENDS = {"user": "content", "tool": "content", "function_call_output": "output"}


def normalised(fields: Fields, rules: Iterable[Rule]) -> tuple[dict[str, Any], tuple[Rule, ...]]:
    """The fields that these rules change, in their new form, and the rules that changed something."""
    chosen, now, applied = frozenset(rules), dict(fields), list[Rule]()
    for rule in Rule:
        if rule in chosen and (changes := _STEPS[rule](now)):
            now |= changes
            applied.append(rule)
    return {name: value for name, value in now.items() if value is not fields.get(name)}, tuple(applied)


# --- the system prompt ---------------------------------------------------------------------------------


def _without_billing(text: str) -> str:
    found = _BILLING.match(text, 0, HEAD)
    return text[found.end() :] if found is not None else text


def _to_days(text: str) -> str:
    return "".join(map(_to_day, text.splitlines(keepends=True)))


def _to_day(line: str) -> str:
    head, rest = line[:HEAD], line[HEAD:]
    # A time at the end of the head may go on behind it.
    end = len(head) if rest else len(head) + 1

    def to_day(found: re.Match[str]) -> str:
        return found[1] if found.end() < end else found[0]

    return _WORDS.sub(to_day, _ISO.sub(to_day, head)) + rest


def _with_system(fields: Fields, change: Callable[[str], str]) -> dict[str, Any]:
    """The fields whose part of the system prompt `change` changes."""
    changes = dict[str, Any]()
    for name in ("system", "instructions"):
        given = fields.get(name)
        if (content := _with_texts(given, change)) != given:
            changes[name] = content
    for name in ("messages", "input"):
        items = fields.get(name)
        if isinstance(items, list):
            head = list(takewhile(_is_system, items))
            new = [{**each, "content": _with_texts(each.get("content"), change)} for each in head]
            if new != head:
                changes[name] = [*new, *items[len(head) :]]
    return changes


def _is_system(item: object) -> bool:
    return isinstance(item, dict) and item.get("role") in _SYSTEM_ROLES


def _with_texts(content: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    """A text, or parts of which some are texts, each of them changed."""
    match content:
        case str():
            return change(content)
        case list():
            return [_with_text(part, change) for part in content]
        case _:
            return content


def _with_text(part: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    match part:
        case {"text": str(text)}:
            return {**part, "text": change(text)}
        case _:
            return part


# --- lines that move to the end ------------------------------------------------------------------------


def _moved(fields: Fields, is_moved: Callable[[str], bool], rest: re.Pattern[str] | None) -> dict[str, Any]:
    """Moves lines of the system prompt to the end of the prompt. From a line that `rest` matches, all that
    follows in its text moves."""
    lines = list[str]()

    def take(text: str) -> str:
        kept, all_moves = list[str](), False
        for line in text.splitlines(keepends=True):
            all_moves = all_moves or (rest is not None and rest.match(line, 0, HEAD) is not None)
            (lines if all_moves or is_moved(line) else kept).append(line)
        return "".join(kept)

    changes = _with_system(fields, take)
    if not lines:
        return {}
    text = "\n".join(line.rstrip("\r\n") for line in lines)
    for name in ("messages", "input"):
        if (ended := _with_end(changes.get(name, fields.get(name)), text)) is not None:
            return {**changes, name: ended}
    return {}


def _with_end(items: Any, text: str) -> Any:  # noqa: ANN401 - JSON
    """The conversation with a text at its end; None if none can stand there."""
    if isinstance(items, str):
        return f"{items}\n\n{text}"
    if not isinstance(items, list) or not items or not isinstance(items[-1], dict):
        return None
    last = items[-1]
    kind = last.get("role") or last.get("type")
    name = _ENDS.get(kind) if isinstance(kind, str) else None
    match last.get(name) if name is not None else None:
        case str(content):
            return [*items[:-1], {**last, name: f"{content}\n\n{text}"}]
        case [*parts]:
            kinds = {part.get("type") for part in parts if isinstance(part, dict)}
            is_response = any(isinstance(kind, str) and kind.startswith("input_") for kind in kinds)
            part = {"type": "input_text" if is_response else "text", "text": text}
            return [*items[:-1], {**last, name: [*parts, part]}]
        case _:
            return None


# --- tools ---------------------------------------------------------------------------------------------


def _sorted_tools(fields: Fields) -> dict[str, Any]:
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return {}
    by_name = sorted(tools, key=_name)
    return {"tools": by_name} if by_name != tools else {}


def _name(tool: object) -> str:
    """The name of a tool, in whatever API's form; nameless tools come first."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            return ""


_STEPS: Mapping[Rule, Callable[[Fields], dict[str, Any]]] = {
    Rule.BILLING_LINE: lambda fields: _with_system(fields, _without_billing),
    Rule.DATE_TO_DAY: lambda fields: _with_system(fields, _to_days),
    Rule.TOOLS_SORTED: _sorted_tools,
    Rule.VOLATILE_LAST: lambda fields: _moved(
        fields, lambda line: _VOLATILE.search(line, 0, HEAD) is not None, _GIT
    ),
    Rule.PATHS: lambda fields: _moved(fields, lambda line: _PATHS.search(line, 0, HEAD) is not None, None),
}


def prompt_parts(fields: Fields) -> Sequence[Sequence[Any]]:
    """What a prompt is made of, in its order: the tools, the system prompt, the rest of the conversation."""
    tools = fields.get("tools")
    system = [value for name in ("system", "instructions") if (value := fields.get(name))]
    rest = list[Any]()
    for name in ("messages", "input"):
        items = fields.get(name)
        rest += items if isinstance(items, list) else [items] if items else []
    head = list(takewhile(_is_system, rest))
    return tools if isinstance(tools, list) else (), [*system, *head], rest[len(head) :]
