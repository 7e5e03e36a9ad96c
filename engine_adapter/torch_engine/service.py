"""An engine with its tokenizer, events and prompt tables: what the routes work on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from engine_adapter.errors import EngineUnavailable
from engine_adapter.off_loop import off_loop
from engine_adapter.prompt.chat import ChatPrompt, ChatTokenizer
from engine_adapter.prompt.encoders import MAX_CHARS_PER_TOKEN
from engine_adapter.prompt.extra_ids import read_embeds, reading_ms
from engine_adapter.torch_engine.detokenize import TokenBytes
from engine_adapter.torch_engine.engine import EngineCore
from engine_adapter.torch_engine.event_publisher import EventPublisher
from engine_adapter.torch_engine.grammar import Grammars
from engine_adapter.torch_engine.kv_cache import KvCache
from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.prompt_tables import EnginePrompt, PromptTables, embedding_tensor
from engine_adapter.torch_engine.protocol import ChatRequest, PromptRequest, embeds_of, prompt_of
from engine_adapter.torch_engine.requests import (
    Finished,
    GenerationRequest,
    Output,
    PromptScores,
    RequestFailed,
    RequestRefused,
    Scheduled,
    Token,
)
from engine_adapter.torch_engine.runner import LoadedModel
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.torch_engine.web import ApiError
from engine_adapter.types import KvTarget, Retention

T = TypeVar("T")
# Characters of an embedding's data that are read in the time of one character of text.
DATA_PER_CHAR = 16


class EngineService:
    """A running engine with all that belongs to it.

    Attributes:
        instance: random name of this process. Another name means that all KV is gone.
        created: load time in seconds since the epoch.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: ChatTokenizer,
        options: EmbeddedOptions,
    ) -> None:
        """Allocates the engine, but does not start it. Raises EngineSpecError for options that do not fit."""
        self.instance = secrets.token_hex(8)
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.publisher = EventPublisher(host=options.host)
        self.engine = EngineCore(model, options, self.publisher.publish)
        self.token_bytes = TokenBytes(tokenizer)
        self.grammars = Grammars(tokenizer, vocab_size=model.vocab_size, ends=model.eos_token_ids)
        self.tables = PromptTables(vocab_size=model.vocab_size, hidden_size=model.hidden_size)

    @classmethod
    def build(cls, options: EmbeddedOptions) -> EngineService:
        """Loads model and tokenizer and starts the engine; slow. Raises EngineSpecError."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        model = load_model(
            options.model,
            device=options.device,
            dtype=options.dtype,
            served_name=options.served_model_name,
        )
        service = cls(model, ChatTokenizer.load(model.tokenizer), options)
        service.grammars.load()
        service.engine.start()
        return service

    def close(self) -> None:
        """Ends the engine and its sockets. Blocks until the running step is done."""
        self.engine.stop()
        self.grammars.close()
        self.publisher.close()

    async def call(self, fn: Callable[[KvCache], T]) -> T:
        """Runs `fn` on the cache between two steps. Raises EngineUnavailable when the engine has ended."""
        future: Future[T] = self.engine.call(fn)
        return await asyncio.wrap_future(future)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model other than the served one."""
        if name is not None and name != self.model.name:
            raise ApiError(
                f"the model {name!r} is not served here; {self.model.name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def prompt(self, request: PromptRequest) -> EnginePrompt:
        """Tokenises a request. Raises ApiError, ChatError or PromptTableError for bad input."""
        self.check_model(request.model)
        if isinstance(request, ChatRequest):
            return await self._chat_prompt(request)
        embeds = embeds_of(request)
        if embeds is not None:
            return await self._embedded_prompt(embeds)
        prompt = prompt_of(request.prompt)
        if isinstance(prompt, str):
            self.check_chars(len(prompt), "prompt")
            special = True if request.add_special_tokens is None else request.add_special_tokens
            token_ids = await self.tokenizer.off_loop(
                len(prompt), lambda: self.tokenizer.encode(prompt, add_special_tokens=special)
            )
            if not token_ids:
                raise ApiError("prompt has no tokens", param="prompt")
        else:
            token_ids = prompt
        explicit: list[Any] | None = request.extra_ids
        return self.tables.resolve(token_ids, explicit=explicit, table_id=request.prompt_table)

    async def _chat_prompt(self, request: ChatRequest) -> EnginePrompt:
        size = 0
        for name in ("messages", "tools", "chat_template_kwargs"):
            text, data = _sizes(getattr(request, name))
            self.check_chars(text, name)
            size += text + data // DATA_PER_CHAR
        chat = await self.tokenizer.off_loop(
            size,
            lambda: self.tokenizer.chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                vocab_size=self.model.vocab_size,
                hidden_size=self.model.hidden_size,
            ),
        )
        if not chat.token_ids:
            raise ApiError("the chat template renders these messages to nothing", param="messages")
        return self._with_rows(chat, "messages")

    async def _embedded_prompt(self, data: object) -> EnginePrompt:
        def read() -> EnginePrompt:
            rows = read_embeds(data, param="prompt_embeds", hidden_size=self.model.hidden_size)
            prompt = ChatPrompt.of_embeddings(rows, self.model.vocab_size)
            return self._with_rows(prompt, "prompt_embeds")

        return await off_loop(read, ms=reading_ms(data))

    def _with_rows(self, prompt: ChatPrompt, param: str) -> EnginePrompt:
        """The prompt with its embeddings as tensors."""
        tensors = {
            identity: embedding_tensor(rows, hidden_size=self.model.hidden_size, param=param)
            for identity, rows in prompt.embeddings.items()
        }
        return EnginePrompt(prompt.token_ids, prompt.extra_ids, tensors)

    def check_length(self, request: PromptRequest, prompt_tokens: int) -> None:
        """Raises ApiError (400) if prompt and requested answer do not fit into the context."""
        self.check_fits(prompt_tokens, request.prompt_name)
        limit, asked = self.engine.max_model_len, request.asked_tokens or 0
        if prompt_tokens + asked > limit:
            name = request.limit_name
            raise _too_long(f"{name} of {asked} after {_beyond(prompt_tokens, limit)}", name)

    def check_fits(self, prompt_tokens: int, param: str) -> None:
        """Raises ApiError (400) if the context has no room for the prompt and one token more."""
        if prompt_tokens >= self.engine.max_model_len:
            raise _too_long(_beyond(prompt_tokens, self.engine.max_model_len), param)

    def check_chars(self, chars: int, param: str) -> None:
        """Refuses a text that is too long for any tokenizer, before any work."""
        limit = self.engine.max_model_len
        if chars > limit * MAX_CHARS_PER_TOKEN:
            raise _too_long(f"{chars} characters exceed the context of {limit} tokens", param)


