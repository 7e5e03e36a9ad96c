"""OpenAI's Responses API, `/v1/responses` and `/v1/responses/input_tokens`, served as chats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from typing_extensions import override

from engine_adapter import JsonBody
from engine_adapter.causes import Code
from proxy.errors import BadRequest, NotFound
from proxy.request.stages import Event
from proxy.request.translate.fates import (
    RESPONSE_FIELDS,
    RESPONSE_ITEMS,
    RESPONSE_TOOLS,
    STOPS,
    UNKNOWN,
    Fate,
    plain,
    told,
)
from proxy.request.translate.responses_items import (
    CUSTOM_ARGUMENT,
    ItemEvent,
    Messages,
    Output,
    flat_name,
    hidden_parts,
    listed,
    thought,
)
from proxy.request.translate.responses_store import MAX_ID, ResponseStore, TenantResponses, Turn
from proxy.request.translate.translation import (
    BROKEN_OFF,
    Chat,
    ChatUsage,
    Choice,
    Error,
    Json,
    Translation,
    forced,
    named_event,
    read_chat,
)
from proxy.request.translate.wording import Names, Wording

RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"
# Fields of the API that a chat does not have. All others, such as `cache_salt`, stay in the chat.
_NOT_OF_A_CHAT = [name for name, row in RESPONSE_FIELDS.items() if row.fate is not Fate.KEPT]
_REFUSED = {name: row.here for name, row in RESPONSE_FIELDS.items() if row.fate is Fate.REFUSED}
# Fields of its request that a response repeats, each with the value that stands for nothing.
_REPEATED: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "prompt_cache_retention": None, "safety_identifier": None, "store": True, "temperature": None,
    "tool_choice": "auto", "top_logprobs": 0, "top_p": None, "user": None,
}  # fmt: skip
_CALLED = ("function", "custom")
_PLAIN_TEXT = {"type": "text"}
_INPUT_OF_A_CUSTOM_TOOL = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
}
_NAMES = Names(
    fields={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs",
    },
    within={".image_url.url": ".image_url", ".function": ""},
    types={"image_url": "input_image"},
)
_KINDS: Mapping[type[Any], str] = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
MAX_NAMED_BYTES = 64 << 20
"""The most that a request may name of what is kept: as much as the body of a request, by default."""
_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"


class _Tool(NamedTuple):
    """A tool of a request.

    Attributes:
        own: the tool, with its namespace if it is in one.
        number: of its entry in the request's `tools`.
        path: its place in the request.
        name: of the function that the chat offers for it; empty for a tool that only OpenAI runs.
    """

    own: Json
    number: int
    path: str
    name: str = ""


def may_name_more(body: JsonBody) -> bool:
    """True if a request may name responses or items that are kept: much longer ones, maybe, than itself."""
    raw = body.raw
    return b'"id"' in raw or b"\\u" in raw or isinstance(body.hint("previous_response_id"), str)


def _previous(body: JsonBody, shelf: TenantResponses) -> Turn | None:
    name = body.get("previous_response_id")
    if not name:
        return None
    stored = shelf.get(name) if isinstance(name, str) else None
    if stored is None:
        raise NotFound(
            f"Previous response with id {str(name)[:MAX_ID]!r} not found.",
            param="previous_response_id",
            code=Code.PREVIOUS_RESPONSE_NOT_FOUND,
        )
    return stored.turn


class _Room:
    """Counts what a request adds to its own body by naming responses and items, each maybe many times."""

    def __init__(self, previous: Turn | None) -> None:
        """Raises BadRequest if the turns up to `previous` are more than a chat may have."""
        self._left = MAX_NAMED_BYTES
        self.has_items = False
        if previous is not None:
            self.take(previous.total, "previous_response_id")

    def take(self, n_bytes: int, param: str) -> None:
        """Raises BadRequest if it is too much."""
        self._left -= n_bytes
        if self._left < 0:
            raise BadRequest(
                f"the conversation is longer than {MAX_NAMED_BYTES} bytes: shorten it and send it as input",
                param=param,
                code=Code.CONTEXT_LENGTH_EXCEEDED,
            )


def _items(body: JsonBody, shelf: TenantResponses, room: _Room, *, needed: bool) -> list[Json]:
    """The items of the request's own input; references are replaced by what they name."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if given is None and not needed:
        return []
    if not isinstance(given, list) or (needed and not given):
        raise BadRequest("input must be a text or a list of at least one item", param="input")
    return [_resolved(item, shelf, room, f"input[{index}]") for index, item in enumerate(given)]


