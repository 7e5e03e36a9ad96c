"""Renders and tokenises requests exactly as transformers does. The proxy and the embedded engine share it.

`ChatTokenizer.load` reads a tokenizer, `render` gives a prompt's text, `encode` its ids. `chat` does both,
and puts prompt embeddings where their content parts stood.
"""

from __future__ import annotations

import re
import secrets
import threading
from array import array
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from engine_adapter.errors import ChatError, EngineSpecError
from engine_adapter.off_loop import off_loop
from engine_adapter.prompt.chat_messages import NormalMessages, normalize_messages
from engine_adapter.prompt.content_format import content_format
from engine_adapter.prompt.encoders import Encoder, exact_encoder
from engine_adapter.prompt.extra_ids import Embeddings
from engine_adapter.prompt.gguf_tokenizer import load_gguf_tokenizer
from engine_adapter.prompt.lengths import check_fits
from engine_adapter.prompt.media import tokens_of
from engine_adapter.prompt.template_input import USUAL, TemplateInput
from engine_adapter.prompt.templates import TEMPLATE_ERRORS
from engine_adapter.types import ExtraIds, TokenIds

_Result = TypeVar("_Result")

# transformers imports its modules lazily, which two threads must not do at once.
_LOADING = threading.Lock()
# Options of apply_chat_template itself that a client must not reach through chat_template_kwargs.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip


class ChatPrompt(msgspec.Struct, frozen=True):
    """A tokenised prompt.

    Attributes:
        token_ids: the prompt; an id at or above the vocabulary size is a row of embeddings.
        extra_ids: one per token, None when it is all text.
        embeddings: the rows of the fake ids, by extra id.
    """

    token_ids: TokenIds[int]
    extra_ids: ExtraIds[int] | None = None
    embeddings: Mapping[int, Embeddings] = {}

    @classmethod
    def of_embeddings(cls, embeddings: Embeddings, vocab_size: int) -> ChatPrompt:
        """A prompt that is nothing but these rows."""
        token_ids, extra_ids = tokens_of(embeddings, vocab_size)
        return cls(token_ids, extra_ids, {extra_ids[0]: embeddings})


class ChatOptions(TypedDict, total=False):
    """The variables of a chat template beside the messages; `template_kwargs` are the client's own."""

    tools: object
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: object


