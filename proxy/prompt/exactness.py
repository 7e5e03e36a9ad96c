"""Compares our token ids with the engine's: when a tokenizer is loaded, and on prompts that were served.

One wrong token makes every block hash after it wrong, and predictions confident and false. The test prompts
vary everything that chat templates read, and are sent as clients send them, some as streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from engine_adapter import (
    ChatError,
    EngineAdapter,
    EngineRejected,
    EngineUnavailable,
    JsonBody,
    ModelNotLoaded,
    common_prefix,
)
from engine_adapter.body import BILLING
from engine_adapter.prompt.forms import Form
from engine_adapter.prompt.template_trials import PROBES, Messages, MessageShape, Roles, lost_shapes, trials
from engine_adapter.types import TokenIds
from proxy.prompt.builder import Prompt, PromptBuilder
from proxy.prompt.render import CHAT_PATH, COMPLETIONS_PATH, ChatInput, CompletionInput, read_prompt
from proxy.prompt.tokenizer import LocalTokenizer
from proxy.prompt.trust import Exactness, FormTable

# The longest that an engine may take for a probe.
_PROBE_S = 10.0
_UNPROVEN = "nothing is proven: the engine refuses all probes, and so does kvpin"
# Special tokens in the probe of them.
_MARKS = 8
# Some families take nothing but nine letters and digits.
_CALL_ID = "call00001"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city — today's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Kraków"}'},
}
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "content": "18 °C"}


def _says(role: str, content: object, **fields: object) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


_HELLO = _says("user", "Hello there.")
_SAID = _says("assistant", " It's 3.14159…  ")
# Fields of an answer that hold nothing.
_EMPTY = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls")) | {"annotations": []}


def _chat(*messages: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"messages": [*messages], **fields}


def _called(content: str | None, **fields: object) -> dict[str, Any]:
    """A chat in which a tool was called; `fields`: more of the call's message."""
    return _chat(_HELLO, _says("assistant", content, **fields, tool_calls=[_CALL]), _RESULT, tools=[_TOOL])


_PROBES: dict[Form, dict[str, dict[str, Any]]] = {
    Form.PLAIN: {
        "one message": _chat(_HELLO),
        "a stream": _chat(_HELLO, stream=True, stream_options={"include_usage": True}),
        "system message": _chat(_says("system", "Be brief."), _HELLO),
        "several turns, unicode": _chat(
            _says("user", "Zażółć gęślą jaźń 漢字 🙂\n\n\tx = 1 "),
            _SAID,
            _says("user", "  again?"),
            stream=True,
        ),
        "thoughts in a text": _chat(_HELLO, _says("assistant", "<think>\nHm.\n</think>\n\nSo."), _HELLO),
        "empty content": _chat(_says("user", "")),
    },
    Form.TEXT_PARTS: {
        "text parts": _chat(_says("user", [{"type": "text", "text": text} for text in ("one", "two")])),
    },
    Form.TOOLS: {"tools": _chat(_HELLO, tools=[_TOOL], stream=True)},
    Form.TOOL_CALLS: {
        "tool call": _called(""),
        "tool call without content": _called(None),
        "tool call in a stream": _called("Look.") | {"stream": True},
    },
    Form.CONTINUED: {
        "no user message last": _chat(_HELLO, _SAID),
        "no generation prompt": _chat(_HELLO, add_generation_prompt=False),
        "continue_final_message": _chat(
            _HELLO, _SAID, add_generation_prompt=False, continue_final_message=True
        ),
    },
    Form.REASONING: {
        "thoughts": _chat(_HELLO, _SAID | {"reasoning_content": "Hm."}, _HELLO),
        "thoughts before a tool call": _called("", reasoning_content="Hm.\n"),
    },
    Form.LEFT_OUT: {
        "no calls": _chat(_HELLO, _SAID | {"tool_calls": []}, _HELLO),
        "fields of an answer that hold nothing": _chat(_HELLO, _SAID | _EMPTY, _HELLO),
        "a line of Claude Code": _chat(_says("system", f"{BILLING}: cch=1;\nBe brief."), _HELLO),
        "that line alone": _chat(_says("system", f"{BILLING}: cch=1;"), _HELLO),
    },
    Form.TEMPLATE_KWARGS: {
        f"enable_thinking: {value}": _chat(
            _HELLO, _SAID, _HELLO, chat_template_kwargs={"enable_thinking": value}
        )
        for value in (False, True)
    },
    Form.TEXT: {
        "text": {"prompt": "The quick brown fox, 12345 times."},
        "unicode text": {"prompt": " größer\n漢字 🙂‍↔️ e\u0301 <|im_start|></s>"},
        "a streamed text": {"prompt": "The quick", "stream": True},
    },
}


async def verify_exactness(builder: PromptBuilder, adapter: EngineAdapter) -> Exactness:
    """Compares our token ids with the engine's, form by form, and trusts whichever are right."""
    builder.prove(await compare(builder, adapter))
    return builder.exactness