def _resolved(item: Any, shelf: TenantResponses, room: _Room, param: str) -> Json:  # noqa: ANN401 - JSON
    match item:
        case {"id": str(item_id), **rest} if rest in ({}, {"type": "item_reference"}, {"type": None}):
            if (found := shelf.item(item_id)) is None:
                raise NotFound(f"Item with id {item_id[:MAX_ID]!r} not found.", param=f"{param}.id")
        case {"type": "reasoning", "id": str(item_id)} if not thought(item):
            found = shelf.item(item_id)
        case dict():
            found = None
        case _:
            raise BadRequest(f"{param} must be an object", param=param)
    own: Json = item
    if found is None:
        return own
    room.take(len(found), f"{param}.id")
    named: Json = msgspec.json.decode(found)
    if own.get("type") == "reasoning" and named.get("type") != "reasoning":
        return own  # the client gave another item the same id
    room.has_items = True
    return named


def _turn(previous: Turn | None, items: list[Json], response_id: str) -> Turn:
    """The request as it is stored. Items without an id of their own get one."""
    asked = {}
    prefixes = {"reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
    for index, item in enumerate(items):
        given, prefix = item.get("id"), prefixes.get(str(item.get("type")), "msg")
        own = given if isinstance(given, str) and given not in asked else ""
        item_id = own or f"{prefix}_{response_id[5:]}{index}"
        asked[item_id] = msgspec.json.encode(listed(item, item_id))
    return Turn(previous, asked, {})


def _of(body: JsonBody, name: str, kind: type[Any]) -> Any:  # noqa: ANN401 - of `kind`, or None
    return _checked(body.get(name), name, kind)


def _checked(value: Any, name: str, kind: type[Any]) -> Any:  # noqa: ANN401 - JSON, of `kind`, or None
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"{name} must be {_KINDS[kind]}", param=name)
    return value


def _tools(given: list[Any]) -> list[_Tool]:
    """The tools of a request, those of a namespace one by one. Raises BadRequest for what is no tool, and for
    two that a model could not tell apart."""
    tools, paths = list[_Tool](), dict[str, str]()
    for number, tool in enumerate(given):
        match tool:
            case {"type": "namespace", "name": str(space), "tools": [*inner]}:
                tools += [
                    _tool(each, number, f"tools[{number}].tools[{i}]", space) for i, each in enumerate(inner)
                ]
            case _:
                tools.append(_tool(tool, number, f"tools[{number}]"))
    for tool in tools:
        if tool.name and (other := paths.setdefault(tool.name, tool.path)) != tool.path:
            raise BadRequest(
                f"{tool.path} and {other} are both offered as the function {tool.name!r}: rename one",
                param=tool.path,
            )
    return tools


def _tool(tool: Any, number: int, path: str, space: str | None = None) -> _Tool:  # noqa: ANN401 - JSON
    match tool:
        case {"type": "function" | "custom", "name": str(name)} if name:
            own = tool if space is None else {**tool, "namespace": space}
            _checked(own.get("namespace"), f"{path}.namespace", str)
            return _Tool(own, number, path, flat_name(own))
        case {"type": str(kind)} if kind not in (*_CALLED, "namespace"):
            return _Tool(tool, number, path)
        case _:
            raise BadRequest(f"{path} is no tool: it must have a type and a name", param=path)


