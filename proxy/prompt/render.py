"""Reads and checks the fields of a request that make its prompt; tokenises nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from engine_adapter import JsonBody
from engine_adapter.options import PromptFields
from engine_adapter.prompt.forms import gives, not_plain, only_the_engine_knows
from engine_adapter.types import TokenIds
from proxy.errors import BadRequest
from proxy.prompt.media import check_number, find_media, is_text, media_fields

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
_T = TypeVar("_T")
_INT32_MAX = 2**31 - 1


class ChatInput(msgspec.Struct, frozen=True, gc=False):
    """A chat, as its template will get it.

    Attributes:
        messages, tools, template_kwargs: shared with all who read the request; not to be changed.
        n_media: parts that are not text.
    """

    param: ClassVar[str] = "messages"
    messages: object
    tools: object = None
    template_kwargs: object = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    n_media: int = 0

    def __repr__(self) -> str:
        """Without the texts."""
        return f"ChatInput(n_media={self.n_media})"

    @property
    def is_text(self) -> bool:
        """True if all of it is text; token ids do not identify anything else."""
        return self.n_media == 0


@dataclass(frozen=True, slots=True)
class CompletionInput:
    """A completion's prompt: text or token ids, and what its fake ids mean.

    Attributes:
        prompt: text, or int32 token ids.
        add_special_tokens: whether the tokenizer adds its own to a text.
        explicit: extra ids the client passed, unchecked.
        table: id of the prompt table the client named.
    """

    param: ClassVar[str] = "prompt"
    prompt: str | TokenIds[int] = field(repr=False)
    add_special_tokens: bool = True
    explicit: Sequence[int] | None = field(default=None, repr=False)
    table: str | None = None


@dataclass(frozen=True, slots=True)
class AskedInput:
    """A prompt that only the engine can make: a response's, or texts and token ids that it joins."""

    param: str
    is_text: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddedInput:
    """A completion's prompt of embeddings. `data`: them, undecoded; None where the request has several
    prompts."""

    param: ClassVar[str] = "prompt_embeds"
    data: object = field(default=None, repr=False)


PromptInput = ChatInput | CompletionInput | AskedInput | EmbeddedInput
"""The fields that make a prompt. `param` is the field that an error about its length names."""


def read_prompt(path: str, body: JsonBody) -> PromptInput | None:
    """The fields that a request's prompt is made from.

    None for requests without a single prompt that can be known here: other routes, several prompts in one
    request, or fields that only the engine understands. Such requests are still forwarded. Raises BadRequest,
    naming a field that no engine accepts."""
    if path == COMPLETIONS_PATH:
        return _completion(body)
    if path == CHAT_PATH and body.is_plain:
        return ChatInput(body.view("messages"))
    if only_the_engine_knows(body):
        return None
    if path == CHAT_PATH:
        continues = _flag(body, "continue_final_message", default=False)
        return ChatInput(
            messages=body.view("messages"),
            tools=body.view("tools"),
            template_kwargs=body.view("chat_template_kwargs"),
            add_generation_prompt=_flag(body, "add_generation_prompt", default=True) and not continues,
            continue_final_message=continues,
            n_media=_count_media(not_plain(body)),
        )
    if path == RESPONSES_PATH:
        return AskedInput("input", is_text=not find_media(media_fields(body)))
    return None


def _completion(body: JsonBody) -> CompletionInput | EmbeddedInput | None:
    if only_the_engine_knows(body, completion=True):
        return None
    if (embeds := body.get("prompt_embeds")) not in (None, []):
        several = bool(body.get("prompt")) or (isinstance(embeds, list) and len(embeds) > 1)
        return EmbeddedInput(None if several else embeds[0] if isinstance(embeds, list) else embeds)
    prompt = _single_prompt(body.get("prompt"))
    if prompt is None:
        return None
    return CompletionInput(
        prompt=prompt,
        add_special_tokens=_flag(body, "add_special_tokens", default=True),
        explicit=_checked(body, "extra_ids", list, "a list with one integer per prompt token"),
        table=_checked(body, "prompt_table", str, "the id of a prompt table"),
    )


def read_native(fields: PromptFields | None, body: JsonBody) -> CompletionInput | AskedInput | None:
    """The prompt of a route beside `/v1`, if it has one prompt that can be known. Raises BadRequest: a token
    id is out of range. What else is wrong with it is the engine's to say."""
    if fields is None or gives(body, fields.unless):
        return None
    given = body.get(fields.ids)
    given = body.get(fields.text) if given is None else given
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list):
        given = given[0]
    kinds = set(map(type, given)) if isinstance(given, list) else {type(given)}
    if kinds == {int, str}:
        return AskedInput("prompt")
    prompt = _single_prompt(given) if kinds in ({str}, {int}) else None
    return None if prompt is None else CompletionInput(prompt)


def _count_media(messages: list[Any]) -> int:
    """Parts of messages that are not text. Raises BadRequest for too many."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    count = len(parts) - sum(map(is_text, parts))
    check_number(count, "messages")
    return count


def _single_prompt(value: Any) -> str | TokenIds[int] | None:  # noqa: ANN401 - JSON
    """The one prompt of the field; None where it holds several, or something only the engine knows."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        return None
    kinds = set(map(type, value))
    if kinds == {int}:
        return _token_ids(value)
    if kinds not in ({str}, {list}):
        raise BadRequest(
            "prompt must be a string, a list of token ids, or a list of strings or of such lists",
            param="prompt",
        )
    return _single_prompt(value[0]) if len(value) == 1 else None


def _token_ids(values: list[int]) -> TokenIds[int]:
    if min(values) < 0 or max(values) > _INT32_MAX:
        index = next(i for i, value in enumerate(values) if not 0 <= value <= _INT32_MAX)
        raise BadRequest(
            f"prompt[{index}] is {values[index]}; a token id is an integer from 0 to 2**31-1",
            param=f"prompt[{index}]",
        )
    return array("i", values)


def _flag(body: JsonBody, name: str, *, default: bool) -> bool:
    if body.get(name) is None:
        return default
    return bool(_checked(body, name, bool, "true or false"))


def _checked(body: JsonBody, name: str, kind: type[_T], what: str) -> _T | None:
    """The field's value, None where it has none. Raises BadRequest for one of another kind."""
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"{name} must be {what}", param=name)
    return value
