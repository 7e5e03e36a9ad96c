"""An engine with its tokenizer, events and prompt tables: what the routes work on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_adapter.errors import EngineUnavailable, PromptTableError
from engine_adapter.off_loop import off_loop
from engine_adapter.prompt.chat import ChatPrompt, ChatTokenizer
from engine_adapter.prompt.encoders import MAX_CHARS_PER_TOKEN, CannotFit
from engine_adapter.prompt.extra_ids import (
    UINT64_MAX,
    Embeddings,
    TableRef,
    parse_embeddings,
    prompt_table_extra_id,
    read_embeds,
    reading_ms,
    resolve_extra_ids,
    resolving_ms,
)
from engine_adapter.torch_engine.answers import TokenBytes
from engine_adapter.torch_engine.engine import Counters, EngineCore
from engine_adapter.torch_engine.event_publisher import EventPublisher
from engine_adapter.torch_engine.grammar import Grammars
from engine_adapter.torch_engine.kv_cache import KvCache
from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.protocol import ApiError, ChatRequest, PromptRequest, embeds_of, prompt_of
from engine_adapter.torch_engine.requests import (
    Finished,
    GenerationRequest,
    Output,
    RequestFailed,
    RequestRefused,
    Scheduled,
)
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.types import ExtraIds, KvTarget, Retention, TokenIds

# --- the engine's Prometheus metrics: their names begin with `kvpin_engine_` ----------------------------

_COUNTERS = {
    "steps": "Model steps",
    "prompt_tokens": "Prompt tokens of scheduled requests",
    "cached_tokens": "Prompt tokens that came from cache",
    "generated_tokens": "Generated tokens",
    "preemptions": "Requests stopped because blocks ran out; they run again later",
}
_GAUGES = {"running": "Requests running", "waiting": "Requests waiting"}
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EngineMetrics:
    """The metrics of `GET /metrics`, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = Counters()
        self._stats: Mapping[str, Any] = {}
        self.first_token_seconds = Histogram(
            "kvpin_engine_first_token_seconds",
            "Seconds from a request's submission to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(self)

    def render(self, counters: Counters, stats: Mapping[str, Any]) -> bytes:
        """Prometheus text of `counters` and of cache `stats` as in `GET /kv/stats`; {} when unknown."""
        self._counters, self._stats = counters, stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics; called by the registry."""
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvpin_engine_{name}", text, value=getattr(self._counters, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(
                f"kvpin_engine_requests_{name}", text, value=getattr(self._counters, name)
            )
        finished = CounterMetricFamily("kvpin_engine_requests_finished", "Requests ended", labels=["reason"])
        for reason, count in list(self._counters.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        blocks = GaugeMetricFamily(
            "kvpin_engine_kv_blocks", "KV blocks by tier and state", labels=["tier", "state"]
        )
        for tier in ("gpu", "host"):
            for state in ("total", "free", "cached", "active"):
                count = self._stats.get(tier, {}).get(state)
                if count is not None:
                    blocks.add_metric([tier, state], count)
        yield blocks
        moved = CounterMetricFamily(
            "kvpin_engine_kv_blocks_moved", "KV blocks moved or dropped", labels=["what"]
        )
        for what, count in self._stats.get("blocks", {}).items():
            moved.add_metric([what], count)
        yield moved
        if "pinned_blocks" in self._stats:
            yield GaugeMetricFamily(
                "kvpin_engine_kv_pinned_blocks", "KV blocks under a pin", value=self._stats["pinned_blocks"]
            )


# --- p-tuning tables, and the embeddings behind the fake ids of a prompt --------------------------------

MAX_TOTAL_BYTES = 1 << 30
_MAX_ID_LENGTH = 256
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def embedding_tensor(embeddings: Embeddings, *, hidden_size: int, param: str) -> torch.Tensor:
    """`embeddings` as a tensor [rows, hidden] on the CPU, in their own type. Raises PromptTableError if the
    width is not the model's, or a value is NaN or infinite."""
    if embeddings.hidden != hidden_size:
        raise PromptTableError(
            f"{param} has {embeddings.hidden} columns; the model's hidden size is {hidden_size}", param=param
        )
    # A copy, as torch warns about memory it must not write to.
    flat = torch.frombuffer(bytearray(embeddings.values), dtype=_DTYPES[embeddings.dtype])
    tensor = flat.reshape(embeddings.rows, embeddings.hidden)
    if not bool(torch.isfinite(tensor).all()):
        raise PromptTableError(f"{param} holds NaN or infinite values", param=param)
    return tensor


@dataclass(frozen=True, slots=True)
class StoredTable(TableRef):
    """A table in the engine's memory."""

    table_id: str
    content: bytes = field(repr=False)  # digest of type, shape and values
    tensor: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A tokenised prompt, its extra ids (None for text alone) and the rows behind each of them."""

    token_ids: TokenIds[int]
    extra_ids: ExtraIds[int] | None
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False)


class PromptTables:
    """The tables of one engine. Used from the event loop only. An extra id stands for one content as long as
    the process lives, even after its table is deleted: KV of that content may still be cached under it."""

    def __init__(self, *, vocab_size: int, hidden_size: int) -> None:
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self.by_id: dict[str, StoredTable] = {}  # in the order they came
        self._content_of: dict[int, bytes] = {}

    def read(self, table_id: str, data: bytes, extra_id: int | None) -> StoredTable:
        """A table that is not stored yet: `data` are safetensors bytes, one tensor [rows, hidden]; without
        `extra_id`, that is derived from the content. Threads may call it. Raises PromptTableError if the
        bytes are no such table."""
        if not 0 < len(table_id) <= _MAX_ID_LENGTH:
            raise ApiError(f"the table id has 1 to {_MAX_ID_LENGTH} characters", param="table_id")
        embeddings = parse_embeddings(data, param="table")
        tensor = embedding_tensor(embeddings, hidden_size=self._hidden_size, param="table")
        if extra_id is None:
            extra_id = prompt_table_extra_id(embeddings)
        return StoredTable(extra_id, embeddings.rows, table_id, embeddings.content(), tensor)

    def keep(self, table: StoredTable) -> tuple[StoredTable, bool]:
        """Stores what `read` returned; returns it and whether it is new. The same table again changes
        nothing. Raises ApiError: 409 for an id or extra id that stands for other content, 413 beyond the
        limit."""
        table_id, extra_id = table.table_id, table.extra_id
        held = self.by_id.get(table_id)
        if held is not None and (held.content, held.extra_id) != (table.content, extra_id):
            fault = f"prompt table {table_id!r} exists with other content or another extra id"
            raise ApiError(fault, status=409, param="table_id")
        if self._content_of.get(extra_id, table.content) != table.content:
            fault = f"extra id {extra_id} has stood for other content in this process"
            raise ApiError(fault, status=409, param="extra_id")
        if held is not None:
            return held, False
        total = sum(other.tensor.nbytes for other in self.by_id.values())
        if total + table.tensor.nbytes > MAX_TOTAL_BYTES:
            fault = f"prompt tables would take more than {MAX_TOTAL_BYTES} bytes; delete some first"
            raise ApiError(fault, status=413)
        self.by_id[table_id] = table
        self._content_of[extra_id] = table.content
        return table, True

    def delete(self, table_id: str) -> bool:
        """Deletes a table; False when no table has that id."""
        return self.by_id.pop(table_id, None) is not None

    def resolve(
        self, token_ids: TokenIds[int], *, explicit: list[int] | None, table_id: str | None
    ) -> EnginePrompt:
        """A prompt of token ids with its extra ids and rows; see `resolve_extra_ids` for the rules. Raises
        PromptTableError for the first id that breaks one, and ApiError (400) for an unknown table. Threads
        may call it."""
        table = None if table_id is None else self.by_id.get(table_id)
        if table_id is not None and table is None:
            raise ApiError(f"there is no prompt table {table_id!r}", param="prompt_table")
        by_extra_id = {stored.extra_id: stored for stored in tuple(self.by_id.values())}
        resolved = resolve_extra_ids(
            token_ids, vocab_size=self._vocab_size, explicit=explicit, table=table, registered=by_extra_id
        )
        tensors = {identity: by_extra_id[ref.extra_id].tensor for identity, ref in resolved.tables.items()}
        return EnginePrompt(token_ids, resolved.extra_ids, tensors)


def parse_extra_id(text: str | None) -> int | None:
    """The `extra_id` of a query string, None without one; raises ApiError (400)."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 0 < (value := int(text[:21])) <= UINT64_MAX:
        raise ApiError("extra_id is an integer from 1 to 2**64-1", param="extra_id")
    return value


# --- the service ----------------------------------------------------------------------------------------

T = TypeVar("T")
# Characters of an embedding's data that are read in the time of one character of text.
DATA_PER_CHAR = 16


class EngineService:
    """A running engine with all that belongs to it."""

    def __init__(self, options: EmbeddedOptions) -> None:
        """Loads model and tokenizer and starts the engine; slow. Raises EngineSpecError."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.options = options
        self.model = load_model(
            options.model, device=options.device, dtype=options.dtype, served_name=options.served_model_name
        )
        self.tokenizer = ChatTokenizer.load(self.model.tokenizer)
        end = self.tokenizer.eos_token_id
        if end is not None and 0 <= end < self.model.vocab_size:  # the model's own files may not name it
            self.model = replace(self.model, eos_token_ids=self.model.eos_token_ids | {end})
        # Random name of this process. Another name means that all KV is gone.
        self.instance = secrets.token_hex(8)
        self.created = int(time.time())  # load time in seconds since the epoch
        self.publisher = EventPublisher(host=options.host)
        self.metrics = EngineMetrics()
        self.engine = EngineCore(self.model, options, self.publisher.publish)
        self.token_bytes = TokenBytes(self.tokenizer)
        added = self.tokenizer.transformers.added_tokens_decoder
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab_size, ends = self.model.vocab_size, self.model.eos_token_ids
        self.grammars = Grammars(self.tokenizer, vocab_size=vocab_size, ends=ends)
        self.grammars.load()
        self.tables = PromptTables(vocab_size=vocab_size, hidden_size=self.model.hidden_size)
        self.engine.start()

    def close(self) -> None:
        """Ends the engine and its sockets. Blocks until the running step is done."""
        self.engine.stop()
        self.grammars.close()
        self.publisher.close()

    async def call(self, fn: Callable[[KvCache], T]) -> T:
        """Runs `fn` on the cache between two steps. Raises EngineUnavailable when the engine has ended."""
        return await asyncio.wrap_future(self.engine.call(fn))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model other than the served one."""
        if name is not None and name != self.model.name:
            fault = f"the model {name!r} is not served here; {self.model.name!r} is"
            raise ApiError(fault, status=404, param="model", code="model_not_found")

    async def prompt(self, request: PromptRequest) -> EnginePrompt:
        """Tokenises a request. Raises ApiError, ChatError or PromptTableError for bad input."""
        self.check_model(request.model)
        if isinstance(request, ChatRequest):
            return await self._chat_prompt(request)
        embeds = embeds_of(request)
        if embeds is not None:
            return await off_loop(partial(self._embedded_prompt, embeds), ms=reading_ms(embeds))
        prompt = prompt_of(request.prompt)
        if isinstance(prompt, str):
            encode = partial(self.encode, prompt, "prompt", special=request.add_special_tokens)
            prompt = await self.tokenizer.off_loop(len(prompt), encode)
        named = request.prompt_table
        resolve = partial(self.tables.resolve, prompt, explicit=request.extra_ids, table_id=named)
        return await off_loop(resolve, ms=resolving_ms(prompt, request.extra_ids, named))

    def encode(self, text: str, param: str, *, special: bool | None) -> TokenIds[int]:
        """The token ids of a text, with special tokens unless that is False. Raises ApiError (400) for a text
        that has none, or clearly more than fit."""
        limit = self.engine.max_model_len
        try:
            (found,) = self.tokenizer.encode_all([text], add_special_tokens=special is not False, limit=limit)
        except CannotFit as error:
            raise _too_long(f"{error}: the context has {limit}", param) from error
        if not found:
            raise ApiError(f"{param} has no tokens", param=param)
        return found

    async def _chat_prompt(self, request: ChatRequest) -> EnginePrompt:
        size, limit = 0, self.engine.max_model_len
        for name in ("messages", "tools", "chat_template_kwargs"):
            chars, data = _sizes(getattr(request, name), has_embeddings=name == "messages")
            if chars > limit * MAX_CHARS_PER_TOKEN:  # refused before any work
                raise _too_long(f"{chars} characters exceed the context of {limit} tokens", name)
            size += chars + data // DATA_PER_CHAR
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

    def _embedded_prompt(self, data: object) -> EnginePrompt:
        rows = read_embeds(data, param="prompt_embeds", hidden_size=self.model.hidden_size)
        return self._with_rows(ChatPrompt.of_embeddings(rows, self.model.vocab_size), "prompt_embeds")

    def _with_rows(self, prompt: ChatPrompt, param: str) -> EnginePrompt:
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


def _beyond(prompt_tokens: int, limit: int) -> str:
    return f"a prompt of {prompt_tokens} tokens exceeds the context of {limit}"


def _too_long(message: str, param: str) -> ApiError:
    return ApiError(message, param=param, code="context_length_exceeded")


def _sizes(field: object, *, has_embeddings: bool) -> tuple[int, int]:
    """Two counts of a field, at any depth: characters of texts and names, with one for each value; and of
    the data of embeddings, if it may have any: it is no part of the prompt's text, and takes time to read
    all the same."""
    size = of_data = 0
    pending = [field]
    while pending:
        value = pending.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            size += sum(map(len, value))
            data = value.get("data") if has_embeddings and value.get("type") == "prompt_embeds" else None
            if isinstance(data, str):
                of_data += len(data)
                size -= len(data)
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return size, of_data


# --- the bridge between the event loop and the engine thread, for the choices of one answer -------------


class Generation:
    """Submits one request per choice on entry; cancels those that are not done on exit.

    Choices of one prompt share its KV: the engine computes a block for the first of them, and the others
    wait for it. Outputs wait here until they are read. `max_tokens` bounds their number, and a client that
    reads slowly delays nobody else.
    """

    def __init__(self, engine: EngineCore, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, list[Output]] = {}
        self._wake = asyncio.Event()
        self._open: set[int] = set()
        self.cached_tokens = 0  # prompt tokens that came from cache, for the first choice

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

    async def outputs(self) -> dict[int, list[Output]]:
        """The outputs of each choice since the last call, of at least one. Finished is the last of a choice.
        Raises RequestFailed or RequestRefused if the engine failed on a request or gave it up, and
        EngineUnavailable if it stopped."""
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, {}
        for index, outputs in pending.items():
            if isinstance(last := outputs[-1], Finished):
                self._open.discard(index)
                if last.reason == "error":
                    raise RequestFailed(f"the engine failed on this request: {last.message}")
                if last.reason == "refused":
                    raise RequestRefused(last.message or "it cannot be served", param=last.param or "prompt")
                if last.reason == "cancelled":
                    raise EngineUnavailable(last.message or "the engine is shutting down")
        return pending

    def _cancel_all(self) -> None:
        for index in list(self._open):
            self.cancel(index)

    def _from_engine(self, index: int, outputs: list[Output]) -> None:
        self._loop.call_soon_threadsafe(self._arrive, index, outputs)

    def _arrive(self, index: int, outputs: list[Output]) -> None:
        if index not in self._open:
            return
        if not index and isinstance(first := outputs[0], Scheduled):
            self.cached_tokens = first.cached_tokens
        self._pending.setdefault(index, []).extend(outputs)
        self._wake.set()
