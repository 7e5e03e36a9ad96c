"""Tokenises prompts: with the engine's tokenizer loaded here, or by asking an engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from os.path import commonprefix
from typing import Any

from engine_adapter import EngineAdapter, EngineRejected, EngineUnavailable, JsonBody
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, may_stay, off_loop
from engine_adapter.prompt.chat import ChatPrompt, ChatTokenizer
from engine_adapter.prompt.encoders import find_cut
from engine_adapter.prompt.extra_ids import mark_media
from engine_adapter.prompt.forms import Form, not_plain
from engine_adapter.prompt.template_trials import MessageShape, kept_by, lost_shapes, writes_system_first
from engine_adapter.types import TokenIds
from proxy.prompt.known_chats import ChatOwner, KnownBeginning, KnownChats
from proxy.prompt.render import ChatInput, CompletionInput

ANSWER_S = 2.0
"""Seconds that a request waits for an engine to tokenise it."""
# A chat of this many messages is rendered in about 1 ms.
_MESSAGES_PER_MS = 64


@dataclass(eq=False, repr=False)
class LocalTokenizer:
    """Tokenises here, with a loaded tokenizer. A prompt of clearly more tokens than a `limit` is a
    CannotFit."""

    tokenizer: ChatTokenizer
    _: KW_ONLY
    vocab_size: int | None
    hidden_size: int | None

    def __post_init__(self) -> None:
        cut = find_cut(self.tokenizer)
        self._known = None if cut is None else KnownChats(cut)

    @cached_property
    def lost_shapes(self) -> frozenset[MessageShape]:
        """Messages that its chat template refuses or leaves out."""
        return lost_shapes(kept_by(self.tokenizer.render))

    @cached_property
    def is_system_first(self) -> bool:
        """True if its chat template writes the system prompt before the tools."""
        return writes_system_first(self.tokenizer.render)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile(_any_of({word.replace("\\/", "/") for word in self.tokenizer.special_tokens}))

    def forms_in(self, source: ChatInput) -> frozenset[Form]:
        """SPECIAL_TOKENS if a text of this chat contains some, or may: JSON in a text can escape them."""
        for text in _texts_in([source.messages, source.tools, source.template_kwargs]):
            may_escape = "\\u" in text and text.lstrip().startswith(("{", "[", '"'))
            if may_escape or self._special.search(text.replace("\\/", "/")):  # PHP escapes each slash
                return frozenset({Form.SPECIAL_TOKENS})
        return frozenset()

    async def chat(self, source: ChatInput, body: JsonBody, limit: int | None = None) -> ChatPrompt:
        """The prompt of a chat. Raises ChatError and PromptTableError."""
        return await self.tokenizer.off_loop(
            len(body.raw),
            lambda: self.tokenizer.chat(
                **_of_template(source), vocab_size=self.vocab_size, hidden_size=self.hidden_size, limit=limit
            ),
        )

    async def turn(
        self, source: ChatInput, body: JsonBody, owner: ChatOwner, limit: int | None = None
    ) -> tuple[ChatPrompt, KnownBeginning | None]:
        """The same as `chat`, but encodes only what follows the known beginning of the chat.

        Returns:
            The prompt, and its known beginning; None where the chat had to be encoded whole.

        Raises:
            ChatError, PromptTableError: see `chat`.
        """
        known = self._known
        if known is None or not source.is_text:
            return await self.chat(source, body, limit), None
        options = _of_template(source)
        if may_stay(ms := self._render_ms(source, body), "render"):
            text = self.tokenizer.render(**options)
        else:
            text = await off_loop(partial(self.tokenizer.render, **options), ms=ms, what="render")
        chat = known.read(text, owner)
        encoded = await self._encode(chat.new, sum(map(len, chat.new)), limit, add_special_tokens=False)
        token_ids, beginning = known.add(chat, encoded)
        return ChatPrompt(token_ids), beginning

    @staticmethod
    def _render_ms(source: ChatInput, body: JsonBody) -> float:
        """The milliseconds that rendering a chat takes. A template may look at any message for any other: it
        always gets all of them."""
        messages = len(source.messages) if isinstance(source.messages, list) else 0
        ms, size = messages / _MESSAGES_PER_MS, len(body.raw)
        if size > VALUES_PER_MS:
            ms = max(ms, size / JSON_BYTES_PER_MS)
            if source.tools or source.template_kwargs or not_plain(body):  # a template may write each value
                ms = max(ms, body.n_values / VALUES_PER_MS)
        return ms

    async def text(self, source: CompletionInput, limit: int | None = None) -> ChatPrompt:
        """The prompt of a completion's text."""
        text = str(source.prompt)
        (ids,) = await self._encode([text], len(text), limit, add_special_tokens=source.add_special_tokens)
        return ChatPrompt(ids)

    def _encode(
        self, texts: Sequence[str], chars: int, limit: int | None, *, add_special_tokens: bool
    ) -> Coroutine[Any, Any, list[TokenIds[int]]]:
        """Token ids of each text; `chars`: of all."""
        encode_all = self.tokenizer.encode_all
        return self.tokenizer.off_loop(
            chars, partial(encode_all, texts, add_special_tokens=add_special_tokens, limit=limit)
        )


