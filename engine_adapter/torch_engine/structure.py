"""The structure that a request asks of its answer: a JSON schema, a pattern, a grammar, or calls of tools.

`response_format` is OpenAI's. `structured_outputs` and the older `guided_*` are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine_adapter.torch_engine.protocol import PromptRequest
from engine_adapter.torch_engine.tool_calls import (
    HERMES,
    CallFormat,
    CallReader,
    ListedCalls,
    MarkedCalls,
    NamedCall,
)
from engine_adapter.torch_engine.web import ApiError

MAX_BYTES = 64 << 10
"""Largest schema, pattern or list of choices."""
MAX_GRAMMAR_BYTES = 8 << 10
"""Largest grammar: to read GBNF takes time with the square of its size, 0.2 s for this."""
_ANY_OBJECT = {"type": "object"}
# Their values are data, not schemas.
_PLAIN = ("const", "enum", "default", "examples")
Kind = Literal["json", "regex", "choice", "grammar", "tags"]
_OF_VLLM = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure that an answer must have.

    Attributes:
        kind: `json` (a schema), `regex`, `choice` (a list of texts), `grammar` (Lark or GBNF) or `tags`: text
            with tool calls.
        text: its definition; JSON for `json`, `choice` and `tags`.
        param: the field that asks for it.
    """

    kind: Kind
    text: str
    param: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The ways in which an answer may use tools.

    Attributes:
        structure: what that asks of the answer; None where the model decides.
        named: the one function that must be called.
        listed: the answer is a list of calls.
        one: at most one call.
    """

    structure: Structure | None = None
    named: str | None = None
    listed: bool = False
    one: bool = False
    names: frozenset[str] = frozenset()

    def reader(self, format_: CallFormat | None) -> CallReader | None:
        """Reads the calls of one choice; None where the text stays as it is."""
        if self.named is not None:
            return NamedCall(self.named)
        if self.listed:
            return ListedCalls()
        most = 1 if self.one else None
        return None if format_ is None else MarkedCalls(format_, names=self.names, most=most)


def structure_of(request: PromptRequest) -> Structure | None:
    """The structure that a request asks for, None for none. Raises ApiError (400) for what cannot be asked
    for, and for two structures at once."""
    found = [each for each in (_of_format(request.response_format), *_of_vllm(request)) if each]
    if len(found) > 1:
        raise ApiError(f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param)
    return found[0] if found else None


def tool_use_of(
    tools: object, choice: object, *, parallel: bool | None, format_: CallFormat | None
) -> ToolUse | None:
    """The ways in which the answer may use tools; None for not at all. Raises ApiError (400)."""
    if choice in ("none", None, "auto") and not tools:
        return None
    functions = _functions(tools)
    one = parallel is False
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return ToolUse(_strict(functions, format_), one=one, names=frozenset(functions))
    if not functions:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return ToolUse(_made("json", _list_of_calls(functions, one=one), "tools"), listed=True)
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in functions:
                raise ApiError(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")
            return ToolUse(_made("json", _parameters(functions[name]), "tools"), named=name)
    raise ApiError('tool_choice is "none", "auto", "required" or names a function', param="tool_choice")


def _of_format(asked: object) -> Structure | None:
    match asked:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _made("json", _ANY_OBJECT, "response_format")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return _made("json", schema, "response_format")
    raise ApiError(
        "response_format is of type text, json_object, or json_schema with json_schema.schema",
        param="response_format",
    )


def _of_vllm(request: PromptRequest) -> list[Structure | None]:
    asked = {f"guided_{kind}": (kind, getattr(request, f"guided_{kind}")) for kind in _OF_VLLM}
    given = request.structured_outputs or {}
    asked |= {f"structured_outputs.{kind}": (kind, given.get(kind)) for kind in _OF_VLLM}
    return [_of_kind(kind, value, param) for param, (kind, value) in asked.items()]


def _of_kind(kind: str, value: object, param: str) -> Structure | None:
    match kind, value:
        case _, None | False:
            return None
        case "json_object", True:
            return _made("json", _ANY_OBJECT, param)
        case "json", dict() | bool():
            return _made("json", value, param)
        case (("json" | "regex" | "grammar"), str()):
            return _checked(Structure(kind, value, param))
        case "choice", list() if value and all(isinstance(each, str) for each in value):
            return _made("choice", value, param)
    raise ApiError(f"{param} is no {kind}", param=param)


def _made(kind: Kind, value: object, param: str) -> Structure:
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        raise _too_deep(param) from None
    return _checked(Structure(kind, text, param))


def _too_deep(param: str) -> ApiError:
    return ApiError(f"{param} is nested too deeply", param=param)


def _checked(structure: Structure) -> Structure:
    size = len(structure.text.encode())
    limit = MAX_GRAMMAR_BYTES if structure.kind == "grammar" else MAX_BYTES
    if size > limit:
        raise ApiError(f"{structure.param} has {size} bytes; the limit is {limit}", param=structure.param)
    return structure


def _functions(tools: object) -> dict[str, Mapping[str, Any]]:
    """The functions of the tools, by name. What is no object, the chat's template refuses."""
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        match tool:
            case {"function": {"name": str(name)} as function}:
                functions[name] = function
            case {}:
                param = f"tools[{index}].function"
                raise ApiError(f"{param} must be an object with a name", param=param)
    return functions


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, dict) and parameters else _ANY_OBJECT


def _list_of_calls(functions: Mapping[str, Mapping[str, Any]], *, one: bool) -> dict[str, Any]:
    calls = _any_call({name: _parameters(function) for name, function in functions.items()}, "parameters")
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls["anyOf"]}, "$defs": calls["$defs"]}
    return schema | {"maxItems": 1} if one else schema


def _any_call(functions: Mapping[str, dict[str, Any]], field: str) -> dict[str, Any]:
    """The schema of a call, from the parameters of each function. These stay whole, each as a definition:
    functions may have definitions of the same name."""
    places = {name: f"#/$defs/{index}" for index, name in enumerate(functions)}
    try:
        moved = {place[8:]: _moved(functions[name], place) for name, place in places.items()}
    except RecursionError:
        raise _too_deep("tools") from None
    return {
        "anyOf": [_call_schema(name, {"$ref": place}, field) for name, place in places.items()],
        "$defs": moved,
    }


def _moved(schema: Any, place: str) -> Any:  # noqa: ANN401 - JSON
    """The schema with its references as they are at `place` of another schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else (value if key in _PLAIN else _moved(value, place))
        for key, value in schema.items()
    }


def _call_schema(name: str, parameters: object, field: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, field: parameters},
        "required": ["name", field],
        "additionalProperties": False,
    }


def _strict(functions: Mapping[str, Mapping[str, Any]], format_: CallFormat | None) -> Structure | None:
    """The calls that `strict` tools allow, between text. Calls of other functions stay free."""
    if format_ is not HERMES or not any(function.get("strict") is True for function in functions.values()):
        return None
    free = {
        name: _parameters(function) if function.get("strict") is True else dict(_ANY_OBJECT)
        for name, function in functions.items()
    }
    tags = {"begin": format_.opens, "end": format_.closes, "schema": _any_call(free, "arguments")}
    return _made("tags", tags, "tools")
