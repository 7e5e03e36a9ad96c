"""Builds prompts from request bodies, for the engines of one pool."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from engine_adapter import (
    Capability,
    ChatError,
    EngineAdapter,
    EngineInfo,
    EngineSpecError,
    EngineUnavailable,
    JsonBody,
    KvTarget,
)
from engine_adapter.causes import Code
from engine_adapter.off_loop import (
    JSON_BYTES_PER_MS,
    TOKEN_ID_BYTES_PER_MS,
    VALUES_PER_MS,
    in_own_thread,
    may_stay,
    off_loop,
)
from engine_adapter.prompt.chat import ChatPrompt, ChatTokenizer
from engine_adapter.prompt.encoders import CannotFit
from engine_adapter.prompt.extra_ids import read_embeds, reading_ms, resolving_ms
from engine_adapter.prompt.forms import Form, forms_of
from engine_adapter.prompt.template_trials import MessageShape
from engine_adapter.prompt.tokenizer_process import load_tokenizer
from engine_adapter.types import ExtraIds, TokenIds
from proxy.errors import TooLong
from proxy.prompt.known_chats import ChatOwner, KnownBeginning, KnownMedia, TextAround, head_key
from proxy.prompt.media import find_media, is_text_message, media_fields, texts_only
from proxy.prompt.registered_tables import RegisteredTables
from proxy.prompt.render import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    AskedInput,
    ChatInput,
    CompletionInput,
    EmbeddedInput,
    PromptInput,
    read_native,
    read_prompt,
)
from proxy.prompt.tokenizer import EngineTokenizer, LocalTokenizer
from proxy.prompt.trust import Exactness, FormTable, Source
from proxy.runtime import settle

Load = Callable[[str], Awaitable[ChatTokenizer]]
# Two texts that share no leading token.
_ANY_TEXT = ("0", "x")
# What only the engine reads has no form that kvpin knows.
_OTHER, _TEXT = frozenset({Form.OTHER}), frozenset({Form.TEXT})
_LOADED = "the tokenizer {source!r} is loaded; it is checked once the engine has the model in memory"


Ask = Callable[["PromptBuilder"], Iterable[EngineAdapter]]
"""Gives the engines of a builder that can be asked now."""


def _nobody(_builder: PromptBuilder) -> Iterable[EngineAdapter]:
    return ()


class Prompt(msgspec.Struct, frozen=True, eq=False):
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
        forms: what engines may read in ways of their own.
        beginning: what is known of its blocks from earlier chats; None where nothing can be.
    """

    token_ids: TokenIds[int]
    extra_ids: ExtraIds[int] | None = None
    salt: str | None = None
    lora: str | None = None
    exact: bool = False
    source: Source = "client"
    media: bool = False
    whole: bool = True
    forms: frozenset[Form] = frozenset()
    beginning: KnownBeginning | None = None

    def __eq__(self, other: object) -> bool:
        """True if it is the same to an engine."""
        same = isinstance(other, Prompt) and replace(self.kv, exact=False) == replace(other.kv, exact=False)
        return bool(same)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Without its tokens."""
        return f"Prompt(of {len(self.token_ids)} tokens, exact={self.exact}, source={self.source!r})"

    @property
    def kv(self) -> KvTarget:
        """The prompt in the form that adapters take."""
        return KvTarget(self.token_ids, self.extra_ids, self.salt, self.lora, self.exact)


class PromptBuilder:
    """Builds prompts as some engines of a pool do: those that make the same tokens of every prompt, as far as
    is known.

    Attributes:
        info: what the first of these engines reported about itself.
        key: all that is known of what makes prompts there before any is compared. Engines with another key
            have another builder.
        local: the tokenizer loaded here, None where there is none.
        reason: why there is none.
        forms: who makes the ids of each form of prompt.
        is_proven: the forms were compared with what one of the engines makes.
        lost_early: messages that an engine's chat template loses, until then.
        agreed, differed: served prompts for which the engine reported the same ids, or others.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        tables: RegisteredTables,
        key: Hashable = None,
        context: Callable[[], int | None] | None = None,
        engines: Ask = _nobody,
        renderers: Ask = _nobody,
        embedders: Ask = _nobody,
    ) -> None:
        """Until there is a tokenizer here, the engines tokenise.

        `engines`, `renderers` and `embedders` give those of this builder that can tokenise a prompt now: of
        text, with images, and with embeddings.
        `context` gives the longest prompt that any engine of the pool takes, in tokens; None without a limit.
        """
        self.info, self.key, self.is_proven = info, key, False
        self.lost_early: frozenset[MessageShape] = frozenset()
        self._loading, self._attempts, self._is_nowhere = asyncio.Lock(), 0, False
        self._context = context or (lambda: info.max_model_len)
        self.local: LocalTokenizer | None = None
        self.reason = "no tokenizer is known for this model"
        self.agreed = self.differed = 0
        self._tables = tables
        self._asked = engines, renderers, embedders
        self._engines = EngineTokenizer()
        self._known_media = KnownMedia()
        # An engine that renders with the same code refuses what cannot be rendered here: the client's fault.
        # Any other may take more than kvpin does: a prompt that cannot be rendered here is only unknown.
        self._strict = info.renders_alike
        self.ask_engines(self.reason)

    def forget_media(self) -> None:
        """An engine has connected: its image processor may have other settings than one rendered by."""
        self._known_media = KnownMedia()

    def adopt(self, tokenizer: ChatTokenizer) -> None:
        """The engine's tokenizer is loaded here. Prompts are tokenised with it as far as it is proven."""
        vocab_size, hidden_size = self.info.vocab_size, self.info.hidden_size
        self.local = LocalTokenizer(tokenizer, vocab_size=vocab_size, hidden_size=hidden_size)

    async def load(self, source: str, load: Load = load_tokenizer) -> bool:
        """Loads the engine's tokenizer from a directory, a GGUF file or the hub, and adopts it, which takes
        seconds, unless that was done. Who waits for an attempt does not make another one. `reason` says why
        it failed, or is not used yet. Returns False if it failed now and may succeed later."""
        before = self._attempts
        async with self._loading:
            if self.local is not None or self._is_nowhere:
                return True
            if self._attempts != before:
                return False
            if not (self.is_proven or before):
                self.ask_engines(f"the tokenizer {source!r} is being loaded")
            try:
                tokenizer = (await load(source)).rendering(self.info.template_input)
                await in_own_thread(lambda: self.adopt(tokenizer))  # compiles and tries the chat template
                is_final, self.reason = True, _LOADED.format(source=source)
            except (EngineSpecError, EngineUnavailable) as error:
                is_final, self.reason = isinstance(error, EngineSpecError), str(error)
            self._attempts += 1
            if not self.is_proven and self.local is None:
                self.ask_engines(self.reason)
            self._is_nowhere = is_final and self.local is None
            settle()
            return is_final

    def copy(self) -> PromptBuilder:
        """The same for one engine, of which something else is found out from now on."""
        engines, renderers, embedders = self._asked
        made = PromptBuilder(
            self.info,
            tables=self._tables,
            key=self.key,
            context=self._context,
            engines=engines,
            renderers=renderers,
            embedders=embedders,
        )
        made.take_over(self)
        made.forms, made.is_proven = deepcopy(self.forms), self.is_proven
        made.agreed, made.differed = self.agreed, self.differed
        return made

    def take_over(self, other: PromptBuilder) -> None:
        """Uses the tokenizer of a builder with the same key, which knows chats."""
        self.local, self._is_nowhere = other.local, other._is_nowhere
        self.ask_engines(other.reason)

    def prove(self, forms: FormTable) -> None:
        """One of its engines was compared, with this outcome."""
        self.forms, self.is_proven = forms, True

    @property
    def is_blank(self) -> bool:
        """True if it can make no prompts: no tokenizer is known, and its engines do not tokenise."""
        return self.local is None and not self.can_ask

    def ask_engines(self, why: str) -> None:
        """From now on the engines tokenise everything, if they can."""
        self.reason = why
        self.forms = FormTable(can_ask=self.can_ask, detail=why)

    @property
    def exactness(self) -> Exactness:
        """Who makes the ids, and whether they are known to be right."""
        return self.forms.summary(None if self.local is None else self.local.tokenizer.source, self.reason)

    @property
    def lost_shapes(self) -> frozenset[MessageShape]:
        """Messages that the engines' chat template refuses or leaves out, as far as is known."""
        return self.forms.lost_shapes if self.is_proven else self.forms.lost_shapes | self.lost_early

    @property
    def can_ask(self) -> bool:
        """True if the engines tokenise requests."""
        return Capability.TOKENIZE in self.info.capabilities

    async def build(
        self,
        path: str,
        body: JsonBody,
        *,
        salt: str | None,
        lora: str | None = None,
        adapter: str | None = None,
        tenant: str | None = None,
        bounded: bool = True,
    ) -> Prompt | None:
        """The prompt of a request; None when it cannot be known, and the request is forwarded as it is.

        It will run under `salt`, with `lora`, whose identity is `adapter`. What is remembered of it takes the
        `tenant`'s share of memory. A prompt beyond the context of every engine is refused; unless `bounded`,
        only if it is clearly longer. None where an engine cuts it: its blocks are others.

        Raises:
            BadRequest: a field that no engine can take.
            TooLong: a prompt beyond the model's context.
            ChatError, PromptTableError: messages or extra ids that break their rules, with the field.
        """
        per_ms = TOKEN_ID_BYTES_PER_MS if path == COMPLETIONS_PATH else JSON_BYTES_PER_MS
        native, is_cut = self.info.routes.get(path), bounded and self.info.cuts_prompts
        ms, source = len(body.raw) / per_ms, None
        if native is None and may_stay(ms):
            source = read_prompt(path, body)
        else:
            fields = None if native is None else native.prompt
            read = partial(read_prompt, path) if native is None else partial(read_native, fields)
            source = await off_loop(partial(read, body), ms=ms)
        if source is None:
            return None
        try:
            prompt = await self._tokenise(source, path, body, ChatOwner(salt, adapter or lora, tenant))
        except CannotFit as error:
            if native is None and not is_cut:
                raise self._too_long(error.tokens, "has at least", source.param) from None
            return None  # the engine tells what is wrong, or cuts it, as below
        if prompt is None:
            return None
        tokens, limit = len(prompt.token_ids), self._context()
        if bounded and limit is not None and tokens > limit:
            if is_cut:
                return None
            if native is None:  # an engine's own routes have errors of their own
                raise self._too_long(tokens, "has", source.param)
        return prompt if salt is None is lora else replace(prompt, salt=salt, lora=lora)

    def decode(self, token_ids: TokenIds[int]) -> str | None:
        """The text of token ids, None without a tokenizer here."""
        return None if self.local is None else self.local.tokenizer.decode(token_ids)

    def _ask(self, path: str, body: JsonBody) -> Coroutine[Any, Any, ChatPrompt | None]:
        return self._engines.ask(self._asked[0](self), path, body)

    def _ask_renderer(self, path: str, body: JsonBody) -> Coroutine[Any, Any, ChatPrompt | None]:
        return self._engines.render(self._asked[1](self), path, body)

    async def _tokenise(
        self, source: PromptInput, path: str, body: JsonBody, owner: ChatOwner
    ) -> Prompt | None:
        match source:
            case CompletionInput():
                return await self._completion(source, path, body)
            case EmbeddedInput():
                return await self._embedded(source.data, path, body)
            case ChatInput() if source.is_text or self._strict:
                return await self._chat(source, body, owner)
            case AskedInput() if source.is_text:
                return self._made(await self._ask(path, body), "engine", _OTHER)
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
        self, source: ChatInput | AskedInput, path: str, body: JsonBody, owner: ChatOwner
    ) -> Prompt | None:
        """A prompt with media: all of it where an engine renders it, else the text before the first item."""
        price = body.n_values / VALUES_PER_MS
        prompt, parts = None, await off_loop(lambda: find_media(media_fields(body)), ms=price, what="media")
        if any(part.kind == "embeddings" for part in parts):
            # They are part of the identity of all blocks, also of those of the text before them.
            is_alone = all(part.kind == "embeddings" for part in parts)
            return await self._with_embeddings(path, body) if is_alone else None
        if all(part.is_lasting for part in parts):
            prompt = await self._rendered(source, path, body, owner)
        if prompt is not None and prompt.extra_ids is None:
            return self._made(prompt, "engine", _OTHER)
        if prompt is not None:
            # Never exact: its ids must not be sent in place of the images.
            return Prompt(prompt.token_ids, prompt.extra_ids, source="engine", media=True)
        if not isinstance(source, ChatInput):
            return None
        around = await self._around_media(source, body, owner)
        if around is None or not is_text_message(body.view("messages")[0]):  # it comes first
            return None
        return Prompt(around.token_ids[: around.before], source="local", whole=False)

    async def _with_embeddings(self, path: str, body: JsonBody) -> Prompt | None:
        """A prompt with embeddings. Never whole: an engine may convert them, and identify others then."""
        prompt = await self._engines.render(self._asked[2](self), path, body)
        if prompt is None:
            return None
        return Prompt(prompt.token_ids, prompt.extra_ids, source="engine", media=True, whole=False)

    async def _rendered(
        self, source: ChatInput | AskedInput, path: str, body: JsonBody, owner: ChatOwner
    ) -> ChatPrompt | None:
        """A prompt with media, as an engine renders it. Of a chat whose messages with media are known, the
        text behind these is encoded here."""
        around = None
        if isinstance(source, ChatInput) and self.local is not None:
            around = await self._around_media(source, body, owner, here=True)
        if around is None:
            return await self._ask_renderer(path, body)
        messages = body.view("messages")
        key = await off_loop(
            partial(head_key, body, messages, around, owner),
            ms=len(body.raw) / JSON_BYTES_PER_MS,
            what="media",
        )
        known = self._known_media.find(key, around)
        if known is None and (rendered := await self._ask_renderer(path, body)) is not None:
            self._known_media.learn(key, around, rendered)
            return rendered
        return known

    async def _around_media(
        self, source: ChatInput, body: JsonBody, owner: ChatOwner, *, here: bool = False
    ) -> TextAround | None:
        """The tokens around the messages with media: two different texts in their place share them. `here`:
        only if no engine is asked for them."""
        made = []
        for text in _ANY_TEXT:
            messages = texts_only(source.messages, text)
            if messages is None:
                return None
            chat = replace(source, messages=messages, n_media=0)
            tokens = await self._chat(chat, body.replace(messages=messages), owner, here=here)
            if tokens is None:
                return None
            made.append(tokens.token_ids)
        return TextAround.of(*made)

    async def _chat(
        self, source: ChatInput, body: JsonBody, owner: ChatOwner, *, here: bool = False
    ) -> Prompt | None:
        is_short = body.is_plain or len(body.raw) <= VALUES_PER_MS
        forms = forms_of(body) if is_short else await off_loop(partial(forms_of, body), ms=_look_ms(body))
        if self.local is not None and self.forms.rows[Form.SPECIAL_TOKENS].source != "local":
            forms |= await off_loop(partial(self.local.forms_in, source), ms=_look_ms(body))
        if self.local is not None and self.forms.source(forms) == "local":
            try:
                prompt, beginning = await self.local.turn(source, body, owner, self._context())
                return self._made(prompt, "local", forms, beginning)
            except ChatError:
                if self._strict:
                    raise
        # Also what cannot be rendered here: the engine may render more. Ids do not tell images apart.
        asked = await self._ask(CHAT_PATH, body) if source.is_text and not here else None
        return self._made(asked, "engine", forms)

    async def _completion(self, source: CompletionInput, path: str, body: JsonBody) -> Prompt | None:
        forms = _TEXT if source.add_special_tokens else _TEXT | _OTHER  # some engines ignore the field
        if isinstance(source.prompt, array):
            prompt: Prompt | None = Prompt(source.prompt, exact=True)
        elif self.local is not None and self.forms.source(forms) == "local":
            prompt = self._made(await self.local.text(source, self._context()), "local", forms)
        else:
            prompt = self._made(await self._ask(path, body), "engine", forms)
        if prompt is None:
            return None
        vocab_size = self.info.vocab_size
        if vocab_size is None:
            # Without the vocabulary size, fake ids look like text ids.
            return prompt if (source.explicit, source.table) == (None, None) else None
        ids = prompt.token_ids
        find = partial(self._tables.extra_ids, ids, source, vocab_size)
        extra_ids = await off_loop(find, ms=resolving_ms(ids, source.explicit, source.table))
        return prompt if extra_ids is None else replace(prompt, extra_ids=extra_ids)

    def _made(
        self,
        prompt: ChatPrompt | None,
        source: Source,
        forms: frozenset[Form],
        beginning: KnownBeginning | None = None,
    ) -> Prompt | None:
        """The prompt of these forms; None if it could not be made, or such prompts were found to be wrong."""
        exact = None if prompt is None else self.forms.is_exact(forms, source)
        if prompt is None or exact is None:
            return None
        return Prompt(
            prompt.token_ids, prompt.extra_ids, exact=exact, source=source, forms=forms, beginning=beginning
        )

    def _too_long(self, tokens: int, has: str, param: str) -> TooLong:
        limit = self._context() or 0
        return TooLong(
            f"this model's context is {limit} tokens; the prompt {has} {tokens} tokens",
            tokens,
            param=param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            more=self.info.too_long(tokens, limit),
        )


def _look_ms(body: JsonBody) -> float:
    """The milliseconds that a look at each value and text takes."""
    size = len(body.raw)
    return size / JSON_BYTES_PER_MS + (body.n_values / VALUES_PER_MS if size > VALUES_PER_MS else 0.0)
