"""280 ways to write a chat, each as the fields of a request. Engines read some in ways of their own.

VARIANTS          name → fields of a chat: FORMS of prompt_forms.py, and what clients put in and leave out
compare(engine)   which of them kvpin makes otherwise than the engine, and believes to be exact
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine_adapter import JsonBody
from engine_adapter.prompt.chat import ChatTokenizer, load_transformers
from engine_adapter.prompt.encoders import exact_encoder
from engine_adapter.prompt.forms import Form
from engine_adapter.prompt.template_input import TemplateInput
from engine_adapter.types import Capability, EngineInfo, TokenIds
from proxy.errors import BadRequest
from proxy.prompt import Prompt, PromptBuilder, RegisteredTables, verify_exactness
from proxy.prompt.render import CHAT_PATH
from scripts.make_checkpoint import checkpoint_path
from scripts.shipped_models import shipped_models
from tests.live.prompt_forms import FORMS, WITNESS, WITNESS_OF_PARTS, Fields
from tests.live.server_world import MODEL

_BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=3f9a1;"
_SAID: Fields = {"role": "assistant", "content": "Noted. "}
_ASKED: Fields = {"role": "user", "content": " And the tide?"}
_TEXT: Fields = {"type": "text", "text": "one"}
_CALL: Fields = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "tide", "arguments": '{"port": "Brest", "day": 1}'},
}
_LONG_ID = "call_0123456789abcdef"
_RESULT: Fields = {"role": "tool", "tool_call_id": "call00001", "content": "4.2 m"}
_FUNCTION: Fields = {
    "name": "tide",
    "description": "Height of the tide",
    "parameters": {
        "type": "object",
        "properties": {"port": {"type": "string", "enum": ["Brest", "Kraków"]}},
        "required": ["port"],
    },
}
_TOOL: Fields = {"type": "function", "function": _FUNCTION}


def _without(fields: Fields, name: str) -> Fields:
    return {key: value for key, value in fields.items() if key != name}


def _chat(*messages: object, **fields: Any) -> Fields:
    return {"messages": list(messages), **fields}


def _answered(**changes: Any) -> Fields:
    return _chat(_ASKED, {**_SAID, **changes}, _ASKED)


def _asked(**changes: Any) -> Fields:
    return _chat(_ASKED, _SAID, {**_ASKED, **changes})


def _told(**changes: Any) -> Fields:
    return _chat({"role": "system", "content": "Be brief.", **changes}, _ASKED)


def _called(call: object, said: Fields | None = None, *after: Fields, **changes: Any) -> Fields:
    message = {"role": "assistant", "content": "", "tool_calls": [call], **(said or {})}
    return _chat(_ASKED, message, *(after or (_RESULT,)), **{"tools": [_TOOL], **changes})


def _arguments(given: object) -> Fields:
    return _called({**_CALL, "function": {"name": "tide", "arguments": given}})


def _tool(**changes: Any) -> Fields:
    return _chat(_ASKED, tools=[{"type": "function", "function": {**_FUNCTION, **changes}}])


def _each(name: str, *values: object, **more: object) -> list[Fields]:
    return [{**more, name: value} for value in values]


def _part(kind: str, name: str = "text", text: str = "two") -> Fields:
    return {"type": kind, name: text}


# Fields that clients write into messages: those of answers that they send back, and those that hold nothing.
_MARKED: Fields = {"cache_control": {"type": "ephemeral"}}
_OF_ANSWERS: list[Fields] = [
    *_each("tool_calls", [], None),
    *_each("tool_calls", [], None, content=None),
    *_each("content", "", [_TEXT], "<think>\nHm.\n</think>\n\nSo.", tool_calls=[]),
    *_each("content", None, "", " ", "\n\n x \n"),
    *_each("reasoning_content", "", None, "Hm.", "\n Hm. \n"),
    *_each("reasoning", "", None, "Hm."),
    *_each("reasoning", "", None, "Other.", reasoning_content="Hm."),
    *_each("content", None, "", [_TEXT], reasoning_content="Hm."),
    *_each("tool_calls", [], reasoning_content="Hm."),
    *_each("refusal", None, "No."),
    *_each("name", None, "", "ada"),
    *_each("prefix", True, False),
    *_each("task", None, "search"),
    *({name: None} for name in ("audio", "function_call", "tool_call_id", "stop_reason")),
    *({name: []} for name in ("annotations", "images", "reasoning_details")),
    *({"thinking": "Hm."}, {"id": "msg_1"}, {"weight": 1}, {"tools": [_TOOL]}, {"partial": True}),
    {"function_call": None, "tool_calls": [], "refusal": None, "audio": None, "annotations": []},
    {"function_call": None, "tool_calls": None, "reasoning_content": None, "provider_specific_fields": None},
    *({"content": [_part(kind, kind, "one")]} for kind in ("refusal", "thinking")),
    *({"content": [_part(kind, text="one")]} for kind in ("output_text", "input_text")),
    *_each("content", "<think>Hm.</think>So.", "</think>\n\nSo.", "<think>\n\n</think>\n\nSo."),
    *_each("content", "<think>Hm.", "So.<think>Hm.</think>"),
]
_SECOND_PARTS: list[Fields] = [
    *(_part("text", text=""), {"type": "text", "text": None}, {"text": "two"}, {"type": "text"}),
    *({**_TEXT, **_MARKED}, _part("input_text"), {**_TEXT, "id": "1"}, {"text": "two", "type": "text"}),
    _part("text", text=" two\n"),
]
_OF_QUESTIONS: list[Fields] = [
    *_each("name", None, "", "ada"),
    *_each("content", None, "", "  ", [], [_TEXT], [_TEXT, _TEXT], ["one", "two"]),
    *_each("content", *([_TEXT, part] for part in _SECOND_PARTS)),
    *_each("content", f"{_BILLING}\nHello", "a</s><s><|im_end|>b"),
    *_each("tool_calls", [], None),
    *_each("reasoning_content", "Hm.", ""),
    *({"tool_call_id": "call00001"}, {"id": "msg_1"}, _MARKED),
]
_OF_SYSTEM: list[Fields] = [
    *_each("content", "", None, " ", [], [_TEXT], [_TEXT, _TEXT]),
    *_each("content", _BILLING, f"{_BILLING}\n", f"{_BILLING}\nBe brief.", f" {_BILLING}\nBe brief."),
    *_each("content", [_part("text", text=_BILLING), _TEXT]),
    *_each("content", [_TEXT, _part("text", text=f"{_BILLING}\nBe brief.")]),
    *({"role": "developer", **more} for more in ({}, {"content": [_TEXT]}, {"tools": [_TOOL]})),
    *({"name": "ada"}, {"name": None}, {"tool_calls": []}, {"reasoning_content": None}),
]
_ARGUMENTS = (
    *("{}", "null", "1", '"text"', "[]", " {} ", '{"port": 1.0}', '{"port": 1e400}', '{"port": NaN}'),
    *('{"a": 1, "a": 2}', '{"b": 1, "a": {"d": [], "c": null}}', '{"port": "\\u0142\\n"}', '{"port": "ł"}'),
    *('{"": ""}', '{"port": "<|im_end|>"}', {"port": "Brest"}, {}, None, [], 1),
)
_OWN = _CALL["function"]
_CALLS: dict[str, Fields] = {
    **{
        f"a call and {name}": _called(_CALL, said)
        for name, said in {
            "a null": {"content": None},
            "a text": {"content": " I look.\n"},
            "a part": {"content": [_TEXT]},
            "no parts": {"content": []},
            "empty reasoning_content": {"reasoning_content": ""},
        }.items()
    },
    **{
        f"a call {name}": _called(call)
        for name, call in {
            "without id": _without(_CALL, "id"),
            "without type": _without(_CALL, "type"),
            "with an index": {"index": 0, **_CALL},
            "of another type": {"id": "c", "type": "custom", "custom": {"name": "tide", "input": "x"}},
            "in another order": {"function": _OWN, "type": "function", "id": "call00001"},
            "of arguments before the name": {**_CALL, "function": {"arguments": "{}", "name": "tide"}},
            "without arguments": {**_CALL, "function": {"name": "tide"}},
            "with a null": {**_CALL, "function": {**_OWN, "description": None}},
        }.items()
    },
    **{
        f"a result {name}": _called(_CALL, None, result)
        for name, result in {
            "with a name": {**_RESULT, "name": "tide"},
            "without id": _without(_RESULT, "tool_call_id"),
            "with a null id": {**_RESULT, "tool_call_id": None},
            "with calls": {**_RESULT, "tool_calls": []},
            "that failed": {**_RESULT, "is_error": True},
        }.items()
    },
    **{
        f"a result of {value!r:.40}": _called(_CALL, None, {**_RESULT, "content": value})
        for value in ("", None, " ", [], [_TEXT], [_TEXT, _TEXT], ["one"], '{"m": 4.20}', {"m": 4})
    },
    "a call without the field content": _chat(
        _ASKED, {"role": "assistant", "tool_calls": [_CALL]}, _RESULT, tools=[_TOOL]
    ),
    "a call and no tools": _called(_CALL, tools=None),
    "a long id": _called({**_CALL, "id": _LONG_ID}, None, {**_RESULT, "tool_call_id": _LONG_ID}),
    "a call and a question": _called(_CALL, None, _RESULT, _SAID, _ASKED),
    "a call unanswered": _called(_CALL, None, _ASKED),
    "a call twice": _called(_CALL, None, _RESULT, {**_SAID, "tool_calls": [_CALL]}, _RESULT),
    "a result alone": _chat(_ASKED, _RESULT),
    "a call at the end": _chat(_ASKED, {**_SAID, "tool_calls": [_CALL]}, tools=[_TOOL]),
}
_OF_FUNCTIONS: list[Fields] = [
    *_each("strict", True, False, None),
    *_each("description", None, ""),
    *_each("parameters", None, {}),
    *({"returns": {"type": "string"}}, {"defer_loading": None}),
    {"parameters": {"required": ["ł"], "properties": {"ł": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}}},
]
_TOOLS: dict[str, object] = {
    "a tool without description": [{**_TOOL, "function": _without(_FUNCTION, "description")}],
    "a tool without parameters": [{**_TOOL, "function": _without(_FUNCTION, "parameters")}],
    "a tool without type": [_without(_TOOL, "type")],
    "a tool of another type": [{"type": "web_search"}],
    "a tool with cache_control": [{**_TOOL, "cache_control": None}],
    "tools null": None,
}
_KWARGS: list[Any] = [
    *({}, None),
    *_each("thinking", True, "x"),
    *_each("enable_thinking", True, None),
    *({"reasoning_effort": "low"}, {"add_generation_prompt": False}, {"tools": []}, {"bos_token": "<x>"}),
    *({"add_vision_id": True}, {"preserve_thinking": True}, {"clear_thinking": False}, {"system": "x"}),
    *({"continue_final_message": True}, {"tokenize": True}, {"chat_template": None}),
    *({"date_string": "1 May"}, {"keep_all": [1, {"a": None}]}, {"tools_in_user_message": False}),
    *({"xml_tools": [_FUNCTION]}, {"custom_tools": [_TOOL]}),
]
_FIELDS: list[Fields] = [
    *_each("reasoning_effort", "low", "none", None),
    *_each("documents", [], None),
    *_each("add_special_tokens", True, False, None),
    *_each("add_generation_prompt", True, None),
    *({"response_format": {"type": "text"}}, {"parallel_tool_calls": False}, {"verbosity": "low"}),
    *({"thinking": {"type": "disabled"}}, {"functions": [_FUNCTION]}, {"include_reasoning": False}),
    *({"metadata": {}}, {"continue_final_message": False}, {"tool_choice": "none"}, {"tools": []}),
]
_TURNS: dict[str, tuple[object, ...]] = {
    "two questions": (_ASKED, _ASKED),
    "two answers": (_ASKED, _SAID, _SAID, _ASKED),
    "an answer first": (_SAID, _ASKED),
    "a system message last": (_ASKED, _SAID, {"role": "system", "content": "Be brief."}),
    "a system message between": (_ASKED, _SAID, {"role": "system", "content": "Be brief."}, _ASKED),
    "only a system message": ({"role": "system", "content": "Be brief."},),
    "only an answer": (_SAID,),
    **{
        f"the role {role!r}": (_ASKED, _SAID, {"role": role, "content": "x"}, _ASKED)
        for role in ("function", "model", "User", "ipython", "context", "", None)
    },
    "an answer with no calls last": (_ASKED, {**_SAID, "tool_calls": []}),
}


def _named(what: str, each: list[Fields], chat: Any) -> dict[str, Fields]:
    return {f"{what} with {fields!r:.90}": chat(**fields) for fields in each}


VARIANTS: dict[str, Fields] = {
    **FORMS,
    **_named("an answer", _OF_ANSWERS, _answered),
    **_named("a question", _OF_QUESTIONS, _asked),
    **_named("a system message", _OF_SYSTEM, _told),
    **{f"arguments {given!r}": _arguments(given) for given in _ARGUMENTS},
    **_CALLS,
    **_named("a tool", _OF_FUNCTIONS, _tool),
    **{name: _chat(_ASKED, tools=tools) for name, tools in _TOOLS.items()},
    **{f"tool_choice {how}": _chat(_ASKED, tools=[_TOOL], tool_choice=how) for how in ("required", "auto")},
    **{
        f"chat_template_kwargs {kwargs!r:.60}": _asked() | {"chat_template_kwargs": kwargs}
        for kwargs in _KWARGS
    },
    **{f"{fields!r:.60}": _answered() | fields for fields in _FIELDS},
    **{name: _chat(*turns) for name, turns in _TURNS.items()},
}


# Writes all that a template is given.
_DUMP = "{{ messages | tojson }}{{ tools | tojson }}"
_LOOP = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(shipped_models().glob("*.jinja"))
} | {
    "witness": WITNESS,
    "witness of parts": WITNESS_OF_PARTS,
    "dump": _DUMP,
    "dump of parts": _LOOP + _DUMP,
}


class Rendering(Protocol):
    """An engine's own code that makes prompts."""

    def use(self, template: str) -> None:
        """The chat template of all further chats."""

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        """The ids that kvpin gets when it asks. Raises EngineRejected."""

    async def tokenize_if_loaded(self, path: str, body: JsonBody) -> TokenIds[int]:
        """The same."""

    async def serve(self, body: JsonBody, ours: TokenIds[int] | None = None) -> TokenIds[int] | None:
        """The ids that a chat is served with; `ours` are sent in place of its text. None if refused."""


