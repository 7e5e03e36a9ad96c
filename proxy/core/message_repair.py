"""Repairs that bring the messages of a conversation into a shape that its chat template keeps.

They work on the fields of chats, also of those that kvpin makes of messages and responses, and of responses
that engines serve themselves. What a message becomes depends only on those next to it: the next request of a
conversation begins alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import chain, takewhile
from typing import Any, Literal

import msgspec

from engine_adapter.body import JsonBody
from proxy.core.normalise import Fields, Step, changed_by, is_system, with_text, with_turn_text

NO_CONTENT = "(no content)"
"""The text of a turn that had to be put in."""
# List → the field whose text stands before it, if there is one.
_LISTS = {"messages": "", "input": "instructions"}
_THOUGHTS = ("reasoning_content", "reasoning")
_Kind = Literal["system", "user", "assistant", "call", "result"]
_KINDS: Mapping[str, _Kind] = {"system": "system", "developer": "system", "user": "user", "tool": "result"}
_Items = list[Any]


class Repair(StrEnum):
    """The name of a repair."""

    DEVELOPER_AS_SYSTEM = "developer_as_system"  # messages of developers become system messages
    SYSTEMS_JOINED = "systems_joined"  # system messages before the first turn become one
    # A later system message becomes text of the turn before it, or of the next one.
    LATE_SYSTEM_IN_TURN = "late_system_in_turn"
    SYSTEM_IN_TURN = "system_in_turn"  # so does any system message
    CALL_AS_TEXT = "call_as_text"  # the call of a tool becomes text of the assistant's
    RESULT_IN_TURN = "result_in_turn"  # a tool's result without its call becomes a turn of the user's
    NULL_AS_EMPTY = "null_as_empty"  # the content of a call is an empty text instead of null
    # Turns of one role become one, also a text of the assistant's and its call. A turn of NO_CONTENT is put
    # before a talk that the assistant begins, and between a tool's result and the user's turn after it.
    TURNS_ALTERNATE = "turns_alternate"


ONE_BY_ONE = frozenset(
    {Repair.DEVELOPER_AS_SYSTEM, Repair.CALL_AS_TEXT, Repair.RESULT_IN_TURN, Repair.NULL_AS_EMPTY}
)
"""Repairs that leave each message where it is."""


def repaired(fields: Fields, repairs: Iterable[Repair]) -> tuple[dict[str, Any], tuple[Repair, ...]]:
    """The fields that these repairs change, in their new form, None for one that is dropped; and the repairs
    that changed something."""
    chosen = frozenset(repairs)
    return changed_by(fields, {repair: step for repair, step in _STEPS.items() if repair in chosen})


_MARKS: Mapping[Repair, tuple[bytes, ...]] = {  # one of these is in each body that needs the repair
    Repair.CALL_AS_TEXT: (b'"tool_calls"', b'_call"'),
    Repair.RESULT_IN_TURN: (b'"tool"', b'_call_output"'),
    Repair.NULL_AS_EMPTY: (b'"tool_calls"',),
    Repair.TURNS_ALTERNATE: (b"",),
}
# What is right before the word of a first message's role.
_FIRST = re.compile(rb'\[\s*\{\s*(?:"type"\s*:\s*"message"\s*,\s*)?"role"\s*:\s*\Z')


def may_need(body: JsonBody, repairs: AbstractSet[Repair]) -> bool:
    """False if a body surely needs none of these repairs, by its bytes."""
    raw = body.raw
    takes_system = Repair.SYSTEM_IN_TURN not in repairs
    if body.is_plain:
        if Repair.TURNS_ALTERNATE in repairs:
            return True
        rest = body.view("messages")[takes_system:]
        return not repairs <= _MARKS.keys() and any(each["role"] == "system" for each in rest)
    if any(mark in raw for repair in repairs for mark in _MARKS.get(repair, ())):
        return True
    return not repairs <= _MARKS.keys() and _may_lose_systems(raw, takes_system=takes_system)


def _may_lose_systems(raw: bytes, *, takes_system: bool) -> bool:
    """`takes_system`: the template takes a system message before the first turn."""
    at = raw.find(b'"system"')
    is_kept = takes_system and at == raw.rfind(b'"system"')
    if at >= 0 and not (is_kept and _FIRST.search(raw, max(at - 128, 0), at)):
        return True
    return b'"developer"' in raw or b'"instructions"' in raw


def _step(change: Callable[[_Items], _Items]) -> Step:
    """A repair of each list of messages or items by itself."""

    def step(fields: Fields) -> dict[str, Any]:
        lists = ((name, items, change(items)) for name, items in _lists_of(fields))
        return {name: changed for name, items, changed in lists if changed != items}

    return step


def _lists_of(fields: Fields) -> Iterable[tuple[str, _Items]]:
    return ((name, items) for name in _LISTS if isinstance(items := fields.get(name), list))


def _get(item: object, name: str) -> Any:  # noqa: ANN401 - JSON
    """A field of what may be no object."""
    return item.get(name) if isinstance(item, dict) else None


def _marked(tag: str, text: str) -> str:
    return f"<{tag}>\n{text}\n</{tag}>"


def text_of(content: Any) -> str | None:  # noqa: ANN401 - JSON
    """What a message says; None if it is more than text."""
    match content:
        case str():
            return content
        case list() if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            return "\n\n".join(part["text"] for part in content)
        case _:
            return None


# --- system messages ----------------------------------------------------------------------------------


def _as_system(item: Any) -> Any:  # noqa: ANN401 - JSON
    return {**item, "role": "system"} if _get(item, "role") == "developer" else item


def _joined(fields: Fields) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, items in _lists_of(fields):
        head, lead = [*takewhile(is_system, items)], fields.get(_LISTS[name])
        texts = [text_of(item.get("content")) for item in head]
        if not head or not (lead or head[1:]) or None in texts:
            continue
        text, rest = "\n\n".join(map(str, texts)), items[len(head) :]
        if not lead:
            changes[name] = [{**head[0], "content": text}, *rest]
        elif (joined := with_text(lead, text)) is not None:
            changes |= {name: rest, _LISTS[name]: joined}
    return changes


def _late_in_turns(items: _Items) -> _Items:
    head = [*takewhile(is_system, items)]
    return head + _in_turns([], items[len(head) :])


def _all_in_turns(fields: Fields) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if isinstance(text := fields.get("input"), str):
        fields = {**fields, "input": [{"role": "user", "content": text}]}
    for name, items in _lists_of(fields):
        field = _LISTS[name]
        lead = text_of(fields.get(field)) if fields.get(field) else None
        if lead is not None or any(map(is_system, items)):
            changes[name] = _in_turns([lead] if lead is not None else [], items)
        if lead is not None:
            changes[field] = None
    return changes


def _in_turns(first: list[str], items: list[Any]) -> list[Any]:
    """The items, with the texts of `first` and of system messages in the turns next to them."""
    turns: _Items = []
    behind: list[str] = []
    waiting = [_marked("system", text) for text in first]
    for item in items:
        text = text_of(item.get("content")) if is_system(item) else None
        if text is not None:
            ends = bool(behind) or (not waiting and bool(turns) and with_turn_text(turns[-1], "") is not None)
            (behind if ends else waiting).append(_marked("system", text))
            continue
        _end(turns, behind)
        behind = []
        if waiting:
            block, waiting = "\n\n".join(waiting), []
            begun = None
            answers = _kind_of(item) == "result" and bool(turns) and _kind_of(turns[-1]) == "call"
            if answers or _get(item, "role") == "user":
                begun = with_turn_text(item, block, is_first=True)
            turns += [begun] if begun is not None else [{"role": "user", "content": block}, item]
        else:
            turns.append(item)
    _end(turns, behind)
    return [*turns, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else turns


def _end(turns: list[Any], texts: list[str]) -> None:
    """Puts texts at the end of the last turn, which can hold them."""
    if texts:
        turns[-1] = with_turn_text(turns[-1], "\n\n".join(texts))


# --- turns --------------------------------------------------------------------------------------------


def _null_as_empty(item: Any) -> Any:  # noqa: ANN401 - JSON
    match item:
        case {"role": "assistant", "tool_calls": [_, *_]} if item.get("content") is None:
            return {**item, "content": ""}
        case _:
            return item


def _alternating(items: list[Any]) -> list[Any]:
    before, last = None, None
    runs: list[_Items] = []  # turns that become one
    for item in items:
        kind = _kind_of(item)
        if kind in ("user", "assistant") and kind == before and _is_known(item) and _is_known(runs[-1][-1]):
            runs[-1].append(item)
            continue
        if kind == "call" and before == "assistant" and "role" in item and _is_known(runs[-1][-1]):
            runs[-1].append(item)  # what the assistant says before its call belongs to that
            before = last = kind
            continue
        if kind == "user" and last == "result":
            runs.append([{"role": "assistant", "content": NO_CONTENT}])
        elif kind in ("assistant", "call") and last is None:
            runs.append([{"role": "user", "content": NO_CONTENT}])
        runs.append([item])
        before, last = kind, kind if kind not in (None, "system") else last
    return [_as_one(run) if len(run) > 1 else run[0] for run in runs]


def _kind_of(item: Any) -> _Kind | None:  # noqa: ANN401 - JSON
    """What an item is; None for one that is no turn, such as reasoning."""
    if not isinstance(item, dict):
        return None
    kind = str(item.get("type") or "message")
    if kind != "message":
        return "result" if kind.endswith("_call_output") else "call" if kind.endswith("_call") else None
    role: Any = item.get("role")
    if role == "assistant":
        return "call" if item.get("tool_calls") else "assistant"
    return _KINDS.get(role) if isinstance(role, str) else None


def _is_known(item: dict[str, Any]) -> bool:
    return isinstance(item.get("content"), str | list)


def _as_one(run: list[dict[str, Any]]) -> dict[str, Any]:
    calls = {name: run[-1][name] for name in ("tool_calls",) if name in run[-1]}
    contents = [item["content"] for item in run if item.get("content") or not calls]
    first = run[0] | calls
    for name in _THOUGHTS:
        if thoughts := [text for item in run if isinstance(text := item.get(name), str) and text]:
            first[name] = "\n\n".join(thoughts)
    texts = [*takewhile(lambda content: isinstance(content, str), contents)]
    rest, text = contents[len(texts) :], "\n\n".join(texts)
    if not rest:
        return {**first, "content": text}
    known = chain.from_iterable(each for each in rest if isinstance(each, list))
    kinds = {str(_get(part, "type")).partition("_")[0] for part in known}
    kind = next((f"{way}_text" for way in ("input", "output") if way in kinds), "text")
    parts: _Items = []
    for each in [text, *rest] if texts else rest:
        more = each if isinstance(each, list) else [{"type": kind, "text": each}]
        parts += _apart(more) if parts else more
    return {**first, "content": parts}


def _apart(parts: list[Any]) -> list[Any]:
    """Parts behind others, whose text some templates write right after theirs."""
    match parts:
        case [{"text": str(text)} as first, *rest]:
            return [{**first, "text": f"\n\n{text}"}, *rest]
        case _:
            return parts


# --- calls of tools, and their results ----------------------------------------------------------------


def _without_calls(item: Any) -> Any:  # noqa: ANN401 - JSON
    match item:
        case {"role": "assistant", "tool_calls": [_, *_] as calls} if isinstance(
            said := item.get("content"), str | list | None
        ) and None not in (texts := [*map(_call_as_text, calls)]):
            rest = {name: value for name, value in item.items() if name != "tool_calls"}
            told = "\n\n".join(filter(None, texts))
            if isinstance(said, list):
                return {**rest, "content": [*said, {"type": "text", "text": told}]}
            return {**rest, "content": f"{said}\n\n{told}" if said else told}
        case {"type": "function_call", "name": name, "arguments": asked} | {
            "type": "custom_tool_call", "name": name, "input": asked
        }:  # fmt: skip
            return {"role": "assistant", "content": _called(name, asked)}
        case _:
            return item


def _call_as_text(call: Any) -> str | None:  # noqa: ANN401 - JSON
    """A call of a chat's as text; None if its form is not known."""
    match call:
        case {"function": dict(function)}:
            return _called(function.get("name"), function.get("arguments"))
        case {"custom": dict(custom)}:
            return _called(custom.get("name"), custom.get("input"))
        case _:
            return None


