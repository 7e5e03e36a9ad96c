"""Tokenises requests with SGLang's `/tokenize`, which renders chats with the code that serves them."""

from __future__ import annotations

from array import array
from http import HTTPStatus

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected
from engine_adapter.http.control import ControlClient
from engine_adapter.sglang.requests import CHAT, COMPLETIONS
from engine_adapter.sglang.routes import GENERATE
from engine_adapter.sglang.server_info import ServerInfo
from engine_adapter.types import TokenIds

# Fields that /tokenize reads but the chat route does not.
_NOT_OF_CHATS = ("add_generation_prompt", "add_special_tokens", "prompt")
_CHAT = {"messages": [{"role": "user", "content": "."}]}
# First version whose /tokenize reads add_generation_prompt; it refuses it without a Jinja template.
_REFUSES_SINCE = (0, 5, 23)


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


async def tokenize(control: ControlClient, path: str, body: JsonBody) -> TokenIds[int]:
    """Token ids of a chat, a completion or a request of `/generate`."""
    if path == CHAT:
        return await _ask(control, body.replace(**dict.fromkeys(_NOT_OF_CHATS)).raw)
    if path not in (COMPLETIONS, GENERATE):
        raise EngineRejected(f"SGLang cannot tokenise {path}", status=404)
    prompt = body.get("text" if path == GENERATE else "prompt")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise EngineRejected("it is not one text", status=400, param="prompt")
        prompt = prompt[0]
    return await _ask(control, msgspec.json.encode({"prompt": prompt}))


async def tokenizes_chats(control: ControlClient) -> bool:
    """Whether it can tokenise chats. Old servers cannot, nor servers without a tokenizer."""
    return await _takes(control, _CHAT)


async def uses_jinja(control: ControlClient, info: ServerInfo) -> bool:
    """Whether chats are known to be rendered by a Jinja template. SGLang's own templates also add stop words,
    which it takes from the messages and not from tokens."""
    return info.release >= _REFUSES_SINCE and await _takes(control, {**_CHAT, "add_generation_prompt": True})


async def _takes(control: ControlClient, body: object) -> bool:
    return await control.status("POST", "/tokenize", json=body) == HTTPStatus.OK


async def _ask(control: ControlClient, raw: bytes) -> TokenIds[int]:
    return array("i", (await control.read(_Tokens, "POST", "/tokenize", content=raw)).tokens)
