"""Token ids of a request, by the server that will compute them: exact, whatever its template and flags do.

A chat costs two calls (`/apply-template`, `/tokenize`), and so does a response, which is one to the server; a
text costs one, ready ids none.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import JsonCaller
from engine_adapter.llama_server.responses import as_chat
from engine_adapter.types import TokenIds

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_BAD_REQUEST = 400
_INT32_MAX = 2**31 - 1
_Answer = TypeVar("_Answer")


class _Prompt(msgspec.Struct, frozen=True):
    """`POST /apply-template`."""

    prompt: str


class _Tokens(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    tokens: list[int]


async def tokenize(control: JsonCaller, path: str, body: JsonBody) -> TokenIds[int]:
    """The ids that the server makes of a request to `path`: OpenAI's chat, completions or responses.

    The chat's body goes to the server whole, since more than its messages makes the prompt: tools,
    `tool_choice`, `response_format`, `reasoning_effort`, `chat_template_kwargs`, a message to continue.

    Raises:
        EngineRejected: a prompt that the server refuses, that ids do not tell (images, sound), or that
            is not one; with its message.
        EngineUnavailable: no answer, or none that is understood.
        UnreadableField: a field that is looked at is no value.
    """
    if path == _CHAT:
        _check_all_text(body.get("messages"))
        return await _chat(control, body)
    if path == _RESPONSES:
        return await _chat(control, as_chat(body))
    if path != _COMPLETIONS:
        raise _rejected(f"prompts of {path} are not followed", "path")
    prompt = _single(body.get("prompt"))
    if isinstance(prompt, str):
        return await _tokens(control, prompt)
    return array("i", prompt)


async def _chat(control: JsonCaller, body: JsonBody) -> TokenIds[int]:
    rendered = _read(await control.call("POST", "/apply-template", content=body.raw), _Prompt)
    return await _tokens(control, rendered.prompt)


async def _tokens(control: JsonCaller, text: str) -> TokenIds[int]:
    request = {"content": text, "add_special": True, "parse_special": True}
    return array("i", _read(await control.call("POST", "/tokenize", json=request), _Tokens).tokens)


def _check_all_text(messages: object) -> None:
    """Raises EngineRejected for a part that is no text: its ids would not tell what it shows."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") != "text":
                param = f"messages[{index}].content[{number}]"
                raise _rejected(f"{param} is no text, and only text is followed", param)


def _single(prompt: Any) -> str | list[int]:  # noqa: ANN401 - JSON
    """The one prompt of the field: a text or token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_token_id, prompt)):
        return prompt
    raise _rejected("prompt is not one text or one list of token ids, and only such are followed", "prompt")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _rejected(message: str, param: str) -> EngineRejected:
    return EngineRejected(message, status=_BAD_REQUEST, param=param)


def _read(answer: object, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"the server's answer is not understood: {error}") from error