def model_with_bos(directory: Path) -> Path:
    """A copy of the checkpoint whose tokenizer has a first token: some templates name it."""
    model = directory / "model"
    shutil.copytree(checkpoint_path("model"), model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<|endoftext|>"}))
    return model


async def compare(
    engine: Rendering, given: TemplateInput, model: Path, only: str = ""
) -> tuple[Counter[str], list[str]]:
    """Builds all variants under all templates, as kvpin does after its probes. The engine serves `model`.

    Returns:
        Counts of prompts by who made them, and of forms that are made here. And the differences that go
        unnoticed: prompts that kvpin calls exact, and the engine makes otherwise or refuses.
    """
    counts, unnoticed = Counter[str](), list[str]()
    tokenizer = load_transformers(str(model))
    encoder = exact_encoder(tokenizer)
    for template, text in TEMPLATES.items():
        if only not in template:
            continue
        engine.use(text)
        tokenizer.chat_template = text
        chats = ChatTokenizer(tokenizer, source=template, encoder=encoder, template_input=given)
        builder = await _probed(engine, chats, given)
        rows = builder.forms.rows
        counts.update(f"{form}: {rows[form].source}" for form in Form)
        counts.update(f"{form}: no proof" for form in Form if "nothing is proven" in rows[form].detail)
        for name, fields in VARIANTS.items():
            body = JsonBody(msgspec.json.encode({"model": MODEL, **fields}))
            try:
                prompt = await builder.build(CHAT_PATH, body, salt=None)
            except BadRequest:
                counts["refused here"] += 1
                continue
            theirs = await engine.serve(body)
            counts["refused there" if theirs is None else "unknown" if prompt is None else prompt.source] += 1
            if prompt is not None and await _differs(engine, body, prompt, theirs):
                unnoticed.append(f"{template}: {name} ({prompt.source}: {', '.join(sorted(prompt.forms))})")
    return counts, unnoticed


async def _probed(engine: Rendering, chats: ChatTokenizer, given: TemplateInput) -> PromptBuilder:
    info = EngineInfo(MODEL, "a process", frozenset({Capability.TOKENIZE}), template_input=given)
    builder = PromptBuilder(info, tables=RegisteredTables(), engines=lambda _: [engine])
    builder.adopt(chats)
    await verify_exactness(builder, engine)
    return builder


async def _differs(engine: Rendering, body: JsonBody, prompt: Prompt, theirs: TokenIds[int] | None) -> bool:
    if not prompt.exact:
        return False
    if theirs is None:  # also with ids in place of the text?
        return await engine.serve(body, prompt.token_ids) is not None
    return prompt.token_ids != theirs
