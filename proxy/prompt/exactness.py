"""Compares our token ids with the engine's: when a tokenizer is loaded, and on prompts that were served.

One wrong token makes every block hash after it wrong, and predictions confident and false. The test prompts
vary everything that chat templates read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine_adapter import Capability, ChatError, EngineAdapter, EngineRejected, JsonBody, common_prefix
from engine_adapter.types import TokenIds
from proxy.prompt.builder import Exactness, Prompt, PromptBuilder
from proxy.prompt.render import CHAT_PATH, COMPLETIONS_PATH, ChatInput, CompletionInput, read_prompt
from proxy.prompt.tokenizer import LocalTokenizer

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
_CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [{"role": "user", "content": "Hello there."}]},
    "system message": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    },
    "several turns, unicode": {
        "messages": [
            {"role": "user", "content": "Zażółć gęślą jaźń 漢字 🙂\n\n\tx = 1 "},
            {"role": "assistant", "content": " It's 3.14159…  "},
            {"role": "user", "content": "  again?"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "Weather?"}], "tools": [_TOOL]},
    **{
        name: {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": content, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_12345", "content": "18 °C"},
            ],
            "tools": [_TOOL],
        }
        for name, content in (("tool call", ""), ("tool call without content", None))
    },
    "text parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
        ]
    },
    "thoughts in a text": {
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."},
            {"role": "user", "content": "And?"},
        ]
    },
    "empty content": {"messages": [{"role": "user", "content": ""}]},
}
_TEXTS = {
    "text": {"prompt": "The quick brown fox, 12345 times."},
    "unicode text": {"prompt": " größer\n漢字 🙂‍↔️ e\u0301 <|im_start|></s>"},
}


# Unchecked ids count as right once the engine made the same ids of this many served prompts.
ENOUGH_AGREED = 20


async def verify_exactness(builder: PromptBuilder, adapter: EngineAdapter) -> Exactness:
    """Compares our token ids with the engine's, and sets the builder to use whichever are right.

    Raises:
        EngineUnavailable: the engine went away meanwhile.
    """
    builder.exactness = await _verify(builder, adapter)
    return builder.exactness


def audit_tokens(builder: PromptBuilder, prompt: Prompt, theirs: TokenIds[int]) -> str | None:
    """Compares the ids of a served prompt with those that the engine reports for it.

    Returns:
        How they differ, if that is new; then the engines tokenise from now on, if they can.
    """
    if prompt.source == "client":
        return None
    difference = difference_of(prompt.token_ids, theirs)
    if difference is None:
        builder.agreed += 1
        if builder.agreed == ENOUGH_AGREED and not builder.differed and builder.exactness.source == "local":
            seen = f"and the engine made the same ids of {ENOUGH_AGREED} prompts it served"
            builder.exactness = Exactness(True, f"{builder.exactness.detail}, {seen}", "local")
        return None
    builder.differed += 1
    if not builder.distrust(prompt):
        return None
    asks = builder.local is not None and builder.tokenizer is not builder.local
    if prompt.source == "local" and asks:
        detail = f"the engine tokenises each prompt: it made other ids of a served one: {difference}"
        builder.exactness = Exactness(True, detail, "engine")
    else:
        detail = f"the engine made other ids of a served prompt: {difference}"
        builder.exactness = Exactness(False, detail, builder.exactness.source)
    return difference


def difference_of(ours: TokenIds[int], theirs: TokenIds[int]) -> str | None:
    """Where two lists of token ids first differ, in words; None when they are the same."""
    if ours == theirs:
        return None
    shared = common_prefix(ours, theirs)
    if shared == min(len(ours), len(theirs)):
        return f"{len(ours)} tokens here, {len(theirs)} there"
    return f"token {shared} is {ours[shared]} here, {theirs[shared]} there"


async def _verify(builder: PromptBuilder, adapter: EngineAdapter) -> Exactness:
    can_ask = Capability.TOKENIZE in builder.info.capabilities
    if builder.local is None:
        if can_ask:
            return Exactness(True, f"the engine tokenises each prompt: {builder.reason}", "engine")
        return Exactness(False, f"prompts are not followed: {builder.reason}", "none")
    source = builder.local.tokenizer.source
    if not can_ask:
        builder.use_local()
        return Exactness(
            False, f"tokenised here with {source!r}, unchecked: the engine has no route to check", "local"
        )
    count, difference = await _first_difference(builder, builder.local, adapter)
    if difference is not None:
        builder.ask_engines()
        detail = f"the engine tokenises each prompt: {source!r} differs on {difference}"
        return Exactness(True, detail, "engine")
    builder.exact = True
    builder.use_local()
    return Exactness(True, f"tokenised here with {source!r}, as the engine does on {count} prompts", "local")


async def _first_difference(
    builder: PromptBuilder, local: LocalTokenizer, adapter: EngineAdapter
) -> tuple[int, str | None]:
    """The number of prompts that were compared, and the first on which our ids are not the engine's."""
    count = 0
    for name, path, body in _probes(builder.info.model):
        try:
            difference = await _difference(local, adapter, path, body)
        except EngineRejected as error:
            if "tools" in body:  # e.g. no tool parser: everything else may agree
                builder.ask_engines_about_tools()
                continue
            difference = f"the engine refuses it ({error})"
        count += 1
        if difference is not None:
            return count, f"{name!r}: {difference}"
    return count, None


def _probes(model: str) -> Iterator[tuple[str, str, JsonBody]]:
    for path, bodies in ((CHAT_PATH, _CHATS), (COMPLETIONS_PATH, _TEXTS)):
        for name, fields in bodies.items():
            yield name, path, JsonBody(msgspec.json.encode({"model": model, **fields}))


async def _difference(local: LocalTokenizer, adapter: EngineAdapter, path: str, body: JsonBody) -> str | None:
    """The difference between our ids of a test prompt and the engine's; None if equal, or if both refuse it.

    Raises:
        EngineRejected: only the engine refuses it.
    """
    ours = await _ours(local, path, body)
    try:
        theirs = await adapter.tokenize(path, body)
    except EngineRejected:
        if ours is None:
            return None
        raise
    if ours is None:
        return "only the engine can render it"
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
