"""Brings the messages of a conversation into a shape that its chat template keeps.

    developer_as_system   messages of developers become system messages
    systems_joined        system messages before the first turn become one
    late_system_in_turn   a later system message becomes text of the turn before it, or of the next one
    system_in_turn        so does any system message
    …                     and those of `turn_repair`, on the order of turns

They work on the fields of chats, of Anthropic's messages and of OpenAI's responses, in the client's own form.
What a message becomes depends only on those next to it: the next request of a conversation begins alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import takewhile
from typing import Any

from engine_adapter.body import JsonBody
from proxy.core.normalise import Fields, Step, changed_by, is_system, with_text, with_turn_text
from proxy.core.turn_repair import alternating, calls_as_text, nulls_as_empty, results_in_turns, text_of


class Repair(StrEnum):
    """The name of a repair."""

    DEVELOPER_AS_SYSTEM = "developer_as_system"
    SYSTEMS_JOINED = "systems_joined"
    LATE_SYSTEM_IN_TURN = "late_system_in_turn"
    SYSTEM_IN_TURN = "system_in_turn"
    CALL_AS_TEXT = "call_as_text"
    RESULT_IN_TURN = "result_in_turn"
    NULL_AS_EMPTY = "null_as_empty"
    TURNS_ALTERNATE = "turns_alternate"


_LISTS = {"messages": "system", "input": "instructions"}  # → the field whose text stands before them


def repaired(fields: Fields, repairs: Iterable[Repair]) -> tuple[dict[str, Any], tuple[Repair, ...]]:
    """The fields that these repairs change, in their new form, None for one that is dropped; and the repairs
    that changed something."""
    chosen = frozenset(repairs)
    return changed_by(fields, {repair: step for repair, step in _STEPS.items() if repair in chosen})


_MARKS: Mapping[Repair, tuple[bytes, ...]] = {  # one of these is in each body that needs the repair
    Repair.CALL_AS_TEXT: (b'"tool_calls"', b'"tool_use"', b'_call"'),
    Repair.RESULT_IN_TURN: (b'"tool"', b'"tool_result"', b'_call_output"'),
    Repair.NULL_AS_EMPTY: (b'"tool_calls"',),
    Repair.TURNS_ALTERNATE: (b"",),
}


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
    first = raw.find(b'"system"')
    if first >= 0 and not (takes_system and first == raw.rfind(b'"system"') and first < _first_turn(raw)):
        return True
    return b'"developer"' in raw or b'"instructions"' in raw


def _first_turn(raw: bytes) -> int:
    return min([at for role in (b'"user"', b'"assistant"') if (at := raw.find(role)) >= 0], default=-1)


def _as_system(fields: Fields) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, items in _lists_of(fields):
        if any(_role_of(item) == "developer" for item in items):
            changes[name] = [
                {**item, "role": "system"} if _role_of(item) == "developer" else item for item in items
            ]
    return changes


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


def _late_in_turns(fields: Fields) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, items in _lists_of(fields):
        n_first = sum(1 for _ in takewhile(is_system, items))
        if any(map(is_system, items[n_first:])):
            changes[name] = items[:n_first] + _in_turns([], items[n_first:])
    return changes


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
    turns: list[Any] = []
    behind: list[str] = []
    waiting = [_marked(text) for text in first]
    for item in items:
        text = text_of(item.get("content")) if is_system(item) else None
        if text is not None:
            ends = bool(behind) or (not waiting and bool(turns) and with_turn_text(turns[-1], "") is not None)
            (behind if ends else waiting).append(_marked(text))
            continue
        _end(turns, behind)
        behind = []
        if waiting:
            block, waiting = "\n\n".join(waiting), []
            begun = None
            if _role_of(item) == "user":
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


def _marked(text: str) -> str:
    return f"<system>\n{text}\n</system>"


def _lists_of(fields: Fields) -> Iterable[tuple[str, list[Any]]]:
    return ((name, items) for name in _LISTS if isinstance(items := fields.get(name), list))


def _role_of(item: object) -> Any:  # noqa: ANN401 - JSON
    return item.get("role") if isinstance(item, dict) else None


_STEPS: Mapping[Repair, Step] = {
    Repair.DEVELOPER_AS_SYSTEM: _as_system,
    Repair.SYSTEMS_JOINED: _joined,
    Repair.LATE_SYSTEM_IN_TURN: _late_in_turns,
    Repair.SYSTEM_IN_TURN: _all_in_turns,
    Repair.CALL_AS_TEXT: calls_as_text,
    Repair.RESULT_IN_TURN: results_in_turns,
    Repair.NULL_AS_EMPTY: nulls_as_empty,
    Repair.TURNS_ALTERNATE: alternating,
}
