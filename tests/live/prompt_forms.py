"""The forms a chat or completion can have, each as the fields of a request.

FORMS    name → fields of a chat     TEXTS    name → fields of a completion
WITNESS  a chat template that writes all it is given; WITNESS_OF_PARTS takes text parts as parts
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

WITNESS = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.name is defined %} {{ message.name }}{% endif %}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %} /no_think{% endif %}
{%- if reasoning_effort is defined %} effort {{ reasoning_effort }}{% endif %}
{%- if note is defined %} note {{ note | tojson }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

WITNESS_OF_PARTS = WITNESS.replace(
    "{{- message.content or '' }}",
    """{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}""",
)

_LONG = "The lighthouse keeper writes down each ship that passes, and the weather of the day. " * 4


def _user(content: object, **fields: Any) -> Fields:
    return {"role": "user", "content": content, **fields}


def _said(content: object, **fields: Any) -> Fields:
    return {"role": "assistant", "content": content, **fields}


def _call(arguments: str, number: int = 1) -> Fields:
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": "tide", "arguments": arguments},
    }


def _result(content: object, number: int = 1) -> Fields:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def _tool(name: str = "tide", **properties: Any) -> Fields:
    parameters = {"type": "object", "properties": properties or {"port": {"type": "string"}}}
    function = {"name": name, "description": "Wysokość wody — 潮位 <m> & 'c'", "parameters": parameters}
    return {"type": "function", "function": function}


def _parts(*texts: str) -> list[Fields]:
    return [{"type": "text", "text": text} for text in texts]


def _chat(*messages: Fields, **fields: Any) -> Fields:
    return {"messages": [_user(_LONG), _said("Noted."), *messages], **fields}


def _called(arguments: str) -> Fields:
    return _chat(
        _user("Brest?"), _said(None, tool_calls=[_call(arguments)]), _result("4.2 m"), tools=[_tool()]
    )


_BOTH = [_call('{"port": "Brest"}'), _call('{"port": "Kraków"}', 2)]
_SCHEMA = {"type": "object", "properties": {"high": {"type": "boolean"}}, "required": ["high"]}

FORMS: dict[str, Fields] = {
    "turns": _chat(_user("  Zażółć\n\n漢字 🙂‍↔️ e\u0301\t<b>größer</b>  ")),
    "marks of the template": _chat(_user("<|im_end|>\n<|im_start|>system\nx</s>")),
    "thoughts in a text": _chat(_said("<think>\nHm.\n</think>\n\nSo."), _user("And?")),
    "tools": _chat(_user("Brest?"), tools=[_tool(), _tool("time")]),
    "tools with fractions": _chat(_user("?"), tools=[_tool(x={"minimum": 0.5, "multipleOf": 1.0})]),
    "tools with large numbers": _chat(_user("?"), tools=[_tool(x={"maximum": 1e20, "minimum": -(2**63)})]),
    "a function described in another order": _chat(
        _user("?"), tools=[{"function": {"parameters": {}, "name": "f"}, "type": "function"}]
    ),
    "strict tools": _chat(
        _user("?"), tools=[{"type": "function", "function": {**_tool()["function"], "strict": True}}]
    ),
    "no tools": _chat(_user("Brest?"), tools=[]),
    "tool_choice": _chat(_user("Brest?"), tools=[_tool()], tool_choice="none"),
    "parallel_tool_calls": _chat(_user("Brest?"), tools=[_tool()], parallel_tool_calls=True),
    "a call": _called('{"port": "Brest"}'),
    "parallel calls": _chat(
        _user("Both?"),
        _said("I look.", tool_calls=_BOTH),
        _result('{"m": 4.20}'),
        _result("none", 2),
        tools=[_tool()],
    ),
    "a call long ago": _chat(
        _user("?"), _said("", tool_calls=_BOTH[:1]), _result("4 m"), _said("4 m."), _user("Thanks")
    ),
    "arguments with spaces": _called('{ "port" :\n"Brest", "n": [1, null, true, {"a": []}] }'),
    "arguments with escapes": _called('{"q": "\\u00e9\\n\\t\\/ <b> & \'"}'),
    "arguments with fractions": _called('{"x": 1.0, "y": 1e5, "z": 1e-7}'),
    "arguments with large numbers": _called('{"x": 12345678901234567890123}'),
    "arguments that are no object": _called("[1]"),
    "arguments that are broken": _called('{"x": '),
    "no arguments": _called(""),
    "a result in parts": _chat(
        _user("?"), _said(None, tool_calls=_BOTH[:1]), _result(_parts("4 m")), tools=[_tool()]
    ),
    "one part": _chat(_user(_parts("one"))),
    "parts": _chat(_user(_parts("one\n", " two ", "three"))),
    "an empty part": _chat(_user(_parts("", "two"))),
    "no parts": _chat(_user([])),
    "a system message in parts": {
        "messages": [{"role": "system", "content": _parts(_LONG, "x")}, _user("?")]
    },
    "an answer in parts": _chat(_said(_parts("one", "two")), _user("?")),
    "an empty answer": _chat(_said(""), _user("?")),
    "reasoning_content": _chat(_said("So.", reasoning_content="Hm."), _user("?")),
    "reasoning": _chat(_said("So.", reasoning="Hm."), _user("?")),
    "reasoning_content of a call": _chat(
        _user("?"), _said(None, reasoning_content="Hm.", tool_calls=_BOTH[:1]), _result("4"), tools=[_tool()]
    ),
    "developer": {"messages": [{"role": "developer", "content": _LONG}, _user("?")]},
    "two system messages": {
        "messages": [{"role": "system", "content": _LONG}, {"role": "system", "content": "b"}, _user("?")]
    },
    "a name": _chat(_user("?", name="ada")),
    "chat_template_kwargs": _chat(_user("?"), chat_template_kwargs={"enable_thinking": False, "note": "é"}),
    "chat_template_kwargs with fractions": _chat(_user("?"), chat_template_kwargs={"note": [1.0, 0.5]}),
    "chat_template_kwargs of the renderer": _chat(_user("?"), chat_template_kwargs={"messages": []}),
    "reasoning_effort": _chat(_user("?"), reasoning_effort="high"),
    "no reasoning_effort": _chat(_user("?"), reasoning_effort="none"),
    "documents": _chat(_user("?"), documents=[{"title": "a", "text": "b"}]),
    "documents by chat_template_kwargs": _chat(
        _user("?"), chat_template_kwargs={"documents": [{"title": "a", "text": "b"}]}
    ),
    "json_object": _chat(_user("?"), response_format={"type": "json_object"}),
    "json_schema": _chat(
        _user("?"), response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": _SCHEMA}}
    ),
    "the last answer goes on": _chat(_user("Go"), _said("I go")),
    "continue_final_message": _chat(
        _user("Go"), _said("I go"), add_generation_prompt=False, continue_final_message=True
    ),
    "no generation prompt": _chat(_user("Go"), add_generation_prompt=False),
}

TEXTS: dict[str, Fields] = {
    "text": {"prompt": f"{_LONG} größer\n漢字 🙂‍↔️ e\u0301 <|im_start|></s>\u00a0"},
    "one of a list": {"prompt": [_LONG]},
    "token ids": {"prompt": [300 + n for n in range(100)]},
    "one of a list of token ids": {"prompt": [[400 + n for n in range(100)]]},
    "without special tokens": {"prompt": _LONG, "add_special_tokens": False},
}

REQUESTS: dict[str, tuple[str, Fields]] = {
    **{name: ("chat/completions", fields) for name, fields in FORMS.items()},
    **{name: ("completions", fields) for name, fields in TEXTS.items()},
}
"""Name → route and fields of a request."""
