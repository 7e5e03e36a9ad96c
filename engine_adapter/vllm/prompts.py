"""Tokenises a request on the server that would serve it.

`/render` takes the request itself and is always right. Without it there is `/tokenize`, which knows only the
fields below. A request whose prompt depends on other fields is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine_adapter.body import BILLING, JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.prompt.template_input import ContentFormat, TemplateInput, is_text
from engine_adapter.types import MediaSpan, RenderedPrompt, TokenIds, token_array

# --- chats as vLLM gives them to the model's template: `renderers/chat_utils.py` of 0.32 ----------------
# Messages keep only the fields that vLLM knows. A template that takes parts gets them for every content. What
# older versions do otherwise, the probes of proxy/prompt/exactness.py show.

_REASONING = ("reasoning", "reasoning_content")


def _message(message: dict[str, Any], wanted: ContentFormat) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if wanted is ContentFormat.STRING and role != "system" and is_text(message):
        return {"role": role, "content": content}
    parts = [] if content is None else content
    parts = parts if isinstance(parts, list) else [{"type": "text", "text": content}]
    if role == "system":
        parts = [part for part in map(_without_billing, parts) if part is not None]
    takes_parts = wanted is ContentFormat.PARTS and role != "tool"
    given: dict[str, Any] = {
        "role": role,
        "content": parts if takes_parts else "\n".join(part["text"] for part in parts),
    }
    if role == "assistant":
        if message.get("tool_calls"):
            given["tool_calls"] = list(map(_call, message["tool_calls"]))
        thoughts = message.get("reasoning")
        thoughts = message.get("reasoning_content") if thoughts is None else thoughts
        if thoughts is not None:
            given |= dict.fromkeys(_REASONING, thoughts)
    elif role == "tool" and "tool_call_id" in message:
        given["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        given["name"] = message["name"]
    return given


def _without_billing(part: dict[str, Any]) -> dict[str, Any] | None:
    """The part without the line of Claude Code that begins it; None if nothing is left."""
    if not part["text"].startswith(BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Its fields in the order of vLLM's models. Arguments that are no object count as none."""
    function = call["function"]
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    return _first(
        call | {"function": _first(function | {"arguments": arguments}, "arguments", "name")},
        "id",
        "function",
    )


def _first(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields, these ones first."""
    return {name: fields[name] for name in names if name in fields} | fields


VLLM_INPUT = TemplateInput(message=_message)


# --- prompts --------------------------------------------------------------------------------------------

RENDERED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_TOKENIZED = {
    "/v1/completions": ("prompt", "add_special_tokens"),
    "/v1/chat/completions": (
        "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message", "add_special_tokens", "media_io_kwargs", "mm_processor_kwargs",
    ),
}  # fmt: skip
# Fields that shape the prompt and that `/tokenize` ignores.
_BEYOND = ("documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_embeds", "suffix")


class _Range(msgspec.Struct, frozen=True):
    offset: int
    length: int


class _Features(msgspec.Struct, frozen=True):
    """Per modality, one entry per item."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct, frozen=True):
    """A prompt in the answer of `/render`."""

    token_ids: list[int]
    features: _Features | None = None


_RENDERED: Any = _Rendered | list[_Rendered]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


async def tokenize(control: ControlClient, path: str, body: JsonBody, model: str) -> TokenIds[int]:
    """Token ids of a chat or completion by `/tokenize`; `model` is the name the server knows. Raises
    EngineRejected for what `/tokenize` cannot render, too."""
    names = _TOKENIZED.get(path)
    if names is None:
        raise EngineRejected(f"vLLM renders {path} only with --enable-scale-out", status=404)
    for name in _BEYOND:
        if body.get(name) is not None:
            raise EngineRejected(
                f"vLLM renders requests with {name} only with --enable-scale-out", status=400, param=name
            )
    fields = {name: value for name in names if (value := body.get(name)) is not None}
    if path == "/v1/completions" and not isinstance(fields.get("prompt"), str):
        try:
            return token_array(msgspec.convert(fields.get("prompt"), list[int]))
        except (msgspec.ValidationError, OverflowError) as error:
            raise EngineRejected(
                "prompt must be a string or a list of token ids", status=400, param="prompt"
            ) from error
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_as_chats_read(message) for message in fields["messages"]]
    answer = await control.read(_Tokens, "POST", "/tokenize", json={**fields, "model": model})
    return token_array(answer.tokens)


async def render(control: ControlClient, path: str, body: JsonBody, model: str) -> RenderedPrompt:
    """A request's prompt by `/render`; `model` is the name the server knows. Raises EngineRejected for
    several prompts, too."""
    if path not in RENDERED_ROUTES:
        raise EngineRejected(f"vLLM renders no prompts of {path}", status=404)
    wanted = body.replace(model=model, mm_payload="none")
    answer = await control.read(_RENDERED, "POST", f"{path}/render", content=wanted.raw)
    prompts = answer if isinstance(answer, list) else [answer]
    if len(prompts) != 1:
        raise EngineRejected("the request has several prompts", status=400, param="prompt")
    rendered: _Rendered = prompts[0]
    media = _media(rendered.features) if rendered.features is not None else ()
    return RenderedPrompt(token_array(rendered.token_ids), media)


def _as_chats_read(message: object) -> object:
    """The message with `reasoning_content` under the name `reasoning`: so chats read it, and `/tokenize` does
    not."""
    if not isinstance(message, dict) or "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    given = message["reasoning_content"]
    return rest if given is None or rest.get("reasoning") is not None else {**rest, "reasoning": given}


def _media(features: _Features) -> tuple[MediaSpan, ...]:
    """The items, in the order of the prompt."""
    spans: list[MediaSpan] = []
    for modality, identities in features.mm_hashes.items():
        places = features.mm_placeholders.get(modality, [])
        if len(places) != len(identities):
            raise EngineUnavailable("the answer is not as expected: a prompt's items have no position")
        spans += map(MediaSpan, identities, (p.offset for p in places), (p.length for p in places))
    return tuple(sorted(spans, key=lambda span: span.offset))