class ChatTokenizer:
    """A tokenizer and its chat template. Calls are thread-safe; encoding releases the GIL."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - transformers is untyped
        *,
        source: str,
        encoder: Encoder | None = None,
        template_input: TemplateInput = USUAL,
    ) -> None:
        """Wraps a transformers tokenizer; `load` is the usual way to one. `source` is where it comes from,
        and `encoder` gives its ids: by default it is looked for, which takes seconds. `template_input`: see
        `rendering`."""
        self.source = source
        self._tokenizer = tokenizer
        self._encoder = encoder or exact_encoder(tokenizer)
        self._input = template_input

    @classmethod
    def load(cls, source: str) -> ChatTokenizer:
        """Reads a tokenizer from a directory, from a GGUF file (`….gguf`) or, by its id, from the hub. Raises
        EngineSpecError, which says why, if nothing usable is there."""
        check_source(source)
        return cls(load_transformers(source), source=source)

    def rendering(self, given: TemplateInput) -> ChatTokenizer:
        """This tokenizer, for an engine that gives chats to the template as `given` says."""
        if given is self._input:
            return self
        return ChatTokenizer(self._tokenizer, source=self.source, encoder=self._encoder, template_input=given)

    @property
    def transformers(self) -> Any:  # noqa: ANN401 - transformers is untyped
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def cuts(self) -> tuple[str, ...]:
        """Added tokens before which a text can be cut, and its pieces encoded alone; see cuts.py."""
        return self._encoder.cuts

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; a model's embedding may have more rows."""
        return len(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text; None where the tokenizer names none."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The added tokens that `decode` may skip."""
        return frozenset(
            str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special
        )

    def template(self, tools: object) -> str | None:
        """The chat template for these tools; None for a tokenizer without one."""
        try:
            template: str = self._tokenizer.get_chat_template(None, tools)
        except ValueError:
            return None
        return template

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds[int]:
        """Token ids of `text`, as transformers gives them."""
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool, limit: int | None
    ) -> list[TokenIds[int]]:
        """Token ids of each text. Raises CannotFit if they have clearly more than `limit` together."""
        check_fits(texts, limit, partial(self.encode, add_special_tokens=False))
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def off_loop(self, chars: int, work: Callable[[], _Result]) -> Coroutine[Any, Any, _Result]:
        """Does `work`, which encodes a text of `chars` characters: here if it takes about 1 ms at most, else
        in a thread, so that it does not block the event loop."""
        return off_loop(work, ms=chars / self._encoder.chars_per_ms, what="encode")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; ids outside the vocabulary are left out."""
        size = self.vocab_size
        known = [token for token in token_ids if 0 <= token < size]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: object, **options: Unpack[ChatOptions]) -> str:
        """The prompt's text, by the tokenizer's chat template.

        A template that loops over parts gets a list of text parts; any other gets them joined. A tool call's
        `arguments` are given as an object. Raises ChatError, which names the field that cannot be
        rendered."""
        chat = _Chat(self._tokenizer, self._input, **options)
        return chat.render(normalize_messages(messages, chat.format, joint=self._input.joint).messages)

    def chat(
        self,
        messages: object,
        *,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        limit: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatPrompt:
        """Token ids of a chat, with prompt embeddings as rows of fake ids.

        `vocab_size` is the model's: fake id `vocab_size + r` is row r of the embeddings that its extra id
        names. Without it, or without `hidden_size`, embeddings are refused. Text before and after embeddings
        is encoded separately; a chat without embeddings is encoded in one piece.

        Raises:
            ChatError: naming the field that cannot be rendered.
            PromptTableError: embeddings that cannot be read.
            CannotFit: the text has clearly more than `limit` tokens.
        """
        chat = _Chat(self._tokenizer, self._input, **options)
        normal = normalize_messages(
            messages,
            chat.format,
            joint=self._input.joint,
            make_word=lambda: _word_absent_from(messages, options),
            hidden_size=hidden_size,
        )
        text = chat.render(normal.messages)
        if not normal.embeddings:
            (ids,) = self.encode_all([text], add_special_tokens=False, limit=limit)
            return ChatPrompt(ids)
        check_fits([text], limit, partial(self.encode, add_special_tokens=False))
        if vocab_size is None:
            raise ChatError(
                "this engine takes no prompt_embeds: its vocabulary size is unknown", param="messages"
            )
        return self._join(text, normal, vocab_size)

    def _join(self, text: str, normal: NormalMessages, vocab_size: int) -> ChatPrompt:
        """Encodes the text between the markers, and replaces each marker by rows of fake ids."""
        by_marker = {slot.marker: slot for slot in normal.embeddings}
        pieces = re.split(normal.marker_pattern, text)
        rendered = set(pieces[1::2])
        for slot in normal.embeddings:
            if slot.marker not in rendered:
                raise ChatError(f"the chat template leaves out {slot.param}", param=slot.param)
        token_ids, extra_ids = array("i"), array("Q")
        embeddings: dict[int, Embeddings] = {}
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                ids = self.encode(piece, add_special_tokens=False) if piece else array("i")
                extras = array("Q", bytes(8 * len(ids)))
            else:
                rows = by_marker[piece].embeddings
                ids, extras = tokens_of(rows, vocab_size)
                embeddings[extras[0]] = rows
            token_ids.extend(ids)
            extra_ids.extend(extras)
        return ChatPrompt(token_ids, extra_ids, embeddings)


def check_source(source: str) -> None:
    """Raises EngineSpecError for a path that is no directory; a GGUF file says itself what it lacks."""
    if _is_path(source) and not source.endswith(".gguf") and not Path(source).expanduser().is_dir():
        raise EngineSpecError(f"tokenizer {source!r} is not a directory")


def load_transformers(source: str, **options: Any) -> Any:  # noqa: ANN401 - transformers is untyped
    """The transformers tokenizer of a directory, a GGUF file or a hub id; `options` are of `from_pretrained`.
    Raises EngineSpecError, which says why, if nothing usable is there."""
    path = Path(source).expanduser()
    try:
        with _LOADING:
            if path.suffix == ".gguf":
                return load_gguf_tokenizer(path)
            from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, used here alone

            name = str(path) if _is_path(source) else source
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # the Rust tokenizers raise the bare class for a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EngineSpecError(f"tokenizer {source!r} cannot be loaded: {reason}") from error


def _is_path(source: str) -> bool:
    return source.startswith(("/", ".", "~"))


class _Chat:
    """The template and options of one call, checked."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - transformers is untyped
        given: TemplateInput,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: object = None,
    ) -> None:
        self._tokenizer = tokenizer
        checked = _checked_tools(tools)
        self._tools = checked if given.tools is None or checked is None else given.tools(checked)
        self._message = given.message
        self._kwargs = _checked_kwargs(template_kwargs)
        self._add_generation_prompt = add_generation_prompt
        self._continue_final_message = continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ChatError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        try:
            template: str = tokenizer.get_chat_template(None, self._tools)
        except ValueError as error:
            raise ChatError(
                "this model has no chat template: use /v1/completions", param="messages"
            ) from error
        self.format = (given.content_format or content_format)(template)

    def render(self, messages: list[dict[str, Any]]) -> str:
        if self._message is not None:
            messages = [self._message(message, self.format) for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                add_generation_prompt=self._add_generation_prompt,
                continue_final_message=self._continue_final_message,
                tokenize=False,
                **self._kwargs,
            )
        except TEMPLATE_ERRORS as error:
            raise ChatError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return text


def _checked_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ChatError("tools must be a list of objects", param="tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ChatError(f"tools[{index}] must be an object", param=f"tools[{index}]")
    return tools or None  # templates differ on an empty list; OpenAI's meaning is "no tools"


def _checked_kwargs(template_kwargs: object) -> dict[str, Any]:
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, dict):
        raise ChatError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in template_kwargs:
        if name in _RESERVED_KWARGS:
            raise ChatError(
                f"chat_template_kwargs.{name} is not an option of the template",
                param=f"chat_template_kwargs.{name}",
            )
    return template_kwargs


def _word_absent_from(*values: object) -> str:
    """A random word of 128 bits that occurs nowhere in `values`."""
    text = msgspec.json.encode(values)
    while (word := f"kvpin{secrets.token_hex(16)}").encode() in text:
        pass
    return word
