"""Brings the turns of a conversation into an order that its chat template takes.

    call_as_text      the call of a tool becomes text of the assistant's
    result_in_turn    a tool's result without its call becomes a turn of the user's
    null_as_empty     the content of a call is an empty text instead of null
    turns_alternate   turns of one role become one, also a text of the assistant's and its call; a turn that
                      says "(no content)" is put before a talk that the assistant begins, and between a tool's
                      result and the user's turn right after it

They work on chats, Anthropic's messages and OpenAI's responses, in the client's own form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, takewhile
from typing import Any, Literal

import msgspec

from proxy.core.normalise import Fields

NO_CONTENT = "(no content)"
"""The text of a turn that had to be put in."""
_THOUGHTS = ("reasoning_content", "reasoning")
_Kind = Literal["system", "user", "assistant", "call", "result"]
_KINDS: Mapping[str, _Kind] = {"system": "system", "developer": "system", "user": "user", "tool": "result"}


def calls_as_text(fields: Fields) -> dict[str, Any]:
    """The conversation without calls that have a form of their own."""
    return _each(fields, _without_calls)


def results_in_turns(fields: Fields) -> dict[str, Any]:
    """The conversation without lone results. A response's first items may answer a stored one's calls."""
    has_turn = False
    known: set[str] = set()

    def without(item: Any) -> Any:  # noqa: ANN401 - JSON
        nonlocal has_turn
        known.update(_calls_of(item))
        changed = _with_lone_results_as_text(item, known, has_turn=has_turn)
        has_turn = has_turn or _kind_of(item) in ("user", "assistant")
        return changed

    return _each(fields, without)


def _each(fields: Fields, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The conversation, each item changed."""
    changes: dict[str, Any] = {}
    for name in ("messages", "input"):
        if isinstance(items := fields.get(name), list):
            turns = [change(item) for item in items]
            if any(turn is not item for turn, item in zip(turns, items, strict=True)):
                changes[name] = turns
    return changes


def nulls_as_empty(fields: Fields) -> dict[str, Any]:
    """Only chats have such calls."""
    items = fields.get("messages")
    if not isinstance(items, list) or not any(map(_is_null_call, items)):
        return {}
    return {"messages": [{**item, "content": ""} if _is_null_call(item) else item for item in items]}


def alternating(fields: Fields) -> dict[str, Any]:
    """The conversation, in turns that alternate."""
    changes: dict[str, Any] = {}
    for name in ("messages", "input"):
        if isinstance(items := fields.get(name), list):
            turns = _alternating(items)
            if turns != items:
                changes[name] = turns
    return changes


def _alternating(items: list[Any]) -> list[Any]:
    before, last = None, None
    runs: list[list[Any]] = []  # turns that become one
    for item in chain.from_iterable(map(_parts_of, items)):
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


def _parts_of(item: Any) -> Iterator[Any]:  # noqa: ANN401 - JSON
    """An item; a turn of Anthropic's in two, where it has results of tools and something else."""
    content = item.get("content") if isinstance(item, dict) else None
    blocks = content if isinstance(content, list) else []
    results = [block for block in blocks if _type_of(block) == "tool_result"]
    if results and len(results) < len(blocks):
        yield {**item, "content": results}
        yield {**item, "content": [block for block in blocks if _type_of(block) != "tool_result"]}
    else:
        yield item


def _kind_of(item: Any) -> _Kind | None:  # noqa: ANN401 - JSON
    """What an item is; None for one that is no turn, such as reasoning."""
    if not isinstance(item, dict):
        return None
    kind, content = str(item.get("type") or "message"), item.get("content")
    if kind != "message":
        return "result" if kind.endswith("_call_output") else "call" if kind.endswith("_call") else None
    blocks = [_type_of(block) for block in content] if isinstance(content, list) else []
    role: Any = item.get("role")
    if role == "assistant":
        return "call" if item.get("tool_calls") or "tool_use" in blocks else "assistant"
    if role == "user" and "tool_result" in blocks:
        return "result"
    return _KINDS.get(role) if isinstance(role, str) else None


def _is_known(item: dict[str, Any]) -> bool:
    return isinstance(item.get("content"), str | list)


def _as_one(run: list[dict[str, Any]]) -> dict[str, Any]:
    """Turns of one role as one."""
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
    kinds = {str(_type_of(part)).partition("_")[0] for part in known}
    kind = next((f"{way}_text" for way in ("input", "output") if way in kinds), "text")
    parts: list[Any] = []
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
        case {"role": "assistant", "content": [*blocks]} if any(
            _type_of(each) == "tool_use" for each in blocks
        ):
            return {**item, "content": [_use_as_text(block) for block in blocks]}
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


def _use_as_text(block: Any) -> Any:  # noqa: ANN401 - JSON
    if _type_of(block) != "tool_use":
        return block
    return {"type": "text", "text": _called(block.get("name"), block.get("input"))}


def _called(name: object, arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f"<tool_call>\n{name}({text})\n</tool_call>"


def _calls_of(item: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """The ids of the calls in a turn."""
    match item:
        case {"tool_calls": [*calls]}:
            ids = [call.get("id") for call in calls if isinstance(call, dict)]
        case {"role": "assistant", "content": [*blocks]}:
            ids = [block.get("id") for block in blocks if _type_of(block) == "tool_use"]
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
            return {"role": "user", "content": _marked(text)}
        case {"role": "user", "content": [*blocks]} if any(_is_lone(block, known) for block in blocks):
            texts = [_as_text(block) if _is_lone(block, known) else block for block in blocks]
            # Results stand before texts, for the API's sake.
            return {**item, "content": sorted(texts, key=lambda block: _type_of(block) != "tool_result")}
        case {
            "type": "function_call_output" | "custom_tool_call_output",
            "call_id": str(call),
            "output": output,
        } if call not in known and (text := text_of(output)) is not None:
            return {"role": "user", "content": _marked(text)} if has_turn else item
        case _:
            return item


def _is_lone(block: Any, known: set[str]) -> bool:  # noqa: ANN401 - JSON
    match block:
        case {"type": "tool_result", "tool_use_id": str(call), "content": content}:
            return call not in known and text_of(content) is not None
        case _:
            return False


def _as_text(block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": _marked(text_of(block["content"]) or "")}


def _marked(text: str) -> str:
    return f"<tool_result>\n{text}\n</tool_result>"


def text_of(content: Any) -> str | None:  # noqa: ANN401 - JSON
    """What a message says; None if it is more than text."""
    match content:
        case str():
            return content
        case list() if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            return "\n\n".join(part["text"] for part in content)
        case _:
            return None


def _is_null_call(item: Any) -> bool:  # noqa: ANN401 - JSON
    match item:
        case {"role": "assistant", "tool_calls": [_, *_]}:
            return item.get("content") is None
        case _:
            return False


def _type_of(block: Any) -> Any:  # noqa: ANN401 - JSON
    return block.get("type") if isinstance(block, dict) else None
