"""The target of an operation, as an operator names it: a prefix, the KV of an engine, of a tenant, or all."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from engine_adapter import JsonBody
from proxy.errors import BadRequest

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]

PREFIXES = ("messages", "prompt", "token_ids", "prompt_cache_key", "request_id")
# Prefixes of requests that kvpin served: they bring model, salt and LoRA adapter.
_OF_REQUESTS = ("prompt_cache_key", "request_id")
# Fields that go with one kind of prefix only.
_COMPANIONS = {
    "tools": "messages",
    "chat_template_kwargs": "messages",
    "add_generation_prompt": "messages",
    "extra_ids": "token_ids",
    "prompt_table": "token_ids",
    "add_special_tokens": "prompt",
    "tokens": "request_id",
}


class Target(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The target of an operation.

    Exactly one of `messages`, `prompt`, `token_ids`, `prompt_cache_key`, `request_id`, `engine`, `tenant` and
    `all` names it. `engine` and `tenant` may also narrow down a prefix.

    Attributes:
        messages: a chat, with `tools` and `chat_template_kwargs` as in a request. By default without the
            generation prompt: longer chats share the prefix up to there.
        prompt: text of a completion, with `add_special_tokens`.
        token_ids: a prompt as token ids, with `extra_ids` or `prompt_table`.
        prompt_cache_key: the prompt of the last request with this key.
        request_id: the prompt of that recent request; with `tokens` only so many tokens of its beginning.
        engine: everything on that engine; beside a prefix or a tenant, only on that engine.
        tenant: all KV of that tenant; beside a prefix, the tenant whose KV it is.
        all: everything on all engines, or on those of `model`.
        cache_salt: the salt that a client sends with its requests; beside `engine` or `all`, only its KV.
        model: the served model; needed where there are several. With the name of a LoRA adapter, a prefix
            is that adapter's.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    token_ids: list[TokenId] | None = None
    extra_ids: list[int] | None = None
    prompt_table: Name | None = None
    prompt_cache_key: Name | None = None
    request_id: Name | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    engine: Name | None = None
    tenant: Name | None = None
    all: bool = False
    cache_salt: Name | None = None
    model: Name | None = None


def kind_of(target: Target) -> str:
    """The kind of a target. Raises BadRequest, which names the field, if there is not exactly one."""
    given = [name for name in PREFIXES if getattr(target, name) is not None]
    if target.all:
        given.append("all")
    if not given and (target.tenant or target.engine):
        given = ["tenant" if target.tenant else "engine"]
    if not given:
        raise BadRequest(
            f"name a target: one of {', '.join(PREFIXES)}, engine, tenant, or all: true", param="target"
        )
    if len(given) > 1:
        raise BadRequest(f"{given[1]} excludes {given[0]}: name one target", param=given[1])
    kind = given[0]
    if target.all and (target.engine or target.tenant):
        raise BadRequest("all means every engine and tenant: leave it out", param="all")
    for name, needed in _COMPANIONS.items():
        if getattr(target, name) is not None and kind != needed:
            raise BadRequest(f"{name} goes with {needed}", param=name)
    if target.cache_salt is not None and kind in _OF_REQUESTS:
        raise BadRequest(f"a {kind} brings the salt of its request", param="cache_salt")
    return kind


def request_of(target: Target, model: str) -> tuple[str, JsonBody]:
    """The request whose prompt the prefix is."""
    fields: dict[str, Any] = {"model": model}
    if target.messages is not None:
        fields |= {
            "messages": target.messages,
            "tools": target.tools,
            "chat_template_kwargs": target.chat_template_kwargs,
            "add_generation_prompt": target.add_generation_prompt or False,
        }
        path = "/v1/chat/completions"
    else:
        if target.token_ids is not None and not target.token_ids:
            raise BadRequest("token_ids is empty", param="token_ids")
        fields |= {
            "prompt": target.prompt if target.prompt is not None else target.token_ids,
            "extra_ids": target.extra_ids,
            "prompt_table": target.prompt_table,
            "add_special_tokens": target.add_special_tokens,
        }
        path = "/v1/completions"
    given = {name: value for name, value in fields.items() if value is not None}
    return path, JsonBody(msgspec.json.encode(given))