def _any_of(words: Iterable[str], levels: int = 32) -> str:
    """A pattern that finds any of some words, with at most so many `levels` of groups. A common beginning
    stands once: else each `[` of a text would be compared with all of a model's words that begin with it."""
    alike: dict[str, list[str]] = {}
    for word in words:
        alike.setdefault(word[:1] if levels else word, []).append(word)
    if "" in alike:
        return ""
    ways = []
    for some in alike.values():
        start = commonprefix(some)  # noqa: RUF071 - of texts
        ways.append(re.escape(start) + _any_of({word[len(start) :] for word in some}, max(levels - 1, 0)))
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways) or '(?!)'})"


def _of_template(source: ChatInput) -> dict[str, Any]:
    return {
        "messages": source.messages,
        "tools": source.tools,
        "add_generation_prompt": source.add_generation_prompt,
        "continue_final_message": source.continue_final_message,
        "template_kwargs": source.template_kwargs,
    }


def _texts_in(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each


class EngineTokenizer:
    """Asks engines in turn, one call per prompt: slower, and always right.

    A prompt that no engine tokenises within 2 s stays unknown and does not fail: it is placed by session and
    load, and an error in it is the engine's to report."""

    def __init__(self) -> None:
        self._turn = -1

    async def ask(self, engines: Iterable[EngineAdapter], path: str, body: JsonBody) -> ChatPrompt | None:
        """Token ids of a request; None where the engine refuses it, or none answers in time."""
        with suppress(TimeoutError, EngineRejected):
            async with asyncio.timeout(ANSWER_S):
                for adapter in self._in_turn(engines):
                    with suppress(EngineUnavailable):
                        return ChatPrompt(await adapter.tokenize(path, body))
        return None

    async def render(self, engines: Iterable[EngineAdapter], path: str, body: JsonBody) -> ChatPrompt | None:
        """Tokens of a request that holds images, audio or video, each marked where it begins, or prompt
        embeddings, which mark each block of the engine's cache; None where no engine answers in time. One
        that refuses may lack an item that was sent to another: all are asked."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                for adapter in self._in_turn(engines):
                    with suppress(EngineUnavailable, EngineRejected):
                        rendered = await adapter.render(path, body)
                        ids = rendered.token_ids
                        return ChatPrompt(ids, mark_media(len(ids), rendered.media, rendered.embeds))
        return None

    def _in_turn(self, engines: Iterable[EngineAdapter]) -> list[EngineAdapter]:
        """The engines, each call beginning with the next one."""
        found = list(engines)
        self._turn += 1
        first = self._turn % len(found) if found else 0
        return found[first:] + found[:first]