def _beyond(prompt_tokens: int, limit: int) -> str:
    return f"a prompt of {prompt_tokens} tokens exceeds the context of {limit}"


def _too_long(message: str, param: str) -> ApiError:
    return ApiError(message, param=param, code="context_length_exceeded")


def _sizes(field: object) -> tuple[int, int]:
    """Two counts of a field, at any depth: characters of texts and names, with one for each value; and of
    embeddings' data, which is no part of the prompt's text, and takes time to read all the same."""
    size = of_data = 0
    pending = [field]
    while pending:
        value = pending.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            size += sum(map(len, value))
            data = value.get("data")
            of_data += len(data) if isinstance(data, str) else 0
            pending += [item for key, item in value.items() if key != "data"]
        elif isinstance(value, list):
            pending += value
    return size, of_data


# --- the bridge between the event loop and the engine thread, for the choices of one answer -------------

Outputs = list[Token | PromptScores | Finished]


class Generation:
    """Submits one request per choice on entry; cancels those that are not done on exit.

    Choices of one prompt share its KV: the engine computes a block for the first of them, and the others
    wait for it. Outputs wait here until they are read. `max_tokens` bounds their number, and a client that
    reads slowly delays nobody else.

    Attributes:
        cached_tokens: prompt tokens that came from cache, for the first choice.
    """

    def __init__(self, engine: EngineCore, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, list[Output]] = {}
        self._wake = asyncio.Event()
        self._open: set[int] = set()
        self.cached_tokens = 0

    async def __aenter__(self) -> Self:
        """Raises RequestRefused or EngineUnavailable."""
        try:
            for index, request in enumerate(self._requests):
                self._engine.submit(request, partial(self._from_engine, index))
                self._open.add(index)
        except Exception:
            self._cancel_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_all()

    def cancel(self, index: int) -> None:
        """Ends one choice: nothing more of it is read."""
        if index in self._open:
            self._open.remove(index)
            self._engine.cancel(self._requests[index].request_id)
        self._pending.pop(index, None)

    def await_turn(self, index: int, seconds: float) -> None:
        """Retains the KV of the prompt of a choice that has ended: its next turn is expected that soon."""
        request = self._requests[index]
        target = KvTarget(request.token_ids, request.extra_ids, request.cache_salt)
        retention = Retention(1, seconds, request.retention.owner)
        with suppress(EngineUnavailable):  # it stops, and the answer is whole
            self._engine.call(lambda cache: cache.await_turn(target, retention, time.monotonic()))

    async def outputs(self) -> dict[int, Outputs]:
        """The outputs of each choice since the last call, of at least one. Finished is the last of a choice.

        Raises:
            RequestFailed, RequestRefused: the engine failed on a request, or gave it up.
            EngineUnavailable: the engine stopped.
        """
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, {}
        found: dict[int, Outputs] = {}
        for index, outputs in pending.items():
            found[index] = []
            for output in outputs:
                if isinstance(output, Scheduled):
                    if not index:
                        self.cached_tokens = output.cached_tokens
                    continue
                found[index].append(output)
                if isinstance(output, Finished):
                    self._open.discard(index)
                    _check(output)
        return found

    def _cancel_all(self) -> None:
        for index in list(self._open):
            self.cancel(index)

    def _from_engine(self, index: int, outputs: list[Output]) -> None:
        """Hands the outputs over; runs in the engine thread."""
        self._loop.call_soon_threadsafe(self._arrive, index, outputs)

    def _arrive(self, index: int, outputs: list[Output]) -> None:
        if index not in self._open:
            return
        self._pending.setdefault(index, []).extend(outputs)
        self._wake.set()


def _check(last: Finished) -> None:
    if last.reason == "error":
        raise RequestFailed(f"the engine failed on this request: {last.message}")
    if last.reason == "refused":
        raise RequestRefused(last.message or "it cannot be served", param=last.param or "prompt")
    if last.reason == "cancelled":
        raise EngineUnavailable(last.message or "the engine is shutting down")