def _called(name: object, arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return _marked("tool_call", f"{name}({text})")


def _results_in_turns(items: _Items) -> _Items:
    """The conversation without lone results. A response's first items may answer a stored one's calls."""
    has_turn = False
    known: set[str] = set()
    turns: _Items = []
    for item in items:
        known.update(_calls_of(item))
        turns.append(_with_lone_results_as_text(item, known, has_turn=has_turn))
        has_turn = has_turn or _kind_of(item) in ("user", "assistant")
    return turns


def _calls_of(item: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """The ids of the calls in a turn."""
    match item:
        case {"tool_calls": [*calls]}:
            ids = [call.get("id") for call in calls if isinstance(call, dict)]
        case {"type": "function_call" | "custom_tool_call", "call_id": call}:
            ids = [call]
        case _:
            ids = []
    return (each for each in ids if isinstance(each, str))


def _with_lone_results_as_text(item: Any, known: set[str], *, has_turn: bool) -> Any:  # noqa: ANN401 - JSON
    match item:
        case {"role": "tool", "content": content, "tool_call_id": str(call)} if (
            call not in known and (text := text_of(content)) is not None
        ):
            return {"role": "user", "content": _marked("tool_result", text)}
        case {
            "type": "function_call_output" | "custom_tool_call_output",
            "call_id": str(call),
            "output": output,
        } if call not in known and (text := text_of(output)) is not None:
            return {"role": "user", "content": _marked("tool_result", text)} if has_turn else item
        case _:
            return item


_STEPS: Mapping[Repair, Step] = {
    Repair.DEVELOPER_AS_SYSTEM: _step(lambda items: [*map(_as_system, items)]),
    Repair.SYSTEMS_JOINED: _joined,
    Repair.LATE_SYSTEM_IN_TURN: _step(_late_in_turns),
    Repair.SYSTEM_IN_TURN: _all_in_turns,
    Repair.CALL_AS_TEXT: _step(lambda items: [*map(_without_calls, items)]),
    Repair.RESULT_IN_TURN: _step(_results_in_turns),
    Repair.NULL_AS_EMPTY: _step(lambda items: [*map(_null_as_empty, items)]),
    Repair.TURNS_ALTERNATE: _step(_alternating),
}