async def compare(
    builder: PromptBuilder, adapter: EngineAdapter, lost: frozenset[MessageShape] | None = None
) -> FormTable:
    """Compares the builder's token ids with those of an engine, form by form. Engines for which the tables
    have equal outcomes make the same tokens of all probes. `lost`: what `lost_by` found, if it was asked.
    Raises EngineUnavailable: the engine went away meanwhile, or its model was unloaded."""
    info, local = builder.info, builder.local
    table = FormTable(can_ask=builder.can_ask, detail=builder.reason)
    if local is not None:
        table.make_here("the engine has no route to check", alike=info.renders_alike)
    if not builder.can_ask:
        if local is not None:
            table.lost_shapes = await asyncio.to_thread(lambda: local.lost_shapes)  # renders some chats
        table.outcome = tuple(table.sources.values())
        return table
    probes = await asyncio.to_thread(_probes, info.model, local)  # reads the whole vocabulary
    if local is not None:
        for form, bodies in probes.items():
            table.probe(form, await _compare(local, adapter, form, bodies), "as the engine does")
        table.settle(alike=info.renders_alike)
    asked = {form: bodies for form, bodies in probes.items() if table.rows[form].source != "local"}
    # It may have another template than the tokenizer.
    lost = await lost_by(adapter, info.model) if lost is None else lost
    table.lost_shapes = lost or frozenset()
    table.outcome = (*table.sources.values(), table.lost_shapes, await _theirs(adapter, asked))
    return table


async def lost_by(adapter: EngineAdapter, model: str) -> frozenset[MessageShape] | None:
    """Messages that the engine's template loses, by the tokens that it makes; None if it does not answer.
    Raises ModelNotLoaded if its model is not in memory."""
    kept: set[Roles] = set()
    for roles in PROBES:
        try:
            async with asyncio.timeout(_PROBE_S):
                if await _keeps(adapter, model, roles):
                    kept.add(roles)
        except ModelNotLoaded:
            raise
        except EngineRejected:
            continue
        except (EngineUnavailable, TimeoutError):
            return None
    return lost_shapes(kept)


async def _keeps(adapter: EngineAdapter, model: str, roles: Roles) -> bool:
    """True if other texts in place of those that may be lost give other tokens."""

    async def ids(messages: Messages) -> TokenIds[int]:
        body = JsonBody(msgspec.json.encode({"model": model, "messages": messages}))
        return await adapter.tokenize_if_loaded(CHAT_PATH, body)

    as_is, *others = [await ids(messages) for messages in trials(roles)]
    return as_is not in others


async def _theirs(adapter: EngineAdapter, probes: Mapping[Form, Mapping[str, JsonBody]]) -> int:
    """A digest of what the engine makes of these probes. Raises EngineUnavailable, as `_asked` does."""
    seen = xxhash.xxh3_64()
    for form, bodies in probes.items():
        for body in bodies.values():
            made = await _asked(adapter, form, body)
            if isinstance(made, Exception):
                seen.update(b"refused" if isinstance(made, EngineRejected) else b"silent")
            else:
                seen.update(made.tobytes())
    return seen.intdigest()


async def _asked(adapter: EngineAdapter, form: Form, body: JsonBody) -> TokenIds[int] | Exception:
    """What the engine makes of a probe; if it refuses it, or does not answer, its error. Raises
    EngineUnavailable: it does not answer a plain chat; ModelNotLoaded: its model left meanwhile."""
    try:
        async with asyncio.timeout(_PROBE_S):
            return await adapter.tokenize_if_loaded(_path_of(form), body)
    except ModelNotLoaded:
        raise
    except EngineRejected as error:
        return error
    except (EngineUnavailable, TimeoutError) as error:
        if form is Form.PLAIN:
            raise EngineUnavailable(str(error) or f"no answer within {_PROBE_S:g} s") from error
        return error


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
        return f"kvpin made {len(ours)} tokens, the engine {len(theirs)}"
    return f"token {shared}: kvpin made {ours[shared]}, the engine {theirs[shared]}"


def _probes(model: str, local: LocalTokenizer | None) -> dict[Form, dict[str, JsonBody]]:
    """The probes of each form, by name. Those of special tokens have the first ones of the model."""
    marks = " x ".join(sorted(local.tokenizer.special_tokens)[:_MARKS]) if local is not None else ""
    probes = _PROBES
    if marks:
        special = {"special tokens": _chat(_HELLO, _SAID, _says("user", marks))}
        text = _PROBES[Form.TEXT] | {"special tokens": {"prompt": marks}}
        probes = _PROBES | {Form.SPECIAL_TOKENS: special, Form.TEXT: text}
    return {
        form: {
            name: JsonBody(msgspec.json.encode({"model": model, **fields})) for name, fields in bodies.items()
        }
        for form, bodies in probes.items()
    }


def _path_of(form: Form) -> str:
    return COMPLETIONS_PATH if form is Form.TEXT else CHAT_PATH


async def _compare(
    local: LocalTokenizer, adapter: EngineAdapter, form: Form, bodies: Mapping[str, JsonBody]
) -> str | None:
    """How the first of a form's probes differs; None if none does. An engine that does not answer one probe
    costs its form. So does one that refuses all of them as kvpin does: that proves nothing. Raises
    EngineUnavailable, as `_asked` does."""
    difference = await _first_difference(local, adapter, form, bodies)
    if difference is _UNPROVEN and form is not Form.TEXT:  # some templates take no chat without tools
        with_tools = {f"{name}, with tools": body.replace(tools=[_TOOL]) for name, body in bodies.items()}
        difference = await _first_difference(local, adapter, form, with_tools)
    return difference


async def _first_difference(
    local: LocalTokenizer, adapter: EngineAdapter, form: Form, bodies: Mapping[str, JsonBody]
) -> str | None:
    proven = False
    for name, body in bodies.items():
        ours, theirs = await _ours(local, _path_of(form), body), await _asked(adapter, form, body)
        match theirs:
            case EngineRejected() if ours is None:
                continue
            case EngineRejected():
                difference: str | None = f"the engine refuses it ({theirs})"
            case Exception():
                difference = f"the engine did not answer ({theirs})"
            case _:
                difference = "kvpin cannot render it" if ours is None else difference_of(ours, theirs)
        if difference is not None:
            return f"{name!r}: {difference}"
        proven = True
    return None if proven else _UNPROVEN


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
