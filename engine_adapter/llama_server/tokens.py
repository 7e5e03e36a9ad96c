"""The token ids of a request, from the server that will compute it: exact for any template and flags.

A chat costs two calls (`/apply-template`, `/tokenize`), a text one call, ready ids none.
"""

from __future__ import annotations

import re
from array import array
from typing import Any

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server.routes import NATIVE_COMPLETIONS
from engine_adapter.types import TokenIds, common_prefix

_CHAT = "/v1/chat/completions"
_COMPLETIONS = NATIVE_COMPLETIONS | {"/v1/completions"}
_INT32_MAX = 2**31 - 1
# The end of the message before.
_END_MARKER = re.compile(r"^(\s*<[^<>]*(end|close)[^<>]*>)+", re.IGNORECASE)


class _Prompt(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def tokenize(control: ControlClient, path: str, body: JsonBody) -> TokenIds[int]:
    """The ids of a request to `path`: OpenAI's chats or completions, or the server's completions.

    The server gets the whole chat body, because more than its messages makes the prompt: tools,
    `tool_choice`, `response_format`, `reasoning_effort`, `chat_template_kwargs`, a message to continue.
    Raises EngineRejected for what is no prompt, or one whose ids do not identify it (images, sound).
    """
    if path == _CHAT:
        _check_all_text(body.get("messages"))
        rendered = await control.read(_Prompt, "POST", "/apply-template", content=body.raw)
        return await _tokens(control, rendered.prompt)
    if path not in _COMPLETIONS:
        raise _rejected(f"kvpin does not follow prompts of {path}", "path")
    tokens: TokenIds[int] = array("i")
    for index, part in enumerate(_parts(body.get("prompt"))):
        if isinstance(part, str):
            tokens += await _tokens(control, part, add_special=index == 0)
        else:
            tokens.append(part)
    return tokens


async def read_user_mark(control: ControlClient) -> tuple[int, ...]:
    """The tokens that begin a user message, as the server finds them in its chat template: it compares two
    chats, of which one has a further user message. Empty if the template does not tell.
    """
    user, begun = {"role": "user", "content": "kvpin-a"}, [{"role": "user", "content": "kvpin-b"}]
    begun.append({"role": "assistant", "content": "kvpin-c"})
    try:
        try:
            texts = [await _rendered(control, messages) for messages in ([], [user])]
        except EngineRejected:  # the template takes no empty chat
            texts = [await _rendered(control, messages) for messages in (begun, [*begun, user])]
        added = texts[1][common_prefix(*texts) :].rpartition(begun[-1]["content"])[2]
        mark = _END_MARKER.sub("", added.partition(user["content"])[0]).strip()
        return tuple(await _tokens(control, mark, add_special=False)) if mark else ()
    except EngineRejected:
        return ()


async def _rendered(control: ControlClient, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "add_generation_prompt": False}
    return (await control.read(_Prompt, "POST", "/apply-template", json=body)).prompt


async def _tokens(control: ControlClient, text: str, *, add_special: bool = True) -> TokenIds[int]:
    request = {"content": text, "add_special": add_special, "parse_special": True}
    return array("i", (await control.read(_Tokens, "POST", "/tokenize", json=request)).tokens)


def _check_all_text(messages: object) -> None:
    """Raises EngineRejected for a part that is no text: token ids do not identify its content."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") != "text":
                param = f"messages[{index}].content[{number}]"
                raise _rejected(f"{param} is not text: kvpin follows only text", param)


def _parts(prompt: Any) -> list[str | int]:  # noqa: ANN401 - JSON
    """The only prompt of the field: texts and token ids that follow each other."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [prompt]
    # The server takes a list of nothing but texts for several prompts.
    is_one = isinstance(prompt, list) and any(map(_is_token_id, prompt))
    if is_one and all(isinstance(part, str) or _is_token_id(part) for part in prompt):
        return list(prompt)
    raise _rejected("kvpin follows only one prompt: a text, token ids, or a list of both", "prompt")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _rejected(message: str, param: str) -> EngineRejected:
    return EngineRejected(message, status=400, param=param)
