"""Rules that change a prompt so that more of it equals an earlier one. Each changes only what its name says.

    billing_line    drops the line x-anthropic-billing-header, with which Claude Code begins its system prompt
    date_to_day     cuts dates with a time of day to the day, in the system prompt
    tools_sorted    sorts the tools by name
    volatile_last   moves lines with times, counters and git's status from the system prompt to the end
    paths           moves lines that name the working directory from the system prompt to the end
    reasoning_kept  puts back the reasoning of earlier answers: `proxy/request/kept_reasoning.py`

They work on the fields of chats, of Anthropic's messages and of OpenAI's responses, in the client's own form.
The model reads another prompt than the client sent, so all but the first are chosen by the operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any, TypeVar

Fields = Mapping[str, Any]
Step = Callable[[Fields], dict[str, Any]]
"""Gives the fields that it changes."""
_Name = TypeVar("_Name")


class Rule(StrEnum):
    """The name of a rule."""

    BILLING_LINE = "billing_line"
    DATE_TO_DAY = "date_to_day"
    TOOLS_SORTED = "tools_sorted"
    VOLATILE_LAST = "volatile_last"
    PATHS = "paths"
    REASONING_KEPT = "reasoning_kept"


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
# Items that can hold a further text, and their field with text.
_ENDS = {"user": "content", "tool": "content", "function_call_output": "output"}


def normalised(fields: Fields, rules: Iterable[Rule]) -> tuple[dict[str, Any], tuple[Rule, ...]]:
    """The fields that these rules change, in their new form, and the rules that changed something."""
    chosen = frozenset(rules)
    return changed_by(fields, {rule: step for rule, step in _STEPS.items() if rule in chosen})


def changed_by(fields: Fields, steps: Mapping[_Name, Step]) -> tuple[dict[str, Any], tuple[_Name, ...]]:
    """The fields that these steps change one after the other, in their new form, None for one that is
    dropped; and the names of those that changed something."""
    now, applied = dict(fields), list[_Name]()
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
    if not isinstance(items, list) or not items:
        return None
    ended = with_turn_text(items[-1], text)
    return None if ended is None else [*items[:-1], ended]


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
            part = {"type": "input_text" if is_response else "text", "text": text}
            # Anthropic's results of tools must stand before texts.
            return [part, *parts] if is_first and "tool_result" not in kinds else [*parts, part]
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


_STEPS: Mapping[Rule, Step] = {
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
    head = list(takewhile(is_system, rest))
    return tools if isinstance(tools, list) else (), [*system, *head], rest[len(head) :]