def _limit(tokens: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """The most tokens of the answer, if there is a limit."""
    if tokens is not None and not (type(tokens) is int and tokens > 0):
        raise BadRequest("max_output_tokens must be a whole number of at least 1", param="max_output_tokens")
    return {} if tokens is None else {"max_tokens": tokens}


def _choice(choice: Any, tools: list[Json], *, is_given: bool) -> Json:  # noqa: ANN401 - JSON
    """The chat's tools, and its choice among them. `auto` is what every engine does without a choice.
    `is_given`: the request has tools, of which all may be left out."""
    match choice:
        case None | "auto":
            chosen: Any = None
        case "none" | "required":
            chosen = choice
        case {"type": "function" | "custom", "name": str()} if flat_name(choice) in map(flat_name, tools):
            chosen = forced(flat_name(choice), len(tools))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            named = [tool for tool in allowed if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
            spaces = {tool["name"] for tool in named if tool.get("type") == "namespace"}
            names = {flat_name(tool) for tool in named}
            tools = [tool for tool in tools if flat_name(tool) in names or tool.get("namespace") in spaces]
            if mode == "required" and not tools:
                raise BadRequest("tool_choice allows no tool that is offered here", param="tool_choice")
            chosen = None if mode == "auto" else mode
        case _:
            raise BadRequest(
                "tool_choice must be none, auto, required, allowed tools, or a function or custom tool of "
                "`tools`: tools that OpenAI runs itself are left out here",
                param="tool_choice",
            )
    if is_given and not tools:
        chosen = None  # no tool is left to choose
    return {"tools": list(map(_function, tools)) or None, "tool_choice": chosen}


def _function(tool: Json) -> Json:
    """A tool of a chat, with its fields in the order that all engines keep."""
    parameters, description = tool.get("parameters"), tool.get("description")
    if tool["type"] == "custom":
        parameters = _INPUT_OF_A_CUSTOM_TOOL
        match tool.get("format"):
            case {"type": "grammar", "syntax": str(syntax), "definition": str(grammar)}:
                told = f"The input follows this grammar ({syntax}):\n{grammar}"
                description = f"{description}\n\n{told}" if isinstance(description, str) else told
    fields = {"name": flat_name(tool), "description": description, "parameters": parameters}
    strict = {"strict": True} if tool.get("strict") is True else {}
    kept = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": kept | strict}


def _format(wanted: Any) -> Json:  # noqa: ANN401 - JSON
    match wanted:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema", "name": str(), "schema": dict(), **rest}:
            kept = {name: value for name, value in rest.items() if value is not None}
            schema = {"name": wanted["name"], "schema": wanted["schema"], **kept}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case _:
            raise BadRequest(
                "text.format must be of type text, json_object or json_schema, the last with a name and a "
                "schema",
                param="text.format",
            )


def _repeated(body: JsonBody, tools: list[Json], text: Json, reasoning: Json) -> Json:
    given = {name: value for name in _REPEATED if (value := body.get(name)) is not None}
    if not all(isinstance(value, str) for value in (_of(body, "metadata", dict) or {}).values()):
        raise BadRequest("metadata must have texts as values", param="metadata")
    return {
        **_REPEATED,
        **given,
        "tools": tools,
        "text": {**text, "format": text.get("format") or _PLAIN_TEXT},
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "background": False,
        "service_tier": "default",
        "truncation": "disabled",
    }


class ResponseTranslation(Translation):
    """`Translation` of one request for a response.

    Attributes:
        turn: its items, which the next turn needs; None if nothing is to be stored.
        repeated: what the response repeats of the request.
        tools: the client's tools, by the name of the function that the chat offers for each.
        ttl: how long the prompt is to be kept, as the client wrote it.
    """

    def __init__(
        self, body: JsonBody, tenant: str | None, *, store: ResponseStore, counts: bool = False
    ) -> None:
        """Raises BadRequest if a field is wrong, or cannot be served, and NotFound if the request names a
        response or an item that is not kept."""
        for name, reason in _REFUSED.items():
            if body.get(name):
                raise BadRequest(reason, param=name)
        shelf, self._id = store.of(tenant), f"resp_{secrets.token_hex(24)}"
        previous = _previous(body, shelf)
        room = _Room(previous)
        items = _items(body, shelf, room, needed=previous is None)
        messages = Messages(_of(body, "instructions", str))
        if previous is not None:
            for _, stored in previous.conversation():
                messages.add(msgspec.json.decode(stored), "previous_response_id")
        for index, item in enumerate(items):
            messages.add(item, f"input[{index}]")
        messages.finish()
        include = _of(body, "include", list) or []
        given, choice = _of(body, "tools", list) or [], body.get("tool_choice")
        tools = _tools(given)
        offered = {tool.name: tool for tool in tools if tool.name}
        self.tools = {name: tool.own for name, tool in offered.items()}
        text, reasoning = _of(body, "text", dict) or {}, _of(body, "reasoning", dict) or {}
        changes: dict[str, Any] = dict.fromkeys(_NOT_OF_A_CHAT)
        changes["messages"] = messages.all
        changes |= _choice(choice, [*self.tools.values()], is_given=bool(given))
        cache_options = _of(body, "prompt_cache_options", dict) or {}
        prewarms = _checked(cache_options.get("prewarm"), "prompt_cache_options.prewarm", bool)
        self.prewarms, self.ttl = bool(prewarms), cache_options.get("ttl")
        changes |= _limit(1 if self.prewarms else body.get("max_output_tokens"))
        changes |= _format(text.get("format"))
        if (effort := reasoning.get("effort")) is not None:
            changes["reasoning_effort"] = effort
        if body.get("top_logprobs") or _LOGPROBS in include:
            changes |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
        if body.get("stream") is True:
            changes["stream_options"] = {"include_usage": True}
        stores = _of(body, "store", bool) is not False
        self.chat, self.model = body.replace(**changes), body.get("model")
        self.turn = _turn(previous, items, self._id) if stores else None
        fates = [RESPONSE_TOOLS.get(plain(tool["type"]), UNKNOWN).fate for tool in given]
        kept = [tool for tool, fate in zip(given, fates, strict=True) if fate is not Fate.LEFT_OUT]
        self.repeated = _repeated(body, kept, text, reasoning)
        self.source = body.replace(input=items) if room.has_items else None
        self.changed = told(
            ("tool", RESPONSE_TOOLS, (tool.own["type"] for tool in tools)),
            ("item", RESPONSE_ITEMS, (str(item.get("type") or "message") for item in items)),
            ("part", {}, (kind for item in items for kind in hidden_parts(item))),
            ("field", RESPONSE_FIELDS, (name for name in _NOT_OF_A_CHAT if name in body)),
        )
        self._output = Output(self.tools, seals=_SEALED in include)
        numbers = [offered[tool["function"]["name"]].number for tool in changes["tools"] or ()]
        self.wording = Wording(_NAMES, messages.places, numbers)
        self.counts, self._created_at = counts, int(time.time())
        self._store, self._tenant = store, tenant
        self._number = 0  # of the next event
        self._timings: dict[str, msgspec.Raw] = {}  # llama-server's, which its own events have, too

    @override
    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    @override
    def whole(self, choice: Choice) -> bytes:
        list(self._items_of(choice))  # the items are all that is wanted
        list(self._output.end(self._status))
        return self._final()

    @override
    def first(self) -> Iterable[Event]:
        begun = {"response": self._response("in_progress", [])}
        return self._told((f"response.{kind}", begun) for kind in ("created", "in_progress"))

    @override
    def more(self, chunk: Chat, choice: Choice) -> Iterable[Event]:
        events: list[Event] = []
        if chunk.prompt_progress is not UNSET:
            fields = {"response": self._response("in_progress", []), "prompt_progress": chunk.prompt_progress}
            events += self._told([("response.in_progress", fields)])
        if chunk.timings is not UNSET:
            self._timings = {"timings": chunk.timings}
        events += self._told(self._items_of(choice), self._timings)
        return events

    @override
    def failure(self, event: Event | None) -> Iterable[Event]:
        error = event.read(read_chat).error if event is not None else None
        if not isinstance(error, Error):
            error = Error(error or BROKEN_OFF)
        code = error.code if isinstance(error.code, str) else "server_error"
        param = error.param and self.wording.path(error.param)
        told = ("error", {"code": code, "message": self.wording.text(error.message), "param": param})
        return [*(self._first() if event is not None else ()), *self._told([told])]

    @override
    def last(self) -> Iterable[Event]:
        status = self._status
        yield from self._told(self._output.end(status))
        final = {"response": msgspec.Raw(self._final())}
        yield from self._told([(f"response.{status}", final)], self._timings)

    @property
    def _incomplete(self) -> str | None:
        """Why it is not complete."""
        stop = STOPS.get(self.finish or "")
        return stop.of_response if stop is not None and not self.prewarms else None

    @property
    def _status(self) -> str:
        return "completed" if self._incomplete is None else "incomplete"

    def _items_of(self, choice: Choice) -> Iterable[ItemEvent]:
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        return self._output.add(self.said(choice), logprobs or [])

    def _told(self, events: Iterable[ItemEvent], beside: Json = {}) -> Iterable[Event]:  # noqa: B006 - read
        """These events, numbered. `beside`: fields of each."""
        for kind, fields in events:
            yield named_event({"type": kind, "sequence_number": self._number, **fields, **beside})
            self._number += 1

    def _final(self) -> bytes:
        """The response, which is kept if the client wants that."""
        items, turn = self._output.items, self.turn
        content = msgspec.json.encode(self._response(self._status, items))
        if turn is not None:
            turn.answered = {item["id"]: msgspec.json.encode(item) for item in items}
            self._store.of(self._tenant).put(self._id, content, turn)
        return content

    def _response(self, status: str, items: list[Json]) -> Json:
        is_over = status != "in_progress"
        reason = self._incomplete if is_over else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if is_over else None,
            "status": status,
            "model": self.model,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self.repeated,
            "output": items,
            "usage": self._counted(self.usage or ChatUsage()) if is_over else None,
        }

    def _counted(self, usage: ChatUsage) -> Json:
        """The usage of an engine that keeps full blocks. Where it counts no reasoning, the share of reasoning
        in the text is that of the tokens."""
        written, is_long = usage.written(self.predicted.tokens_per_block), self.ttl == "12h"
        generated = 0 if self.prewarms else usage.completion_tokens or 0
        reasoning = min(usage.reasoning or ceil(self._output.thoughts * generated), generated)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": written,
                "cache_write_tokens_details": {
                    "ttl_30m_tokens": 0 if is_long else written,
                    "ttl_12h_tokens": written if is_long else 0,
                },
            },
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + generated,
        }
