"""The token ids of a request, from the server that will compute it: exact for any template and flags.

A chat costs two calls (`/apply-template`, `/tokenize`), a text one call, ready ids none.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import TokenIds

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BAD_REQUEST = 400
_INT32_MAX = 2**31 - 1
_Answer = TypeVar("_Answer")


class _Prompt(msgspec.Struct, frozen=True):
    """`POST /apply-template`."""

    prompt: str


class _Tokens(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    tokens: list[int]


async def tokenize(control: ControlClient, path: str, body: JsonBody) -> TokenIds[int]:
    """The ids of a request to `path`: OpenAI's chats or completions.

    The server gets the whole chat body, because more than its messages makes the prompt: tools,
    `tool_choice`, `response_format`, `reasoning_effort`, `chat_template_kwargs`, a message to continue.

    Raises:
        EngineRejected: the server refuses the prompt, or its ids do not identify it (images, sound), or it is
            no prompt.
        EngineUnavailable: no answer, or an unexpected one.
        UnreadableField: a field this reads is not valid JSON.
    """
    if path == _CHAT:
        _check_all_text(body.get("messages"))
        return await _chat(control, body)
    if path != _COMPLETIONS:
        raise _rejected(f"kvpin does not follow prompts of {path}", "path")
    prompt = _single(body.get("prompt"))
    if isinstance(prompt, str):
        return await _tokens(control, prompt)
    return array("i", prompt)


async def _chat(control: ControlClient, body: JsonBody) -> TokenIds[int]:
    rendered = _read(await control.call("POST", "/apply-template", content=body.raw), _Prompt)
    return await _tokens(control, rendered.prompt)


async def _tokens(control: ControlClient, text: str) -> TokenIds[int]:
    request = {"content": text, "add_special": True, "parse_special": True}
    return array("i", _read(await control.call("POST", "/tokenize", json=request), _Tokens).tokens)


def _check_all_text(messages: object) -> None:
    """Raises EngineRejected for a part that is no text: token ids do not identify its content."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") != "text":
                param = f"messages[{index}].content[{number}]"
                raise _rejected(f"{param} is not text: kvpin follows only text", param)


def _single(prompt: Any) -> str | list[int]:  # noqa: ANN401 - JSON
    """The only prompt of the field: a text or token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_token_id, prompt)):
        return prompt
    raise _rejected("kvpin follows only a prompt that is one text or one list of token ids", "prompt")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _rejected(message: str, param: str) -> EngineRejected:
    return EngineRejected(message, status=_BAD_REQUEST, param=param)


def _read(answer: object, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"the server's answer is not as expected: {error}") from error
