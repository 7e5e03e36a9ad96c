"""A request → its token ids, by the server that would serve it.

`/render` takes the request itself and is right whatever is in it. Without it there is `/tokenize`, which
knows the fields below; a request with others that shape its prompt is refused rather than misread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import JsonCaller
from engine_adapter.types import MediaSpan, RenderedPrompt, TokenIds, token_array

RENDERED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_TOKENIZED = {
    "/v1/completions": ("prompt", "add_special_tokens"),
    "/v1/chat/completions": (
        "messages",
        "tools",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "media_io_kwargs",
        "mm_processor_kwargs",
    ),
}
# What `/tokenize` leaves out of a prompt.
_BEYOND = ("documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_embeds", "suffix")
_BAD_REQUEST, _NOT_FOUND = 400, 404


class _Range(msgspec.Struct, frozen=True):
    offset: int
    length: int


class _Features(msgspec.Struct, frozen=True):
    """Per modality, one entry an item."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct, frozen=True):
    """A prompt as `/render` answers it."""

    token_ids: list[int]
    features: _Features | None = None


class _Tokens(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    tokens: list[int]


async def tokenize(control: JsonCaller, path: str, body: JsonBody, model: str) -> TokenIds[int]:
    """Token ids of a chat or completion by `/tokenize`; `model` is the name the server knows.

    Raises:
        EngineRejected: the server refuses it, or the route does not tell the prompt of such a request.
    """
    names = _TOKENIZED.get(path)
    if names is None:
        raise EngineRejected(f"vLLM tells the prompt of {path} with --enable-scale-out", status=_NOT_FOUND)
    for name in _BEYOND:
        if body.get(name) is not None:
            raise EngineRejected(
                f"vLLM tells the prompt of a request with {name} with --enable-scale-out",
                status=_BAD_REQUEST,
                param=name,
            )
    fields = {name: value for name in names if (value := body.get(name)) is not None}
    if path == "/v1/completions" and not isinstance(fields.get("prompt"), str):
        return _plain_ids(fields.get("prompt"))
    answer = await control.call("POST", "/tokenize", json={**fields, "model": model})
    return token_array(_read(answer, _Tokens).tokens)


async def render(control: JsonCaller, path: str, body: JsonBody, model: str) -> RenderedPrompt:
    """A request's prompt by `/render`; `model` is the name the server knows.

    Raises:
        EngineRejected: the server refuses it, or it is a request for several prompts.
    """
    if path not in RENDERED_ROUTES:
        raise EngineRejected(f"{path} is not one of vLLM's prompts", status=_NOT_FOUND)
    wanted = body.replace(model=model, mm_payload="none")
    answer = await control.call("POST", f"{path}/render", content=wanted.raw)
    prompts = answer if isinstance(answer, list) else [answer]
    if len(prompts) != 1:
        raise EngineRejected("a request for several prompts", status=_BAD_REQUEST, param="prompt")
    rendered = _read(prompts[0], _Rendered)
    media = _media(rendered.features) if rendered.features is not None else ()
    return RenderedPrompt(token_array(rendered.token_ids), media)


def _media(features: _Features) -> tuple[MediaSpan, ...]:
    """Its items, in the order they stand in the prompt."""
    spans: list[MediaSpan] = []
    for modality, identities in features.mm_hashes.items():
        places = features.mm_placeholders.get(modality, [])
        if len(places) != len(identities):
            raise EngineUnavailable("it does not answer as vLLM does: items of a prompt without a place")
        spans += map(MediaSpan, identities, (p.offset for p in places), (p.length for p in places))
    return tuple(sorted(spans, key=lambda span: span.offset))


def _plain_ids(prompt: object) -> TokenIds[int]:
    """A prompt that is token ids already."""
    try:
        return token_array(msgspec.convert(prompt, list[int]))
    except (msgspec.ValidationError, OverflowError) as error:
        raise EngineRejected(
            "prompt must be a string or a list of token ids", status=_BAD_REQUEST, param="prompt"
        ) from error


def _read(answer: object, kind: type[Any]) -> Any:  # noqa: ANN401 - an instance of `kind`
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"it does not answer as vLLM does: {error}") from error
