"""Renders and tokenises requests exactly as transformers does. The proxy and the embedded engine share it.

`ChatTokenizer.load` reads a tokenizer, `render` gives a prompt's text, `encode` its ids. `chat` does both,
and puts prompt embeddings where their content parts stood. Templates are always rendered by templates.py,
whoever reads the tokenizer: what a template may take is bounded there.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from array import array
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from engine_adapter.errors import ChatError, EngineSpecError
from engine_adapter.off_loop import JsonInStrings, off_loop
from engine_adapter.prompt.encoders import Encoder, check_fits, exact_encoder
from engine_adapter.prompt.extra_ids import Embeddings, read_embeds, tokens_of
from engine_adapter.prompt.gguf_tokenizer import load_gguf_tokenizer
from engine_adapter.prompt.template_input import USUAL, ContentFormat, TemplateInput, is_text
from engine_adapter.prompt.template_trials import content_format
from engine_adapter.prompt.templates import TEMPLATE_ERRORS, choose_template, render_template
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
    """A tokenizer and its chat template. Calls are thread-safe; encoding releases the GIL. `transformers`:
    the tokenizer of transformers; `encoder`: makes its ids."""

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
        self.source, self.transformers, self._input = source, tokenizer, template_input
        self.encoder = encoder or exact_encoder(tokenizer)

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
        return ChatTokenizer(
            self.transformers, source=self.source, encoder=self.encoder, template_input=given
        )

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; a model's embedding may have more rows."""
        return len(self.transformers)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text; None where the tokenizer names none."""
        token: int | None = self.transformers.eos_token_id
        return token

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The added tokens that `decode` may skip."""
        return frozenset(
            str(token) for token in self.transformers.added_tokens_decoder.values() if token.special
        )

    def template(self, tools: object) -> str | None:
        """The chat template for these tools; None for a tokenizer without one."""
        try:
            return choose_template(self.transformers.chat_template, tools)
        except ValueError:
            return None

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds[int]:
        """Token ids of `text`, as transformers gives them."""
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool, limit: int | None
    ) -> list[TokenIds[int]]:
        """Token ids of each text. Raises CannotFit if they have clearly more than `limit` together."""
        check_fits(texts, limit, partial(self.encode, add_special_tokens=False))
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def off_loop(self, chars: int, work: Callable[[], _Result]) -> Coroutine[Any, Any, _Result]:
        """Does `work`, which encodes a text of `chars` characters: here if it takes about 1 ms at most, else
        in a thread, so that it does not block the event loop."""
        return off_loop(work, ms=chars / self.encoder.chars_per_ms, what="encode")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; ids outside the vocabulary are left out."""
        size = self.vocab_size
        known = [token for token in token_ids if 0 <= token < size]
        text: str = self.transformers.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: object, **options: Unpack[ChatOptions]) -> str:
        """The prompt's text, by the tokenizer's chat template.

        A template that loops over parts gets a list of text parts; any other gets them joined. A tool call's
        `arguments` are given as an object. Raises ChatError, which names the field that cannot be
        rendered."""
        return self._render(messages, None, **options)[0]

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
        text, normal = self._render(messages, hidden_size, **options)
        if not normal.embeddings:
            (ids,) = self.encode_all([text], add_special_tokens=False, limit=limit)
            return ChatPrompt(ids)
        check_fits([text], limit, partial(self.encode, add_special_tokens=False))
        if vocab_size is None:
            raise ChatError(
                "this engine takes no prompt_embeds: its vocabulary size is unknown", param="messages"
            )
        return self._join(text, normal, vocab_size)

    def _render(
        self,
        messages: object,
        hidden_size: int | None,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: object = None,
    ) -> tuple[str, NormalMessages]:
        """The text of a chat, and its messages with the embeddings whose markers are in the text."""
        given, offered, variables = self._input, _checked_tools(tools), _checked_kwargs(template_kwargs)
        if offered is not None and given.tools is not None:
            offered = given.tools(offered)
        if add_generation_prompt and continue_final_message:
            raise ChatError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        template = self.template(offered)
        if template is None:
            raise ChatError("this model has no chat template: use /v1/completions", param="messages")
        wanted = (given.content_format or content_format)(template)
        normal = normalize_messages(messages, wanted, joint=given.joint, hidden_size=hidden_size)
        chat = normal.messages
        if given.message is not None:
            chat = [given.message(message, wanted) for message in chat]
        try:
            text = render_template(
                template,
                chat,
                tools=offered,
                documents=variables.get("documents"),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self.transformers.special_tokens_map, **variables},
                ascii_space=given.ascii_space,
            )
        except TEMPLATE_ERRORS as error:
            raise ChatError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return text, normal

    def _join(self, text: str, normal: NormalMessages, vocab_size: int) -> ChatPrompt:
        """Encodes the text between the markers, and replaces each marker by rows of fake ids."""
        # In time linear in the text, however many markers there are.
        pieces = re.split(f"({normal.word}x[0-9]+x)", text)
        rendered = set(pieces[1::2])
        for marker, (param, _) in normal.embeddings.items():
            if marker not in rendered:
                raise ChatError(f"the chat template leaves out {param}", param=param)
        token_ids, extra_ids = array("i"), array("Q")
        embeddings: dict[int, Embeddings] = {}
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                ids = self.encode(piece, add_special_tokens=False) if piece else array("i")
                extras = array("Q", bytes(8 * len(ids)))
            else:
                rows = normal.embeddings[piece][1]
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


# --- messages in the form that templates expect -------------------------------------------------------


class NormalMessages(msgspec.Struct, frozen=True):
    """Messages ready for a template.

    Attributes:
        embeddings: those taken out of the messages, in order: marker → the field they came in, and they.
        word: begins every marker. It is drawn for this chat, so no client can have written it.
    """

    messages: list[dict[str, Any]]
    embeddings: dict[str, tuple[str, Embeddings]] = {}
    word: str = ""


def normalize_messages(
    messages: object, wanted: ContentFormat, *, joint: str = "\n", hidden_size: int | None = None
) -> NormalMessages:
    """Checks and converts `messages`, decoded from JSON; the originals are not changed.

    `wanted` is the form in which the template reads a list of parts, and `joint` joins texts that become one.
    Without the `hidden_size` of the model, embeddings are refused. Raises ChatError, naming the field at
    fault; PromptTableError: embeddings that cannot be read."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a list of at least one message", param="messages")
    if all(type(each) is dict and is_text(each) and each["role"] for each in messages):
        return NormalMessages(messages)
    reader = _Reader(wanted, joint, hidden_size)
    normal = [reader.message(message, i) for i, message in enumerate(messages)]
    return NormalMessages(normal, reader.embeddings, reader.word)


