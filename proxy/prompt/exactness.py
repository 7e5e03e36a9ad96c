"""Compares our token ids with the engine's: when a tokenizer is loaded, and on prompts that were served.

One wrong token makes every block hash after it wrong, and predictions confident and false. The test prompts
vary everything that chat templates read, and are sent as clients send them, some as streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_adapter import (
    ChatError,
    EngineAdapter,
    EngineRejected,
    EngineUnavailable,
    JsonBody,
    ModelNotLoaded,
    common_prefix,
)
from engine_adapter.prompt.forms import Form
from engine_adapter.types import TokenIds
from proxy.prompt.builder import Prompt, PromptBuilder
from proxy.prompt.render import CHAT_PATH, COMPLETIONS_PATH, ChatInput, CompletionInput, read_prompt
from proxy.prompt.tokenizer import LocalTokenizer
from proxy.prompt.trust import Exactness, FormTable

# The longest that an engine may take for a probe.
_PROBE_S = 10.0
# Special tokens in the probe of them.
_MARKS = 8
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city — today's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {
    "id": "call_12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Kraków"}'},
}
_HELLO = {"role": "user", "content": "Hello there."}
_SAID = {"role": "assistant", "content": " It's 3.14159…  "}


def _called(content: str | None) -> dict[str, Any]:
    answer = {"role": "tool", "tool_call_id": "call_12345", "content": "18 °C"}
    call = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    return {"messages": [_HELLO, call, answer], "tools": [_TOOL]}


_PROBES: dict[Form, dict[str, dict[str, Any]]] = {
    Form.PLAIN: {
        "one message": {"messages": [_HELLO]},
        "a stream": {"messages": [_HELLO], "stream": True, "stream_options": {"include_usage": True}},
        "system message": {"messages": [{"role": "system", "content": "Be brief."}, _HELLO]},
        "several turns, unicode": {
            "messages": [
                {"role": "user", "content": "Zażółć gęślą jaźń 漢字 🙂\n\n\tx = 1 "},
                _SAID,
                {"role": "user", "content": "  again?"},
            ],
            "stream": True,
        },
        "thoughts in a text": {
            "messages": [_HELLO, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."}, _HELLO]
        },
        "empty content": {"messages": [{"role": "user", "content": ""}]},
    },
    Form.TEXT_PARTS: {
        "text parts": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                }
            ]
        },
    },
    Form.TOOLS: {"tools": {"messages": [_HELLO], "tools": [_TOOL], "stream": True}},
    Form.TOOL_CALLS: {
        "tool call": _called(""),
        "tool call without content": _called(None),
        "tool call in a stream": _called("Look.") | {"stream": True},
    },
    Form.CONTINUED: {
        "no turn of the user last": {"messages": [_HELLO, _SAID]},
        "no generation prompt": {"messages": [_HELLO], "add_generation_prompt": False},
        "continue_final_message": {
            "messages": [_HELLO, _SAID],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    },
    Form.REASONING: {
        "thoughts": {"messages": [_HELLO, _SAID | {"reasoning_content": "Hm."}, _HELLO]},
        "thoughts before a tool call": {
            "messages": [
                _HELLO,
                {"role": "assistant", "content": "", "reasoning_content": "Hm.\n", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_12345", "content": "18 °C"},
            ],
            "tools": [_TOOL],
        },
    },
    Form.TEMPLATE_KWARGS: {
        f"enable_thinking: {value}": {
            "messages": [_HELLO, _SAID, _HELLO],
            "chat_template_kwargs": {"enable_thinking": value},
        }
        for value in (False, True)
    },
    Form.TEXT: {
        "text": {"prompt": "The quick brown fox, 12345 times."},
        "unicode text": {"prompt": " größer\n漢字 🙂‍↔️ e\u0301 <|im_start|></s>"},
        "a streamed text": {"prompt": "The quick", "stream": True},
    },
}


async def verify_exactness(builder: PromptBuilder, adapter: EngineAdapter) -> Exactness:
    """Compares our token ids with the engine's, form by form, and trusts whichever are right.

    Raises:
        EngineUnavailable: the engine went away meanwhile, or its model was unloaded.
    """
    if builder.local is None:
        builder.ask_engines(builder.reason)
        return builder.exactness
    info = builder.info
    table = FormTable(can_ask=builder.can_ask, detail=builder.reason)
    table.make_here("the engine has no route to check", alike=info.renders_alike)
    if builder.can_ask:
        probes = await asyncio.to_thread(_probes, info.model, builder.local)  # reads the whole vocabulary
        for form, bodies in probes.items():
            table.probe(form, await _compare(builder.local, adapter, form, bodies), "as the engine does")
        table.settle(alike=info.renders_alike)
    builder.forms = table
    return builder.exactness


def audit_tokens(builder: PromptBuilder, prompt: Prompt, theirs: TokenIds[int]) -> str | None:
    """Compares the ids of a served prompt with those that the engine reports for it.

    Returns:
        How they differ, if that is new; then the engines tokenise prompts of its form from now on, if they
        can.
    """
    if prompt.source == "client":
        return None
    difference = difference_of(prompt.token_ids, theirs)
    builder.agreed += difference is None
    builder.differed += difference is not None
    return difference if builder.forms.audit(prompt.forms, prompt.source, difference) else None


def difference_of(ours: TokenIds[int], theirs: TokenIds[int]) -> str | None:
    """Where two lists of token ids first differ, in words; None when they are the same."""
    if ours == theirs:
        return None
    shared = common_prefix(ours, theirs)
    if shared == min(len(ours), len(theirs)):
        return f"{len(ours)} tokens here, {len(theirs)} there"
    return f"token {shared} is {ours[shared]} here, {theirs[shared]} there"


def _probes(model: str, local: LocalTokenizer) -> dict[Form, dict[str, JsonBody]]:
    """The probes of each form, by name. That of special tokens has the first ones of the model."""
    marks = " x ".join(sorted(local.tokenizer.special_tokens)[:_MARKS])
    special = {"special tokens": {"messages": [_HELLO, _SAID, {"role": "user", "content": marks}]}}
    probes = _PROBES | ({Form.SPECIAL_TOKENS: special} if marks else {})
    return {
        form: {
            name: JsonBody(msgspec.json.encode({"model": model, **fields})) for name, fields in bodies.items()
        }
        for form, bodies in probes.items()
    }


async def _compare(
    local: LocalTokenizer, adapter: EngineAdapter, form: Form, bodies: Mapping[str, JsonBody]
) -> str | None:
    """How the first of a form's probes differs; None if none does. An engine that does not answer one probe
    costs its form.

    Raises:
        EngineUnavailable: it does not answer a plain chat.
        ModelNotLoaded: its model left meanwhile.
    """
    path = COMPLETIONS_PATH if form is Form.TEXT else CHAT_PATH
    for name, body in bodies.items():
        try:
            async with asyncio.timeout(_PROBE_S):
                difference = await _difference(local, adapter, path, body)
        except EngineRejected as error:
            difference = f"the engine refuses it ({error})"
        except ModelNotLoaded:
            raise
        except (EngineUnavailable, TimeoutError) as error:
            if form is Form.PLAIN:
                raise EngineUnavailable(str(error) or f"no answer within {_PROBE_S:g} s") from error
            difference = f"the engine did not answer ({error})"
        if difference is not None:
            return f"{name!r}: {difference}"
    return None


async def _difference(local: LocalTokenizer, adapter: EngineAdapter, path: str, body: JsonBody) -> str | None:
    """The difference between our ids of a test prompt and the engine's; None if equal, or if both refuse it.

    Raises:
        EngineRejected: only the engine refuses it.
    """
    ours = await _ours(local, path, body)
    try:
        theirs = await adapter.tokenize_if_loaded(path, body)
    except EngineRejected:
        if ours is None:
            return None
        raise
    if ours is None:
        return "kvpin cannot render it"
    return difference_of(ours, theirs)


async def _ours(local: LocalTokenizer, path: str, body: JsonBody) -> TokenIds[int] | None:
    source = read_prompt(path, body)
    try:
        if isinstance(source, ChatInput):
            return (await local.chat(source, body)).token_ids
        if isinstance(source, CompletionInput):
            return (await local.text(source)).token_ids
    except ChatError:
        return None
    return None
