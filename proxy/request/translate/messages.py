"""Anthropic's Messages API, `/v1/messages` and `/v1/messages/count_tokens`, served as chats.

A message always becomes the same chat messages, whatever stands before or after it. So the prompt of a
conversation's next turn begins with the same bytes, and its KV is reused.

    system                        one system message; its blocks are joined
    tool_use, tool_result         tool_calls of the assistant, messages of the role `tool`
    thinking                      reasoning_content of the assistant
    image                         image_url; those of tool results follow in the user's message
    text documents, search results    text
    the assistant's last message  is continued, as Anthropic's models do

What becomes of each type and field: `fates.py`. Fields that it does not name are kept. In the answers:

    reasoning, content, tool_calls    a `thinking` block, a `text` block, a `tool_use` block each
    refusal                       a `text` block, and stop_reason `refusal`
    finish_reason                 stop_reason
    usage                         input_tokens counts what was neither read from the cache nor written to it

A stream tells usage twice: in its first event what kvpin predicts, in its last what the engine reports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta, Raw, Struct
from typing_extensions import override

from engine_adapter import UNREADABLE, JsonBody, read_error
from engine_adapter.causes import Code
from engine_adapter.options import plain_error
from proxy.errors import BadRequest
from proxy.request.stages import Event
from proxy.request.translate.fates import (
    MESSAGE_BLOCKS,
    MESSAGE_FIELDS,
    MESSAGE_TOOLS,
    STOPS,
    TOLD,
    UNKNOWN,
    Fate,
    plain,
    text_of,
    told,
)
from proxy.request.translate.translation import (
    BROKEN_OFF,
    Chat,
    ChatUsage,
    Choice,
    Json,
    Translation,
    forced,
    named_event,
    read_chat,
)
from proxy.request.translate.wording import ANTHROPIC, Names, Place, Wording

# --- the fields that are read -------------------------------------------------------------------------


class _Base64(Struct, tag="base64"):
    media_type: str
    data: str


class _Url(Struct, tag="url"):
    url: str


class _PlainText(Struct, tag="text"):
    data: str


class _Content(Struct, tag="content"):
    content: str | list[_Text | _Image]


class _File(Struct, tag="file"):
    pass


class _Text(Struct, tag="text"):
    text: str


class _Image(Struct, tag="image"):
    source: _Base64 | _Url


class _Document(Struct, tag="document"):
    source: _PlainText | _Content | _Base64 | _Url | _File
    title: str | None = None
    context: str | None = None


class _SearchResult(Struct, tag="search_result"):
    source: str
    title: str
    content: list[_Text]


class _Thinking(Struct, tag="thinking"):
    thinking: str


class _ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Raw]


class _ToolReference(Struct, tag="tool_reference"):
    pass


class _BrowserState(Struct, tag="browser_state"):
    pass


_Shown = _Text | _Image | _Document | _SearchResult | _ToolReference | _BrowserState


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Shown] | None = None
    is_error: bool | None = None


class _OfService(Struct):
    """A block of a service: its texts are kept if its row says so."""

    name: Any = None
    input: Any = None
    content: Any = None

    @property
    def text(self) -> str:
        """What is kept of it."""
        if MESSAGE_BLOCKS[_kind(self)].fate is not Fate.TEXT:
            return ""
        text = text_of({name: getattr(self, name) for name in self.__struct_fields__})
        return f"\n{text}\n" if text else ""


if TYPE_CHECKING:
    _Block = _Shown | _Thinking | _ToolUse | _ToolResult | _OfService
else:
    _OF_SERVICE = [
        msgspec.defstruct(f"_OfService_{kind}", [], bases=(_OfService,), tag=kind)
        for kind, row in MESSAGE_BLOCKS.items()
        if row.fate in TOLD and kind not in ("tool_reference", "browser_state")
    ]
    _Block = Union[_Shown, _Thinking, _ToolUse, _ToolResult, *_OF_SERVICE]


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Raw] | None = None
    strict: bool | None = None


class _ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thought(Struct):
    type: str


class _Format(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Raw]


class _Output(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _Metadata(Struct):
    user_id: str | None = None


class _Request(Struct):
    """The fields of a request that differ from those of a chat."""

    messages: list[_Message]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: _Thought | None = None
    output_config: _Output | None = None
    output_format: _Format | None = None
    metadata: _Metadata | None = None
    container: Any = None
    mcp_servers: Any = None


_decode = msgspec.json.Decoder(_Request).decode
# Fields of Anthropic's that a chat does not have.
_LEFT_OUT = [name for name, row in MESSAGE_FIELDS.items() if row.fate is not Fate.KEPT]
_REFUSED = [name for name, row in MESSAGE_FIELDS.items() if row.fate is Fate.REFUSED]
_MARK = b'"cache_control"'
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_EFFORTS = {"xhigh": "high", "max": "high"}
_NAMES = Names(
    fields={
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "max_completion_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "stop": "stop_sequences",
        "user": "metadata.user_id",
    },
    within={
        ".image_url.url": ".source",
        ".image_url": ".source",
        ".function.parameters": ".input_schema",
        ".function": "",
    },
    types={"image_url": "image"},
)


def _read(body: JsonBody) -> _Request:
    """The request's own fields. Raises BadRequest, naming the field that is wrong."""
    try:
        request = _decode(body.raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except UNREADABLE as error:
        raise BadRequest(f"the body cannot be read: {error}", code=Code.INVALID_JSON) from error
    for name in _REFUSED:
        if getattr(request, name):
            raise BadRequest(
                f"kvpin cannot serve {name}, which needs Anthropic's own service: leave it out", param=name
            )
    if not request.messages:
        raise BadRequest("messages must have at least one message", param="messages")
    return request


def _invalid(fault: str) -> BadRequest:
    """The error of a fault as msgspec words it."""
    reason, _, path = fault.partition(" - at `$")
    param = path.rstrip("`").removeprefix(".")
    if (missing := _MISSING.fullmatch(reason)) is not None:
        param, reason = f"{param}.{missing[1]}".removeprefix("."), "It is missing"
    reason = plain_error(reason)
    return BadRequest(f"{param}: {reason[:1].lower()}{reason[1:]}", param=param)


def _tool_fields(request: _Request, offered: Sequence[int]) -> dict[str, Any]:
    given = request.tools or []
    tools = [_tool(given[index], f"tools[{index}]") for index in offered]
    fields: dict[str, Any] = {"tools": tools or None, "tool_choice": None}
    choice = request.tool_choice
    if choice is None:
        return fields
    names = {given[index].name for index in offered}
    if choice.type == "tool" and choice.name not in names:
        raise BadRequest(
            f"tool_choice.name: {choice.name!r} is no tool that can be called here: tools that only "
            "Anthropic's service knows are left out",
            param="tool_choice.name",
        )
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "none":
        fields["tool_choice"] = "none"
    elif choice.type == "any":
        fields["tool_choice"] = "required"
    elif choice.type == "tool" and choice.name is not None:
        fields["tool_choice"] = forced(choice.name, len(tools))
    if not tools and given:
        fields["tool_choice"] = None  # no tool is left to choose
    return fields


def _tool(tool: _Tool, path: str) -> dict[str, Any]:
    if tool.name is None or tool.input_schema is None:
        missing = "name" if tool.name is None else "input_schema"
        raise BadRequest(f"{path}.{missing} is missing", param=f"{path}.{missing}")
    # A field that is always there keeps prompts in the form that all engines render alike.
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _thinking_fields(request: _Request, body: JsonBody) -> dict[str, Any]:
    """Templates of models that can think know `enable_thinking`; others ignore it. A client's own counts."""
    kind = request.thinking.type if request.thinking is not None else None
    if kind not in ("enabled", "disabled"):
        return {}
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise BadRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled", **(given or {})}}


def _output_fields(request: _Request) -> dict[str, Any]:
    output, fields = request.output_config or _Output(), dict[str, Any]()
    if (wanted := output.format or request.output_format) is not None:
        schema = {"name": "answer", "schema": wanted.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output.effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(output.effort, output.effort)
    return fields


# --- messages -----------------------------------------------------------------------------------------


def _messages(request: _Request) -> Iterator[tuple[dict[str, Any], Place]]:
    """The messages of the chat, and what each is made of."""
    system = request.system  # joined as vLLM and llama-server join it
    if text := system if isinstance(system, str) else "".join(block.text for block in system or ()):
        yield {"role": "system", "content": text}, Place("system", "system")
    for index, message in enumerate(request.messages):
        at = f"messages[{index}]"
        place = Place(at, f"{at}.content")
        content = message.content
        blocks: list[_Block] = [_Text(content)] if isinstance(content, str) else content
        if message.role == "user":
            yield from _user(blocks, place)
        elif message.role == "assistant":
            yield _assistant(blocks, place.content), place
        else:
            texts = (_text(block, f"{place.content}[{i}]") for i, block in enumerate(blocks))
            yield {"role": "system", "content": "".join(texts)}, place


def _user(blocks: list[_Block], place: Place) -> Iterator[tuple[dict[str, Any], Place]]:
    """The results of tools, then what the user says."""
    parts, places = list[dict[str, Any]](), list[str]()
    results = 0
    for index, block in enumerate(blocks):
        at = f"{place.content}[{index}]"
        if isinstance(block, _ToolResult):
            text, shown = _result(block, at)
            yield (
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": text},
                Place(at, f"{at}.content"),
            )
            results += 1
        elif isinstance(block, _OfService):
            shown = [_text_part(block.text)] if block.text else []
        elif isinstance(block, _Shown):
            shown = _parts(block, at)
        else:
            raise _misplaced(block, at, "user")
        parts += shown
        places += [at] * len(shown)
    if parts or not results:
        # A single text stays a string: for Anthropic, both mean the same.
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        content = parts[0]["text"] if is_text else parts or ""
        yield (
            {"role": "user", "content": content},
            place if isinstance(content, str) else place._replace(parts=places),
        )


def _assistant(blocks: list[_Block], path: str) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        match block:
            case _Text() | _OfService():
                texts.append(block.text)
            case _Thinking():
                thoughts.append(block.thinking)
            case _ToolUse():
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, f"{path}[{index}]", "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _result(block: _ToolResult, path: str) -> tuple[str, list[dict[str, Any]]]:
    """Text and images of a tool's result: chats have only text in it."""
    content = block.content
    shown: list[_Shown] = [_Text(content)] if isinstance(content, str) else list(content or ())
    parts = [part for i, each in enumerate(shown) for part in _parts(each, f"{path}.content[{i}]")]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    images = [part for part in parts if part["type"] != "text"]
    return f"Error: {text}" if block.is_error else text, images


def _parts(block: _Shown, path: str) -> list[dict[str, Any]]:
    """The content of a block, as parts of a chat's message."""
    match block:
        case _Text():
            return [_text_part(block.text)]
        case _Image():
            source = block.source
            url = source.url if isinstance(source, _Url) else f"data:{source.media_type};base64,{source.data}"
            return [{"type": "image_url", "image_url": {"url": url}}]
        case _Document():
            return _document(block, path)
        case _SearchResult():
            texts = [block.title, block.source, *(each.text for each in block.content)]
            return [_text_part("\n".join(texts))]
        case _ToolReference() | _BrowserState():
            return []


def _document(block: _Document, path: str) -> list[dict[str, Any]]:
    heads = [_text_part(head) for head in (block.title, block.context) if head]
    match block.source:
        case _PlainText():
            return [*heads, _text_part(block.source.data)]
        case _Content():
            content = block.source.content
            inner = [_Text(content)] if isinstance(content, str) else content
            return [*heads, *(part for each in inner for part in _parts(each, path))]
        case _:
            raise BadRequest(
                f"{path}.source: PDFs and files cannot be read here; send the document's text or images",
                param=f"{path}.source",
            )


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _text(block: _Block, path: str) -> str:
    if not isinstance(block, _Text | _OfService):
        raise _misplaced(block, path, "system")
    return block.text


def _misplaced(block: _Block, path: str, role: str) -> BadRequest:
    return BadRequest(
        f"{path}.type: a message of the role {role!r} has no {_kind(block)!r}", param=f"{path}.type"
    )


def _with_shown(blocks: list[_Block]) -> Iterator[_Block]:
    """The blocks, and those within results of tools."""
    for block in blocks:
        yield block
        if isinstance(block, _ToolResult) and isinstance(block.content, list):
            yield from block.content


def _kind(block: Struct) -> str:
    return str(block.__struct_config__.tag)


# --- answers ------------------------------------------------------------------------------------------

# Clients send a thinking block back only if it is signed. kvpin does not check it.
_SIGNATURE = "kvpin"
# The status of each error of kvpin: it decides the type of the error.
_STATUSES = {str(code): code.status for code in Code}


class MessageTranslation(Translation):
    """`Translation` of `/v1/messages`, or with `counts` of `/v1/messages/count_tokens`. `marks_cache`: the
    request marks what is to be cached."""

    def __init__(self, body: JsonBody, *, counts: bool = False) -> None:
        """Raises BadRequest, naming a field that is wrong or cannot be served."""
        request = _read(body)
        if request.max_tokens is None and not counts:
            raise BadRequest("max_tokens is missing", param="max_tokens")
        self.model, self.counts, self.prewarms = body.hint("model"), counts, request.max_tokens == 0
        self.marks_cache = _MARK in body.raw
        changes: dict[str, Any] = dict.fromkeys(_LEFT_OUT)
        messages = list(_messages(request))
        changes["messages"] = [message for message, _ in messages]
        # Tools that only a service runs are left out.
        rows = [MESSAGE_TOOLS.get(plain(tool.type or "custom"), UNKNOWN) for tool in request.tools or ()]
        offered = [index for index, row in enumerate(rows) if row.fate is Fate.KEPT]
        changes |= _tool_fields(request, offered)
        if self.prewarms:
            changes["max_tokens"] = 1
        if request.stop_sequences:
            changes["stop"] = request.stop_sequences
        if request.stream:
            changes["stream_options"] = {"include_usage": True}
        if request.metadata is not None and request.metadata.user_id:
            changes["user"] = request.metadata.user_id
        last = request.messages[-1]
        calls = isinstance(last.content, list) and any(isinstance(each, _ToolUse) for each in last.content)
        if last.role == "assistant" and last.content and not calls:  # it is the beginning of the answer
            changes |= {"continue_final_message": True, "add_generation_prompt": False}
        self.chat = body.replace(**changes, **_thinking_fields(request, body), **_output_fields(request))
        self.wording = Wording(_NAMES, [place for _, place in messages], offered)
        contents = [message.content for message in request.messages if isinstance(message.content, list)]
        self.changed = told(
            ("tool", MESSAGE_TOOLS, (tool.type or "custom" for tool in request.tools or ())),
            ("block", MESSAGE_BLOCKS, (_kind(block) for blocks in contents for block in _with_shown(blocks))),
            ("field", MESSAGE_FIELDS, (name for name in _LEFT_OUT if name in body)),
        )
        self._id = f"msg_{os.urandom(12).hex()}"
        self._kind = ""  # of the open block
        self._call: int | None = None  # index of the open block's call
        self._index = -1  # of the open block, or of the last one
        self._uses_tool = self._refuses = False
        self._sequence: str | None = None  # that ended it

    @override
    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    @override
    def whole(self, choice: Choice) -> bytes:
        said = self.said(choice)
        blocks = [_thinking(said.thoughts, _SIGNATURE)] if said.thoughts else []
        blocks += [_text_part(text)] if (text := said.content or said.refusal) else []
        self._refuses = bool(said.refusal)
        calls, self._sequence = said.tool_calls or (), choice.stop_sequence
        blocks += [_tool_use(call.id, call.name, _arguments(call.arguments)) for call in calls]
        self._uses_tool = bool(calls)
        return msgspec.json.encode(
            self._message(blocks, self._stop(), self._counted(self.usage or ChatUsage()))
        )

    @override
    def first(self) -> Iterable[Event]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, self._foreseen())
        return _told({"type": "message_start", "message": message}, {"type": "ping"})

    @override
    def more(self, chunk: Chat, choice: Choice) -> Iterable[Event]:
        if choice.finish_reason:
            self._sequence = choice.stop_sequence
        said = self.said(choice)
        events: list[Json] = []
        if said.thoughts:
            events += self._open(_thinking("", ""))
            events.append(self._delta("thinking_delta", thinking=said.thoughts))
        if said.refusal:
            self._refuses = True
        if text := said.content or said.refusal:
            events += self._open(_text_part(""))
            events.append(self._delta("text_delta", text=text))
        for call in said.tool_calls or ():
            if call.name and (index := call.index or 0) != self._call:
                self._uses_tool = True
                events += self._open(_tool_use(call.id, call.name, {}), index)
            if call.arguments and self._call is not None:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return _told(*events)

    @override
    def failure(self, event: Event | None) -> Iterable[Event]:
        status, message, request_id = 500, BROKEN_OFF, None
        if event is not None:
            error = read_error(event.data)
            status = _STATUSES.get(str(error.code), error.named_status or status)
            message = self.wording.text(error.message)
            request_id = event.read(read_chat).request_id
        error_of = ANTHROPIC.error(status, message, kind="server_error", request_id=request_id)
        return (Event(ANTHROPIC.error_event(error_of)),)

    @override
    def last(self) -> Iterable[Event]:
        usage = self._foreseen() if self.usage is None else self._counted(self.usage)
        delta = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        return _told(*self._close(), delta, {"type": "message_stop"})

    def _message(self, blocks: list[Json], stop: Json, usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model or ""}
        return {**head, "content": blocks, **stop, "usage": usage}

    def _open(self, block: Json, call: int | None = None) -> list[Json]:
        """The events before a delta of such a block: none if one is open."""
        if block["type"] == self._kind and call == self._call:
            return []
        events = self._close()
        self._kind, self._call, self._index = block["type"], call, self._index + 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, **added: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **added}}

    def _close(self) -> list[Json]:
        if not self._kind:
            return []
        signed = [self._delta("signature_delta", signature=_SIGNATURE)] if self._kind == "thinking" else []
        self._kind, self._call = "", None
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _stop(self) -> Json:
        """Why the answer ended. Some engines end a call that was asked for with `stop`."""
        if self.finish == "stop" and self._sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._sequence}
        finish = "tool_calls" if self.finish == "stop" and self._uses_tool else self.finish or "stop"
        finish = "content_filter" if self._refuses else finish
        return {"stop_reason": STOPS.get(finish, STOPS["stop"]).of_message, "stop_sequence": None}

    def _foreseen(self) -> Json:
        """The usage before the engine reports it."""
        cached = self.predicted.cached_tokens
        return _counts(max((self.predicted.prompt_tokens or 0) - cached, 0), 0, cached, 0)

    def _counted(self, usage: ChatUsage) -> Json:
        read = usage.cached
        # Without a mark of what is to be cached, Anthropic counts nothing as written.
        written = usage.written(self.predicted.tokens_per_block) if self.marks_cache else 0
        fresh = max(usage.prompt_tokens - read - written, 0)
        return _counts(fresh, written, read, 0 if self.prewarms else usage.completion_tokens or 0)


def _counts(fresh: int, written: int, read: int, output: int) -> Json:
    """A usage: its first three counts together are the prompt's."""
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": output,
    }


def _told(*events: Json) -> Iterable[Event]:
    return map(named_event, events)


def _thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call_id: str | None, name: str, arguments: dict[str, Any]) -> Json:
    """A call. One that the engine gave no id gets one."""
    ident = call_id or f"toolu_{os.urandom(12).hex()}"
    return {"type": "tool_use", "id": ident, "name": name, "input": arguments}


def _arguments(text: str) -> dict[str, Raw]:
    """The arguments of a tool call; {} if the text is no JSON object, for example because it was cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
