"""Keeps answers to a structure, by llguidance: it says which tokens may come next.

Compiling runs in a thread of its own: a costly structure delays only requests that wait for one. llguidance
builds most of a structure when it first needs it, so the thread tries a few tokens, too. `_LIMITS` bounds the
size of a structure, `_SHARE_S` its time in the engine's steps. Equal structures are compiled once for each
cache salt: the time of a request would tell which structures other tenants use.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.body import SCHEMA_DATA, SCHEMAS_BY_NAME
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.described import give_back_memory
from engine_adapter.torch_engine.protocol import ApiError, PromptRequest
from engine_adapter.torch_engine.requests import RequestRefused
from engine_adapter.torch_engine.tool_calls import (
    HERMES,
    CallFormat,
    CallReader,
    ListedCalls,
    MarkedCalls,
    NamedCall,
)

MAX_GRAMMARS = 64
"""Structures that are kept compiled: 8 MB each at most, by `_LIMITS`."""
MAX_WAITING = 16
"""Structures that may wait to be compiled."""
# Of llguidance. The first takes 40 ms and 8 MB, where its own default takes 1.5 s and 200 MB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 30_000,
    "max_lexer_states": 10_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
# CPU time that a token of a structure may take, on average. Most take 10 µs.
_SHARE_S = 0.02
# CPU time beyond that, for a few costly tokens.
_MOST_S = 0.5
# Tokens that are tried before a structure is served.
_TRIED = 3
_TOO_COMPLEX = re.compile(r"too many|current row has|too complex", re.IGNORECASE)
# An answer could otherwise consist of spaces.
_SPACES = r"[\x20\x0A\x0D\x09]{1,20}"

# In llguidance's error of a pattern: what comes before and after it is about its own grammar.
_FAULT_OF_REGEX = re.compile(r"^error: (.+)$", re.MULTILINE)


@dataclass
class Grammar:
    """A compiled structure, after a part of an answer. The engine thread asks it for each token in turn: what
    it raises ends the request, RequestRefused as the client's fault, any other error as the engine's."""

    _matcher: Any  # llguidance is loaded when used
    _param: str
    _is_shared: bool = True
    _spent_s: float = 0.0

    def begin(self, answered: Sequence[int]) -> Grammar:
        """The structure after the beginning of an answer. Raises RequestRefused if that breaks it."""
        begun = Grammar(self._matcher, self._param)
        for token in answered:
            begun.accept(token)
        return begun

    def allow(self, words: NDArray[np.int32]) -> None:
        """Sets bit `i % 32` of `words[i // 32]` for each token `i` that may come next; all are 0 before.
        Raises RequestRefused when the structure is too complex to go on."""
        self._advance(lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))

    def accept(self, token: int) -> None:
        """Goes on by the chosen token."""
        if not self._matcher.is_stopped():  # what comes after the end is not its concern
            self._advance(lambda matcher: matcher.consume_token(token))

    def _advance(self, step: Callable[[Any], object]) -> None:
        """Does `step` on a matcher of its own, which is made here: waiting requests take no memory."""
        began_s = time.thread_time()
        if self._is_shared:
            self._matcher, self._is_shared = self._matcher.deep_copy(), False
        step(self._matcher)
        self._spent_s = max(self._spent_s + time.thread_time() - began_s - _SHARE_S / 2, 0.0)
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        if error or self._spent_s > _MOST_S:
            raise RequestRefused(
                f"{self._param} cannot be followed: {_in_short(error or 'too complex')}", param=self._param
            )


class Grammars:
    """Compiles structures for one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer, *, vocab_size: int, ends: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._ends = ends
        self._tokenizer: Any = None
        self._compiled: OrderedDict[bytes, Grammar] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting = 0

    async def compile(self, structure: Structure, salt: str | None = None) -> Grammar:
        """The grammar of a structure, for requests with this cache salt. Raises ApiError: 400 for a structure
        that is wrong or too complex; 501 without llguidance; 503 while too many structures wait."""
        digest = hashlib.sha256(msgspec.msgpack.encode((salt, structure.kind, structure.text))).digest()
        if digest in self._compiled:
            self._compiled.move_to_end(digest)
            return self._compiled[digest]
        if self._waiting >= MAX_WAITING:
            raise ApiError("too many structures wait to be compiled", status=503, code="engine_unavailable")
        self._waiting += 1
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, structure)
        finally:
            self._waiting -= 1
        self._compiled[digest] = grammar
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return grammar

    def load(self) -> None:
        """Prepares the tokenizer if llguidance is installed: takes a second and holds the interpreter."""
        with suppress(ImportError, ValueError):
            self._load()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, structure: Structure) -> Grammar:
        try:
            import llguidance  # noqa: PLC0415 - an extra
        except ImportError:
            raise ApiError(
                f"{structure.param} needs llguidance, which is not installed: pip install 'kvpin[engine]'",
                status=501,
                param=structure.param,
            ) from None
        if not self._ends:
            raise ApiError(f"{structure.param}: this model has no end token", param=structure.param)
        try:
            self._load()
            definition = _definition(structure, self._source)
        except (ValueError, RecursionError) as error:
            raise _refused(structure, str(error)) from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)
        fault = matcher.get_error() or self._try(matcher.deep_copy())
        if fault:
            del matcher
            give_back_memory()
            raise _refused(structure, fault)
        return Grammar(matcher, structure.param)

    def _try(self, matcher: Any) -> str:  # noqa: ANN401 - llguidance is loaded when used
        """Computes the first masks of a structure; returns llguidance's error, "" for none."""
        words = np.zeros(-(-self._vocab_size // 32), dtype="<i4")
        for _ in range(_TRIED):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            first = int(np.unpackbits(words.view(np.uint8), bitorder="little").argmax())
            if not matcher.consume_token(first) or matcher.is_stopped():
                break
        return str(matcher.get_error())

    def _load(self) -> None:
        if self._tokenizer is None and self._ends:
            from llguidance.hf import from_tokenizer  # noqa: PLC0415 - an extra

            source, ends = self._source.transformers, sorted(self._ends)
            self._tokenizer = from_tokenizer(source, n_vocab=self._vocab_size, eos_token=ends)


def _definition(structure: Structure, tokenizer: ChatTokenizer) -> str:
    """The structure in llguidance's words; raises ValueError."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415 - see Grammars

    if structure.kind == "json":
        return LLMatcher.grammar_from_json_schema(structure.text, defaults={"whitespace_pattern": _SPACES})
    if structure.kind == "tags":
        return _tags(json.loads(structure.text), tokenizer)
    return grammar_from(structure.kind, structure.text)


def _tags(tags: dict[str, Any], tokenizer: ChatTokenizer) -> str:
    """Text, and calls between marks. A mark may be a token of its own, or text."""
    from llguidance import grammar_from  # noqa: PLC0415 - see Grammars

    added = set(map(str, tokenizer.transformers.added_tokens_decoder.values()))
    begin, end = tags["begin"], tags["end"]
    schema = json.dumps(tags["schema"] | {"x-guidance": {"whitespace_pattern": _SPACES}})
    first = f"TEXT {begin}" if begin in added else "text_to_mark"
    last = end if end in added else json.dumps(end)
    lark = [
        "start: call* tail",
        f"call: {first} SPACE? body SPACE? {last}",
        f"body: %json {schema}",
        "SPACE: /[ \\n]+/",
        "tail: TEXT",
        "TEXT: /(.|\\n)*/",
    ]
    if begin not in added:
        lark.append(f"text_to_mark[lazy]: /(.|\\n)*{begin}/")
    return grammar_from("lark", "\n".join(lark))


def _refused(structure: Structure, reason: str) -> ApiError:
    if structure.kind == "regex" and (fault := _FAULT_OF_REGEX.search(reason)) is not None:
        reason = f"the pattern is wrong: {fault[1]}"
    return ApiError(f"{structure.param} cannot be used: {_in_short(reason)}", param=structure.param)


def _in_short(text: str) -> str:
    if _TOO_COMPLEX.search(text):
        return "it is too complex; use fewer and smaller repeats and alternatives"
    return " ".join(text.split())[:300]


# --- structure ------------------------------------------------------------------------------------------
# The structure that a request asks of its answer: a JSON schema, a pattern, a grammar, or calls of tools.
# `response_format` is OpenAI's. `structured_outputs` and the older `guided_*` are vLLM's.

MAX_BYTES = 64 << 10
"""Largest schema, pattern or list of choices."""
MAX_GRAMMAR_BYTES = 8 << 10
"""Largest grammar: to read GBNF takes time with the square of its size, 0.2 s for this."""
_ANY_OBJECT = {"type": "object"}
Kind = Literal["json", "regex", "choice", "grammar", "tags"]
_OF_VLLM = ("json", "regex", "choice", "grammar", "json_object")
# Hints of vLLM's, for how its backends compile a structure.
_HINTS = ("whitespace_pattern", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure that an answer must have."""

    # `json` (a schema), `regex`, `choice` (a list of texts), `grammar` (Lark or GBNF) or `tags`: text with
    # tool calls.
    kind: Kind
    text: str  # its definition; JSON for `json`, `choice` and `tags`
    param: str  # the field that asks for it


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The ways in which an answer may use tools."""

    structure: Structure | None = None  # what that asks of the answer; None where the model decides
    # Makes what reads the calls of one choice; None where the text stays as it is.
    reader: Callable[[], CallReader] | None = None
    format_: CallFormat | None = None  # of calls between text; None if there are none


def structure_of(request: PromptRequest) -> Structure | None:
    """The structure that a request asks for, None for none. Raises ApiError (400) for what cannot be asked
    for, and for two structures at once."""
    given = request.structured_outputs or {}
    for name, value in given.items():
        if value is not None and name not in (*_OF_VLLM, *_HINTS):
            param = f"structured_outputs.{name}"
            raise ApiError(f"{param} is not known: structures are {', '.join(_OF_VLLM)}", param=param)
    asked = [(f"guided_{kind}", kind, getattr(request, f"guided_{kind}")) for kind in _OF_VLLM]
    asked += [(f"structured_outputs.{kind}", kind, given.get(kind)) for kind in _OF_VLLM]
    of_vllm = (_of_kind(kind, value, param) for param, kind, value in asked)
    found = [each for each in (_of_format(request.response_format), *of_vllm) if each]
    if len(found) > 1:
        raise ApiError(f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param)
    return found[0] if found else None


def tool_use_of(
    tools: object, choice: object, *, parallel: bool | None, format_: CallFormat | None
) -> ToolUse | None:
    """The ways in which the answer may use tools; None for not at all. Raises ApiError (400)."""
    if choice in ("none", None, "auto") and not tools:
        return None
    functions, one = _functions(tools), parallel is False
    if choice == "none":
        return None
    if choice in (None, "auto"):
        if format_ is None:
            return ToolUse()
        reader = partial(MarkedCalls, format_, names=frozenset(functions), most=1 if one else None)
        return ToolUse(_strict(functions, format_), reader, format_)
    if not functions:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        calls = _any_call({name: _parameters(each) for name, each in functions.items()}, "parameters")
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls["anyOf"]}, "$defs": calls["$defs"]}
        schema |= {"maxItems": 1} if one else {}
        return ToolUse(_made("json", schema, "tools"), ListedCalls)
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in functions:
                raise ApiError(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")
            return ToolUse(_made("json", _parameters(functions[name]), "tools"), partial(NamedCall, name))
    raise ApiError('tool_choice is "none", "auto", "required" or names a function', param="tool_choice")


def _of_format(asked: object) -> Structure | None:
    match asked:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _made("json", _ANY_OBJECT, "response_format")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return _made("json", schema, "response_format")
    types = "response_format is of type text, json_object, or json_schema with json_schema.schema"
    raise ApiError(types, param="response_format")


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


def _any_call(functions: Mapping[str, dict[str, Any]], field: str) -> dict[str, Any]:
    """The schema of a call, from the parameters of each function. These stay whole, each as a definition:
    functions may have definitions of the same name."""
    places = {name: f"#/$defs/{index}" for index, name in enumerate(functions)}
    try:
        moved = {place[8:]: _moved(functions[name], place) for name, place in places.items()}
    except RecursionError:
        raise _too_deep("tools") from None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, field: {"$ref": place}},
            "required": ["name", field],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    return {"anyOf": calls, "$defs": moved}


def _moved(schema: Any, place: str, *, is_named: bool = False) -> Any:  # noqa: ANN401 - JSON
    """The schema with its references as they are at `place` of another schema. `is_named`: its keys are
    names, each of a schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if is_named:
        return {name: _moved(value, place) for name, value in schema.items()}
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else (value if key in SCHEMA_DATA else _moved(value, place, is_named=key in SCHEMAS_BY_NAME))
        for key, value in schema.items()
    }


def _strict(functions: Mapping[str, Mapping[str, Any]], format_: CallFormat) -> Structure | None:
    """The calls that `strict` tools allow, between text. Calls of other functions stay free."""
    strict = {name for name, function in functions.items() if function.get("strict") is True}
    if format_ is not HERMES or not strict:
        return None
    free = {name: _parameters(functions[name]) if name in strict else _ANY_OBJECT for name in functions}
    tags = {"begin": format_.opens, "end": format_.closes, "schema": _any_call(free, "arguments")}
    return _made("tags", tags, "tools")