@dataclass(slots=True)
class _Reader:
    """Converts the messages of one chat and collects its embeddings."""

    _wanted: ContentFormat
    _joint: str
    _hidden_size: int | None
    embeddings: dict[str, tuple[str, Embeddings]] = field(default_factory=dict)
    word: str = ""
    _strings: JsonInStrings = field(default_factory=JsonInStrings)

    def message(self, message: object, index: int) -> dict[str, Any]:
        name = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatError(f"{name} must be an object", param=name)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{name}.role must be a non-empty string", param=f"{name}.role")
        content = message.get("content")
        changes: dict[str, Any] = {}
        if isinstance(content, list):
            changes["content"] = self._parts(content, f"{name}.content")
        elif content is not None and not isinstance(content, str):
            raise ChatError(f"{name}.content must be a string or a list of parts", param=f"{name}.content")
        if message.get("tool_calls") is not None:
            changes["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls", self._strings)
        return message | changes if changes else message

    def _parts(self, parts: list[Any], name: str) -> str | list[dict[str, Any]]:
        texts = [self._part(part, f"{name}[{j}]") for j, part in enumerate(parts)]
        if self._wanted is ContentFormat.PARTS:
            return [{"type": "text", "text": text} for text, _ in texts]
        joined = ""
        after_text = False
        for text, is_embedding in texts:
            # Embeddings join their neighbours directly.
            joined += self._joint + text if after_text and not is_embedding else text
            after_text = not is_embedding
        return joined

    def _part(self, part: object, name: str) -> tuple[str, bool]:
        """The text of a part, and whether it is a marker."""
        if not isinstance(part, dict):
            raise ChatError(f"{name} must be an object with a type", param=name)
        kind = part.get("type")
        if kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise ChatError(f"{name}.text must be a string", param=f"{name}.text")
            return text, False
        if kind != "prompt_embeds":
            raise ChatError(
                f"{name} has type {kind!r}: this engine takes text and prompt_embeds", param=f"{name}.type"
            )
        name = f"{name}.data"
        if self._hidden_size is None:
            raise ChatError(f"{name}: prompt embeddings cannot be used here", param=name)
        embeddings = read_embeds(part.get("data"), param=name, hidden_size=self._hidden_size)
        self.word = self.word or f"kvpin{secrets.token_hex(16)}"
        marker = f"{self.word}x{len(self.embeddings)}x"
        self.embeddings[marker] = name, embeddings
        return marker, True


def _tool_calls(calls: object, name: str, strings: JsonInStrings) -> list[dict[str, Any]]:
    """Tool calls with `arguments` as objects, which templates expect; OpenAI clients send JSON text."""
    if not isinstance(calls, list):
        raise ChatError(f"{name} must be a list", param=name)
    normal = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ChatError(f"{name}[{index}].function must be an object", param=f"{name}[{index}].function")
        if isinstance(text := function.get("arguments"), str):
            if strings.is_too_much(text):
                param = f"{name}[{index}].function.arguments"
                raise ChatError(f"{param}: the calls have too many values", param=param)
            function = function | {"arguments": _arguments(text)}
        normal.append(call | {"function": function})
    return normal


def _arguments(text: str) -> Any:  # noqa: ANN401 - JSON
    """A call's arguments; broken JSON from a model counts as none, as it does in vLLM."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}
