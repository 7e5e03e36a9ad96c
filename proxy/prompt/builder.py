"""Builds prompts from request bodies, for the engines of one pool."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from engine_adapter import (
    Capability,
    ChatError,
    EngineAdapter,
    EngineInfo,
    EngineSpecError,
    EngineUnavailable,
    JsonBody,
    KvTarget,
    common_prefix,
)
from engine_adapter.off_loop import JSON_BYTES_PER_MS, TOKEN_ID_BYTES_PER_MS, in_own_thread, off_loop
from engine_adapter.prompt.chat import ChatPrompt, ChatTokenizer
from engine_adapter.prompt.embeds import read_embeds, reading_ms
from engine_adapter.prompt.forms import has_own_template
from engine_adapter.prompt.tokenizer_process import load_tokenizer
from engine_adapter.types import ExtraIds, TokenIds
from proxy.errors import BadRequest
from proxy.errors.codes import Code
from proxy.prompt.known_chats import KnownBeginning, Owner
from proxy.prompt.media import find_media, media_fields, not_plain, texts_only
from proxy.prompt.registered_tables import PromptTables
from proxy.prompt.render import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    ChatInput,
    CompletionInput,
    EmbeddedInput,
    MixedInput,
    PromptInput,
    ResponseInput,
    read_native,
    read_prompt,
)
from proxy.prompt.tokenizer import EngineTokenizer, LocalTokenizer

Source = Literal["local", "engine", "client"]
Load = Callable[[str], Awaitable[ChatTokenizer]]
# Two texts that share no leading token.
_ANY_TEXT = ("0", "x")
# After this many prompts with other ids, all of their kind are unknown. One may hold a date that changed
# meanwhile.
_REFUTED = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine sees it.

    Attributes:
        token_ids: int32, fake ids included.
        extra_ids: uint64 per token, None when all of it is text.
        salt: the cache salt it runs under, None for none.
        lora: the LoRA adapter it runs with, None for none.
        exact: the token ids are known to be the engine's own.
        source: who made the token ids.
        media: some ids stand for images, audio or video, which ids alone do not identify.
        whole: False where only the text before the first image is known.
        special: engines may render it in different ways.
        beginning: what is known of its blocks from earlier chats; None where nothing can be.
    """

    token_ids: TokenIds[int] = field(repr=False)
    extra_ids: ExtraIds[int] | None = field(default=None, repr=False)
    salt: str | None = None
    lora: str | None = None
    exact: bool = field(default=False, compare=False)
    source: Source = field(default="client", compare=False)
    media: bool = field(default=False, compare=False)
    whole: bool = field(default=True, compare=False)
    special: bool = field(default=False, compare=False)
    beginning: KnownBeginning | None = field(default=None, compare=False, repr=False)

    @property
    def kv(self) -> KvTarget:
        """The prompt in the form that adapters take."""
        return KvTarget(self.token_ids, self.extra_ids, self.salt, self.lora, self.exact)


@dataclass(frozen=True, slots=True)
class Exactness:
    """State of a pool's tokenisation: who tokenises, and whether the ids are known to be right.

    Attributes:
        ok: every id is known to be the engine's own.
        detail: one sentence for logs and stats.
        source: who tokenises.
    """

    ok: bool
    detail: str
    source: Literal["local", "engine", "none"]

    @property
    def event(self) -> str:
        """The event to log for this outcome."""
        if self.source == "local":
            return "tokenizer gives the engine's ids" if self.ok else "tokenizer is not checked"
        return "the engines tokenise" if self.source == "engine" else "prompts are not followed"


class PromptBuilder:
    """Builds prompts as the engines of one pool do.

    Attributes:
        info: what the pool's first engine reported about itself.
        local: the tokenizer loaded here, None where there is none.
        reason: why there is none.
        exact: the ids made here were found to be the engine's.
        exactness: how prompts are tokenised, and whether that is known to be right.
        agreed, differed: served prompts for which the engine reported the same ids, or others.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        tables: PromptTables,
        tokenizer: ChatTokenizer | None = None,
        engines: Callable[[], Iterable[EngineAdapter]] = tuple,
        renderers: Callable[[], Iterable[EngineAdapter]] = tuple,
        embedders: Callable[[], Iterable[EngineAdapter]] = tuple,
    ) -> None:
        """Until there is a tokenizer here, the engines tokenise.

        `tokenizer` is used at once, see `adopt` for one that is yet to be checked. `engines`, `renderers` and
        `embedders` give those that can tokenise a prompt now: of text, with images, and with embeddings.
        """
        self.info = info
        self.local: LocalTokenizer | None = None
        self.reason = "no tokenizer is known for this model"
        self.exact = False
        self.exactness = Exactness(False, "not checked yet", "none")
        self.agreed = self.differed = 0
        # Served prompts for which the engine had other ids, by who made ours and whether they were special.
        self._refuted = Counter[tuple[Source, bool]]()
        self._tables = tables
        self._engines = EngineTokenizer(engines, renderers, embedders)
        self._tokenizer: LocalTokenizer | EngineTokenizer = self._engines
        # An engine that renders with the same code refuses what cannot be rendered here: the client's fault.
        # Any other may take more than kvpin does: a prompt that cannot be rendered here is only unknown.
        self._strict = info.renders_alike
        self._asks_about_tools = False
        self._asks_about_special = Capability.TOKENIZE in info.capabilities and not self._strict
        if tokenizer is not None:
            self.adopt(tokenizer)
            self.use_local()

    @property
    def tokenizer(self) -> LocalTokenizer | EngineTokenizer:
        """The tokenizer that makes the prompts' ids now."""
        return self._tokenizer

    def adopt(self, tokenizer: ChatTokenizer) -> None:
        """The engine's tokenizer is loaded here. Prompts are tokenised with it after `use_local`."""
        self.local = LocalTokenizer(
            tokenizer, vocab_size=self.info.vocab_size, hidden_size=self.info.hidden_size
        )

    async def load(self, source: str, load: Load = load_tokenizer) -> bool:
        """Loads the engine's tokenizer from a directory, a GGUF file or the hub, and adopts it, which takes
        seconds; `reason` says why it failed. Returns False if it failed now and may succeed later."""
        try:
            tokenizer = await load(source)
            await in_own_thread(lambda: self.adopt(tokenizer))  # compiles and tries the chat template
        except (EngineSpecError, EngineUnavailable) as error:
            self.reason = str(error)
            return isinstance(error, EngineSpecError)
        return True

    def use_local(self) -> None:
        """From now on prompts are tokenised here, if a tokenizer was loaded."""
        self._tokenizer = self.local or self._engines

    def ask_engines(self) -> None:
        """From now on the engines tokenise everything."""
        self._tokenizer = self._engines

    def ask_engines_about_tools(self) -> None:
        """From now on the engines tokenise chats that use tools."""
        self._asks_about_tools = True

    def distrust(self, prompt: Prompt) -> bool:
        """Notes that an engine made other ids of a prompt. Ids from its source are not exact from now on; in
        place of the tokenizer here, the engines tokenise. False if that was known."""
        is_new = not self._is_refuted(prompt.source)
        self._refuted[prompt.source, prompt.special] += 1
        if prompt.source == "local" and Capability.TOKENIZE in self.info.capabilities:
            self.ask_engines()
        return is_new

    def _is_refuted(self, source: Source) -> bool:
        return any(self._refuted[source, special] for special in (False, True))

    async def build(
        self,
        path: str,
        body: JsonBody,
        *,
        salt: str | None,
        lora: str | None = None,
        tenant: str | None = None,
        bounded: bool = True,
    ) -> Prompt | None:
        """The prompt of a request; None when it cannot be known, and the request is forwarded as it is.

        It will run under `salt`, with `lora`. What is remembered of it takes the `tenant`'s share of memory.
        If `bounded`, a prompt beyond the model's context is refused.

        Raises:
            BadRequest: a field that no engine can take, or a prompt beyond the model's context.
            ChatError, PromptTableError: messages or extra ids that break their rules, with the field.
        """
        per_ms = TOKEN_ID_BYTES_PER_MS if path == COMPLETIONS_PATH else JSON_BYTES_PER_MS
        native = self.info.routes.get(path)
        source: PromptInput | None = await off_loop(
            lambda: read_prompt(path, body) if native is None else read_native(native.prompt, body),
            ms=len(body.raw) / per_ms,
        )
        if source is None:
            return None
        prompt = await self._tokenise(source, path, body, Owner(salt, lora, tenant))
        if prompt is None:
            return None
        if bounded and native is None:  # an engine's own routes have errors of their own
            self._check_length(len(prompt.token_ids), source.param)
        return replace(prompt, salt=salt, lora=lora)

    def decode(self, token_ids: TokenIds[int]) -> str | None:
        """The text of token ids, None without a tokenizer here."""
        return None if self.local is None else self.local.tokenizer.decode(token_ids)

    async def _tokenise(self, source: PromptInput, path: str, body: JsonBody, owner: Owner) -> Prompt | None:
        match source:
            case CompletionInput():
                return await self._completion(source, path, body)
            case EmbeddedInput():
                return await self._embedded(source.data, path, body)
            case MixedInput():
                return self._made(await self._engines.ask(path, body), self._engines)
            case ChatInput() if source.is_text or self._strict:
                return await self._chat(source, body, owner)
            case ResponseInput() if source.is_text:
                return self._made(await self._engines.ask(path, body), self._engines)
            case _:
                return await self._with_media(source, path, body, owner)

    async def _embedded(self, data: object, path: str, body: JsonBody) -> Prompt | None:
        """A completion's embeddings. An engine that renders as kvpin does identifies them so, too."""
        if not self._strict:
            return await self._with_embeddings(path, body)
        vocab_size, hidden_size = self.info.vocab_size, self.info.hidden_size
        if data is None or vocab_size is None or hidden_size is None:
            return None

        def read() -> ChatPrompt:
            rows = read_embeds(data, param=EmbeddedInput.param, hidden_size=hidden_size)
            return ChatPrompt.of_embeddings(rows, vocab_size)

        prompt = await off_loop(read, ms=reading_ms(data))
        return Prompt(prompt.token_ids, prompt.extra_ids, exact=True)

    async def _with_media(
        self, source: ChatInput | ResponseInput, path: str, body: JsonBody, owner: Owner
    ) -> Prompt | None:
        """A prompt with media: all of it where an engine renders it, else the text before the first item."""
        prompt, parts = None, find_media(media_fields(body))
        if any(part.kind == "embeddings" for part in parts):
            # They are part of the identity of all blocks, also of those of the text before them.
            is_alone = all(part.kind == "embeddings" for part in parts)
            return await self._with_embeddings(path, body) if is_alone else None
        if all(part.is_lasting for part in parts):
            prompt = await self._engines.render(path, body)
        if prompt is not None and prompt.extra_ids is None:
            return self._made(prompt, self._engines)
        if prompt is not None:
            # Never exact: its ids must not be sent in place of the images.
            return Prompt(prompt.token_ids, prompt.extra_ids, source="engine", media=True)
        return await self._before_media(source, body, owner) if isinstance(source, ChatInput) else None

    async def _with_embeddings(self, path: str, body: JsonBody) -> Prompt | None:
        """A prompt with embeddings. Never whole: an engine may convert them, and identify others then."""
        prompt = await self._engines.render(path, body, embeds=True)
        if prompt is None:
            return None
        return Prompt(prompt.token_ids, prompt.extra_ids, source="engine", media=True, whole=False)

    async def _before_media(self, source: ChatInput, body: JsonBody, owner: Owner) -> Prompt | None:
        """The tokens before the first message with media: two different texts in its place share them."""
        made = []
        for text in _ANY_TEXT:
            messages = texts_only(source.messages, text)
            if messages is None:
                return None
            tokens = await self._chat(
                replace(source, messages=messages, n_media=0, more=not_plain(messages)),
                body.replace(messages=messages),
                owner,
            )
            if tokens is None:
                return None
            made.append(tokens.token_ids)
        return Prompt(made[0][: common_prefix(*made)], source="local", whole=False)

    async def _chat(self, source: ChatInput, body: JsonBody, owner: Owner) -> Prompt | None:
        tokenizer = self._tokenizer
        special = not self._strict and not self.info.common_form(body, source.more)
        if (special and self._asks_about_special) or (self._asks_about_tools and source.has_tools):
            tokenizer = self._engines
        if tokenizer is self.local and special and has_own_template(body):
            return None
        if isinstance(tokenizer, LocalTokenizer):
            try:
                prompt, beginning = await tokenizer.turn(source, body, owner)
                return self._made(prompt, tokenizer, special=special, beginning=beginning)
            except ChatError:
                if self._strict:
                    raise
        # Also what cannot be rendered here: the engine may render more. Ids do not tell images apart.
        asked = await self._engines.ask(CHAT_PATH, body) if source.is_text else None
        return self._made(asked, self._engines, special=special)

    async def _completion(self, source: CompletionInput, path: str, body: JsonBody) -> Prompt | None:
        if isinstance(source.prompt, array):
            prompt: Prompt | None = Prompt(source.prompt, exact=True)
        elif isinstance(self._tokenizer, LocalTokenizer):
            prompt = self._made(await self._tokenizer.text(source), self._tokenizer)
        else:
            prompt = self._made(await self._engines.ask(path, body), self._engines)
        if prompt is None:
            return None
        vocab_size = self.info.vocab_size
        if vocab_size is None:
            # Without the vocabulary size, fake ids look like text ids.
            is_plain = source.explicit is None and source.table is None
            return prompt if is_plain else None
        extra_ids = self._tables.extra_ids(prompt.token_ids, source, vocab_size)
        return prompt if extra_ids is None else replace(prompt, extra_ids=extra_ids)

    def _made(
        self,
        prompt: ChatPrompt | None,
        tokenizer: LocalTokenizer | EngineTokenizer,
        *,
        special: bool = False,
        beginning: KnownBeginning | None = None,
    ) -> Prompt | None:
        """The tokens with their source; `special`: engines may make other ones of a prompt of this kind."""
        source: Source = "engine" if tokenizer is self._engines else "local"
        if prompt is None or self._refuted[source, special] >= _REFUTED:
            return None
        exact = (source == "engine" or (self.exact and not special)) and not self._is_refuted(source)
        return Prompt(
            prompt.token_ids,
            prompt.extra_ids,
            exact=exact,
            source=source,
            special=special,
            beginning=beginning,
        )

    def _check_length(self, tokens: int, param: str) -> None:
        limit = self.info.max_model_len
        if limit is not None and tokens > limit:
            raise BadRequest(
                f"this model's context is {limit} tokens; the prompt has {tokens}",
                param=param,
                code=Code.CONTEXT_LENGTH_EXCEEDED,
                more=self.info.too_long(tokens, limit),
            )
